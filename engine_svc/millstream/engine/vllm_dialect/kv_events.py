"""What the prefix cache holds and how it changes, as KvEventBatch messages.

Each subscriber's batches are numbered from 1. The first ones say what is cached when it subscribes,
as one snapshot; the live events follow without a gap. No history is kept: whoever comes back with
a number is told to start again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import assert_never

from smg_grpc_proto.generated import common_pb2 as common

from millstream.engine.scheduling.prefix import BlockEvent, BlockName, BlockRemoved, BlockStored

EVENTS_PER_BATCH = 1024


class Batches:
    """One subscriber's numbers."""

    def __init__(self) -> None:
        self._sequence_number = 0
        self._event_id = 0

    def snapshot(self, cached: list[BlockEvent]) -> Iterator[common.KvEventBatch]:
        """What is cached: a "cleared" first, then every block, a prefix before its continuations.
        Its events have no ids."""
        pieces = _pieces(cached) or [[]]
        for index, piece in enumerate(pieces):
            batch = self._batch()
            batch.snapshot.index = index
            batch.snapshot.count = len(pieces)
            batch.snapshot.blocks = len(cached)
            if index == 0:
                batch.events.add().cleared.SetInParent()
            batch.events.extend(_message(event, 0) for event in piece)
            yield batch

    def live(self, events: list[BlockEvent]) -> Iterator[common.KvEventBatch]:
        """What changed."""
        for piece in _pieces(events):
            batch = self._batch()
            for event in piece:
                self._event_id += 1
                batch.events.append(_message(event, self._event_id))
            yield batch

    def _batch(self) -> common.KvEventBatch:
        self._sequence_number += 1
        return common.KvEventBatch(
            sequence_number=self._sequence_number, timestamp=time.time(), dp_rank=0
        )


def block_hash(digest: bytes) -> int:
    """The 64 bits by which this protocol names a prefix, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _pieces(events: list[BlockEvent]) -> list[list[BlockEvent]]:
    return [
        events[start : start + EVENTS_PER_BATCH]
        for start in range(0, len(events), EVENTS_PER_BATCH)
    ]


def _message(event: BlockEvent, event_id: int) -> common.KvCacheEvent:
    match event:
        case BlockStored(name):
            return common.KvCacheEvent(event_id=event_id, stored=_stored(name))
        case BlockRemoved(digest):
            removed = common.KvBlocksRemoved(block_hashes=[block_hash(digest)])
            return common.KvCacheEvent(event_id=event_id, removed=removed)
        case _:
            assert_never(event)


def _stored(name: BlockName) -> common.KvBlocksStored:
    token_ids = array("I", name.token_ids)
    block = common.KvBlock(
        block_hash=block_hash(name.digest), token_ids=token_ids, block_size=len(token_ids)
    )
    return common.KvBlocksStored(
        blocks=[block],
        parent_block_hash=None if name.parent is None else block_hash(name.parent),
        cache_salt=name.cache_salt or None,
    )
