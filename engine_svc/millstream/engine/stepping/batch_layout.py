"""What a step's batch is, but for the state of the slots: on the host, and on the device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millstream.engine.plan import Plan
from millstream.engine.stepping.uploads import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """Who computes how many tokens in a step: S sequences, chunks first, then decodes."""

    plan: Plan
    slots: Ints  # [S]
    query_lens: Ints  # [S]
    query_starts: Ints  # [S + 1]
    samples: npt.NDArray[np.bool_]  # [S]: whose next token is sampled
    sample_slots: Ints  # [R]
    has_filters: bool  # some of them sample with top-k, top-p or min-p
    special: bool  # logits of some sequences may be edited or scored (edits/slot_edits.py)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step with chunks, filled up to be run as a CUDA graph (chunk_graphs.py)."""

    tokens: int  # of chunks
    chunks: int  # one of them is never used
    decodes: int

    @property
    def sequences(self) -> int:
        return self.chunks + self.decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Of a layout that is filled up."""

    bucket: Bucket
    sampled: torch.Tensor  # [R] int64, into the S sequences: those whose sampled token counts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """What a batch of S sequences and T tokens, R of them sampling, is but for the slots' state.

    All S sample where it is padded.
    """

    host: HostLayout
    slots: torch.Tensor  # [S] int64
    rows: torch.Tensor  # [T] int64: the sequence of each token
    offsets: torch.Tensor  # [T] int64: the token's place among its sequence's tokens
    query_starts: torch.Tensor  # [S + 1] int32
    chunk_token_ids: torch.Tensor  # [tokens of all chunks] int64
    sample_rows: torch.Tensor  # [R] int64, into the T tokens
    sample_slots: torch.Tensor  # [R] int64
    padded: Padded | None = None

    def decodes_as(self, plan: Plan) -> bool:
        """Whether a plan's decodes are this batch's: the scheduler keeps a tuple that stays."""
        return self.host.plan.decode_slots is plan.decode_slots


def layout_arrays(host: HostLayout) -> list[Ints]:
    """What layout_of needs on the device."""
    rows = np.repeat(np.arange(len(host.slots)), host.query_lens)
    return [
        host.slots,
        rows,
        np.arange(len(rows)) - host.query_starts[rows],
        host.query_starts,
        _chunk_token_ids(host.plan),
        host.query_starts[1:][host.samples] - 1,
        host.sample_slots,
    ]


def _chunk_token_ids(plan: Plan) -> Ints:
    """[tokens of all chunks]. An array takes the ids of a tuple twice as fast as numpy does."""
    parts = [array("I", chunk.token_ids) for chunk in plan.chunks]
    return np.frombuffer(b"".join(parts), dtype=np.uint32).astype(np.int64)


def padded_arrays(host: HostLayout, bucket: Bucket, padding_slot: int) -> list[Ints]:
    """What layout_of needs for a step in a bucket; the last array is Padded.sampled. Every sequence
    samples; the tokens of those that are not in it are left out of the result."""
    num_chunks = len(host.plan.chunks)
    num_decodes = len(host.slots) - num_chunks
    slots = np.full(bucket.sequences, padding_slot, dtype=np.int64)
    slots[:num_chunks] = host.slots[:num_chunks]
    slots[bucket.chunks : bucket.chunks + num_decodes] = host.slots[num_chunks:]
    starts = np.full(bucket.sequences + 1, host.query_starts[num_chunks], dtype=np.int64)
    starts[: num_chunks + 1] = host.query_starts[: num_chunks + 1]
    starts[bucket.chunks + 1 :] = bucket.tokens + 1 + np.arange(bucket.decodes)
    num_tokens = int(starts[bucket.chunks])
    # Tokens that pad belong to an unused chunk: the last.
    rows = np.full(bucket.tokens + bucket.decodes, bucket.chunks - 1, dtype=np.int64)
    rows[:num_tokens] = np.repeat(np.arange(num_chunks), host.query_lens[:num_chunks])
    rows[bucket.tokens :] = bucket.chunks + np.arange(bucket.decodes)
    offsets = np.zeros(len(rows), dtype=np.int64)
    offsets[:num_tokens] = np.arange(num_tokens) - host.query_starts[rows[:num_tokens]]
    token_ids = np.zeros(bucket.tokens, dtype=np.int64)
    token_ids[:num_tokens] = _chunk_token_ids(host.plan)
    sampled = np.flatnonzero(host.samples)
    sampled[sampled >= num_chunks] += bucket.chunks - num_chunks
    last_rows = np.maximum(starts[1:] - 1, 0)
    return [slots, rows, offsets, starts, token_ids, last_rows, sampled]


def layout_of(host: HostLayout, bucket: Bucket | None, *parts: torch.Tensor) -> BatchLayout:
    slots, rows, offsets, query_starts, chunk_token_ids, sample_rows, last = parts
    return BatchLayout(
        host=host,
        slots=slots,
        rows=rows,
        offsets=offsets,
        query_starts=query_starts.int(),
        chunk_token_ids=chunk_token_ids,
        sample_rows=sample_rows,
        sample_slots=last if bucket is None else slots,
        padded=None if bucket is None else Padded(bucket=bucket, sampled=last),
    )
