"""A plan as int64 words, for the ranks that carry it out beside rank 0, and back.

    step, flags, starts, appends, chunks, decodes        how many of each follow
    a start:   slot, prompt tokens, computed tokens, temperature's bits, seed, blocks, their ids
    an append: slot, block id
    a chunk:   slot, start, samples, first target, tokens, targets, ids of both
    a decode:  slot

Decodes that are the last plan's are not sent again: a steady step is six words. Of how a request
samples, the other ranks need to know what a row needs that is sampled where the shards of its
logits lie (shard_sampling.py); all other rows rank 0 samples. No words at all ask for a piece of
what later steps would have to do first (plan.PreparesAhead).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from millstream.engine.plan import Chunk, Plan, SlotStart
from millstream.engine.request import Sampling

PREPARE_AHEAD: Sequence[int] = ()
_HEADER_WORDS = 6
_WHOLE_ROWS, _SAME_DECODES = 1, 2
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<q")


class PlanEncoder:
    """Rank 0's side; plans come in the order of their steps."""

    def __init__(self) -> None:
        self._decode_slots: tuple[int, ...] = ()

    def encode(self, plan: Plan) -> list[int]:
        flags = _WHOLE_ROWS if plan.whole_rows else 0
        decode_slots = plan.decode_slots
        if decode_slots is self._decode_slots:  # the scheduler keeps a tuple that stays
            flags |= _SAME_DECODES
        self._decode_slots = decode_slots
        words = [
            plan.step,
            flags,
            len(plan.starts),
            len(plan.block_appends),
            len(plan.chunks),
            len(decode_slots),
        ]
        for start in plan.starts:
            words += _start_words(start)
        for append in plan.block_appends:
            words += append
        for chunk in plan.chunks:
            words += (chunk.slot, chunk.start, chunk.samples, chunk.first_target)
            words += (len(chunk.token_ids), len(chunk.target_ids))
            words += chunk.token_ids
            words += chunk.target_ids
        if not flags & _SAME_DECODES:
            words += decode_slots
        return words


class PlanDecoder:
    """The other ranks' side."""

    def __init__(self) -> None:
        self._decode_slots: tuple[int, ...] = ()

    def decode(self, record: array[int]) -> Plan | None:
        """None: PREPARE_AHEAD."""
        if not record:
            return None
        step, flags, num_starts, num_appends, num_chunks, num_decodes = record[:_HEADER_WORDS]
        words = _Words(record)
        starts = tuple(_start(words) for _ in range(num_starts))
        appends = words.take(2 * num_appends)
        chunks = tuple(_chunk(words) for _ in range(num_chunks))
        if not flags & _SAME_DECODES:
            self._decode_slots = tuple(words.take(num_decodes))
        return Plan(
            step=step,
            starts=starts,
            block_appends=tuple(zip(appends[::2], appends[1::2], strict=True)),
            chunks=chunks,
            decode_slots=self._decode_slots,
            whole_rows=bool(flags & _WHOLE_ROWS),
        )


class _Words:
    """A record, read from its header on."""

    def __init__(self, record: array[int]) -> None:
        self._record = record
        self._at = _HEADER_WORDS

    def take(self, count: int) -> Sequence[int]:
        self._at += count
        return self._record[self._at - count : self._at]


def _start_words(start: SlotStart) -> tuple[int, ...]:
    sampling = start.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return (
        start.slot,
        start.min_position - sampling.min_tokens,
        start.num_computed_tokens,
        _WORD.unpack(_DOUBLE.pack(temperature))[0],
        sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed,  # the same bits
        len(start.block_ids),
        *start.block_ids,
    )


def _start(words: _Words) -> SlotStart:
    slot, prompt_tokens, computed, temperature, seed, num_blocks = words.take(6)
    return SlotStart(
        slot=slot,
        sampling=Sampling(
            max_tokens=1,
            temperature=_DOUBLE.unpack(_WORD.pack(temperature))[0],
            seed=seed & (1 << 64) - 1,
        ),
        min_position=prompt_tokens,
        banned_token_ids=(),
        num_computed_tokens=computed,
        block_ids=tuple(words.take(num_blocks)),
    )


def _chunk(words: _Words) -> Chunk:
    slot, start, samples, first_target, num_tokens, num_targets = words.take(6)
    return Chunk(
        slot=slot,
        start=start,
        token_ids=tuple(words.take(num_tokens)),
        samples=bool(samples),
        first_target=first_target,
        target_ids=tuple(words.take(num_targets)),
    )
