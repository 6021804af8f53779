"""What a step's batch is, but for the state of the slots: on the host, and on the device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millstream.engine.plan import Plan
from millstream.engine.uploads import Ints


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
    special: bool  # logits of some sequences may be edited or scored (slot_edits.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """What a batch of S sequences and T tokens, R of them sampling, is but for the slots' state."""

    host: HostLayout
    slots: torch.Tensor  # [S] int64
    rows: torch.Tensor  # [T] int64: the sequence of each token
    offsets: torch.Tensor  # [T] int64: the token's place among its sequence's tokens
    query_starts: torch.Tensor  # [S + 1] int32
    chunk_token_ids: torch.Tensor  # [tokens of all chunks] int64
    sample_rows: torch.Tensor  # [R] int64, into the T tokens
    sample_slots: torch.Tensor  # [R] int64

    def decodes_as(self, plan: Plan) -> bool:
        """Whether a plan's decodes are this batch's: the scheduler keeps a tuple that stays."""
        return self.host.plan.decode_slots is plan.decode_slots


def layout_arrays(host: HostLayout) -> list[Ints]:
    """What layout_of needs on the device."""
    rows = np.repeat(np.arange(len(host.slots)), host.query_lens)
    chunks = host.plan.chunks
    tokens = itertools.chain.from_iterable(chunk.token_ids for chunk in chunks)
    return [
        host.slots,
        rows,
        np.arange(len(rows)) - host.query_starts[rows],
        host.query_starts,
        np.fromiter(tokens, dtype=np.int64, count=len(rows) - len(host.plan.decode_slots)),
        host.query_starts[1:][host.samples] - 1,
        host.sample_slots,
    ]


def layout_of(host: HostLayout, *parts: torch.Tensor) -> BatchLayout:
    slots, rows, offsets, query_starts, chunk_token_ids, sample_rows, sample_slots = parts
    return BatchLayout(
        host=host,
        slots=slots,
        rows=rows,
        offsets=offsets,
        query_starts=query_starts.int(),
        chunk_token_ids=chunk_token_ids,
        sample_rows=sample_rows,
        sample_slots=sample_slots,
    )
