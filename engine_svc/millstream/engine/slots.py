"""What a runner keeps of each slot, and the batches that it makes of plans.

State that a step changes (computed tokens, last token) lives on the device and is read there by the
next step: a decode's input never visits the host. What the host can know without the device, it
keeps in numpy: lengths and parameters, by slot. A plan's composition goes up in one copy;
a steady decode step uploads nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millstream.engine.batch import ForwardBatch
from millstream.engine.plan import Plan, SlotStart
from millstream.engine.sampling import ALL_GREEDY, Ban, SamplingRows

Ints = npt.NDArray[np.int64]

# Columns of the per-slot tables.
_COMPUTED, _PROMPT_LEN, _MIN_POSITION, _SEED, _TOP_K = range(5)
_TEMPERATURE, _TOP_P, _MIN_P = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Who computes how many tokens in a step: what a batch is, but for the state of the slots.

    S sequences with T tokens: chunks first, then decodes; R of them sample.
    """

    plan: Plan
    host_slots: Ints  # [S]
    host_query_lens: Ints  # [S]
    query_lens: tuple[int, ...]
    slots: torch.Tensor  # [S] int64
    rows: torch.Tensor  # [T] int64: the sequence of each token
    offsets: torch.Tensor  # [T] int64: the token's place among its sequence's tokens
    query_starts: torch.Tensor  # [S + 1] int32
    chunk_token_ids: torch.Tensor  # [tokens of all chunks] int64
    decode_slots: torch.Tensor  # [num_decodes] int64
    sample_rows: torch.Tensor  # [R] int64, into the T tokens
    sample_slots: torch.Tensor  # [R] int64
    host_sample_slots: Ints  # [R]
    sampling: SamplingRows


class SlotTable:
    """State of max_num_seqs slots on one device; used by one thread."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        dynamic_rope: bool = False,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._dynamic_rope = dynamic_rope
        self._host_ints: Ints = np.zeros((max_num_seqs, 5), dtype=np.int64)
        self._host_floats = np.zeros((max_num_seqs, 3), dtype=np.float32)
        self._num_blocks = [0] * max_num_seqs
        self._banned: list[tuple[int, ...]] = [()] * max_num_seqs
        self._ints = torch.zeros(max_num_seqs, 5, dtype=torch.int64, device=device)
        self._floats = torch.zeros(max_num_seqs, 3, dtype=torch.float32, device=device)
        self._computed = self._ints[:, _COMPUTED]
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._table_width = -(-max_model_len // block_size)
        self._block_tables = torch.zeros(
            max_num_seqs, self._table_width, dtype=torch.int32, device=device
        )
        self._steady: BatchLayout | None = None

    # ---- a plan comes

    def apply(self, plan: Plan) -> BatchLayout:
        """Takes over a plan's starts and block appends; returns what the step computes."""
        if plan.starts:
            self._start(plan.starts)
        if plan.starts or plan.block_appends:
            self._write_blocks(plan)
        steady = self._steady
        if steady is not None and steady.plan.decode_slots is plan.decode_slots and not plan.chunks:
            self._steady = self._without_stale_ban(steady)
            return self._steady
        layout = self._lay_out(plan)
        self._steady = None if plan.chunks else layout
        return layout

    def _start(self, starts: Sequence[SlotStart]) -> None:
        self._steady = None
        slots = np.array([start.slot for start in starts], dtype=np.int64)
        for start in starts:
            sampling = start.sampling
            self._host_ints[start.slot] = (
                start.num_computed_tokens,
                start.min_position - sampling.min_tokens,
                start.min_position,
                sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed,  # same bits
                sampling.top_k,
            )
            self._host_floats[start.slot] = (
                0.0 if sampling.greedy else sampling.temperature,
                sampling.top_p,
                sampling.min_p,
            )
            self._num_blocks[start.slot] = 0
            self._banned[start.slot] = start.banned_token_ids
        device_slots = self._upload(slots)
        self._ints.index_copy_(0, device_slots, self._upload(self._host_ints[slots]))
        self._floats.index_copy_(0, device_slots, self._upload(self._host_floats[slots]))

    def _write_blocks(self, plan: Plan) -> None:
        """Appends to the block tables, of starts in full and then of the others one by one."""
        places: list[int] = []
        block_ids: list[int] = []
        for slot, new in itertools.chain(
            ((start.slot, start.block_ids) for start in plan.starts),
            ((slot, (block_id,)) for slot, block_id in plan.block_appends),
        ):
            first = self._num_blocks[slot]
            self._num_blocks[slot] = first + len(new)
            assert first + len(new) <= self._table_width, "more blocks than max_model_len fills"
            base = slot * self._table_width + first
            places.extend(range(base, base + len(new)))
            block_ids.extend(new)
        where, what = self._upload(np.array((places, block_ids), dtype=np.int64))
        self._block_tables.view(-1).index_copy_(0, where, what.int())

    def _lay_out(self, plan: Plan) -> BatchLayout:
        chunks, num_decodes = plan.chunks, len(plan.decode_slots)
        lens = [len(chunk.token_ids) for chunk in chunks]
        query_lens = np.array(lens + [1] * num_decodes, dtype=np.int64)
        slots = np.array([*(chunk.slot for chunk in chunks), *plan.decode_slots], dtype=np.int64)
        query_starts = np.zeros(len(slots) + 1, dtype=np.int64)
        query_lens.cumsum(out=query_starts[1:])
        rows = np.repeat(np.arange(len(slots)), query_lens)
        samples = np.array([chunk.samples for chunk in chunks] + [True] * num_decodes, dtype=bool)
        assert all(chunk.start == self._host_ints[chunk.slot, _COMPUTED] for chunk in chunks)
        chunk_tokens = itertools.chain.from_iterable(chunk.token_ids for chunk in chunks)
        parts = self._upload_together(
            slots,
            rows,
            np.arange(len(rows)) - query_starts[rows],
            query_starts,
            np.fromiter(chunk_tokens, dtype=np.int64, count=sum(lens)),
            query_starts[1:][samples] - 1,
            slots[samples],
        )
        return BatchLayout(
            plan=plan,
            host_slots=slots,
            host_query_lens=query_lens,
            query_lens=tuple(query_lens.tolist()),
            slots=parts[0],
            rows=parts[1],
            offsets=parts[2],
            query_starts=parts[3].int(),
            chunk_token_ids=parts[4],
            decode_slots=parts[0][len(chunks) :],
            sample_rows=parts[5],
            sample_slots=parts[6],
            host_sample_slots=slots[samples],
            sampling=self._sampling_rows(
                slots[samples], parts[6], (self._host_ints[slots, _COMPUTED] + query_lens)[samples]
            ),
        )

    # ---- the device's part of a step: from the slots' state to their next

    def batch(self, layout: BatchLayout) -> ForwardBatch:
        """The model's input, read from the slots' state."""
        contexts = self._host_ints[layout.host_slots, _COMPUTED] + layout.host_query_lens
        width = -(-int(contexts.max()) // self._block_size)
        computed = self._computed[layout.slots]
        positions = computed[layout.rows] + layout.offsets
        block_tables = self._block_tables[:, :width].index_select(0, layout.slots)
        blocks = block_tables[layout.rows, positions // self._block_size]
        rope_lens = None
        if self._dynamic_rope:
            prompt_lens = self._ints[:, _PROMPT_LEN][layout.slots]
            rope_lens = torch.maximum(prompt_lens[layout.rows], positions + 1)
        last_tokens = self._last_tokens[layout.decode_slots]
        return ForwardBatch(
            token_ids=torch.cat((layout.chunk_token_ids, last_tokens)),
            positions=positions,
            kv_indices=blocks.long() * self._block_size + positions % self._block_size,
            query_starts=layout.query_starts,
            context_lens=(positions[layout.query_starts[1:] - 1] + 1).int(),
            block_tables=block_tables,
            sample_rows=layout.sample_rows,
            num_decodes=len(layout.plan.decode_slots),
            query_lens=layout.query_lens,
            contexts=tuple(contexts.tolist()),
            rope_lens=rope_lens,
        )

    def advance(self, layout: BatchLayout, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        """Records that the batch is computed and `token_ids` [R] were sampled."""
        self._host_ints[layout.host_slots, _COMPUTED] += layout.host_query_lens
        self._computed.index_copy_(0, layout.slots, batch.context_lens.long())
        self._last_tokens.index_copy_(0, layout.sample_slots, token_ids)

    # ---- sampling parameters

    def _sampling_rows(
        self, slots: Ints, device_slots: torch.Tensor, positions: Ints
    ) -> SamplingRows:
        """How rows sample, given their slots (on host and device) and positions to sample."""
        ban = self._ban(slots, positions)
        random = np.flatnonzero(self._host_floats[slots, _TEMPERATURE] > 0)
        if not len(random):
            return replace(ALL_GREEDY, ban=ban) if ban else ALL_GREEDY
        top_k = self._host_ints[slots[random], _TOP_K]
        with_top_k = np.flatnonzero(top_k > 0)
        with_top_p = np.flatnonzero(self._host_floats[slots[random], _TOP_P] < 1)
        random_rows, top_k_rows, top_p_rows = self._upload_together(random, with_top_k, with_top_p)
        random_slots = device_slots[random_rows]
        ints, floats = self._ints[random_slots], self._floats[random_slots]
        has_min_p = bool((self._host_floats[slots[random], _MIN_P] > 0).any())
        return SamplingRows(
            random=random_rows,
            temperatures=floats[:, _TEMPERATURE],
            seeds=ints[:, _SEED],
            top_k_rows=top_k_rows if len(with_top_k) else None,
            top_k=ints[top_k_rows, _TOP_K] if len(with_top_k) else None,
            max_top_k=int(top_k.max()),
            top_p_rows=top_p_rows if len(with_top_p) else None,
            top_p=floats[top_p_rows, _TOP_P] if len(with_top_p) else None,
            min_p=floats[:, _MIN_P] if has_min_p else None,
            ban=ban,
        )

    def _ban(self, slots: Ints, positions: Ints) -> Ban | None:
        rows = np.flatnonzero(positions < self._host_ints[slots, _MIN_POSITION])
        banned = [self._banned[slot] for slot in slots[rows].tolist()]
        width = max(map(len, banned), default=0)
        if not width:
            return None
        token_ids = np.full((len(rows), width), -1, dtype=np.int64)
        for row, ids in enumerate(banned):
            token_ids[row, : len(ids)] = ids
        return Ban(
            rows=self._upload(rows),
            token_ids=self._upload(token_ids),
            min_positions=self._upload(self._host_ints[slots[rows], _MIN_POSITION]),
        )

    def _without_stale_ban(self, layout: BatchLayout) -> BatchLayout:
        if layout.sampling.ban is None:
            return layout
        slots = layout.host_sample_slots
        computed, min_position = self._host_ints[slots][:, (_COMPUTED, _MIN_POSITION)].T
        if (computed + 1 < min_position).any():
            return layout
        return replace(layout, sampling=replace(layout.sampling, ban=None))

    # ---- to the device

    def _upload_together(self, *arrays: Ints) -> tuple[torch.Tensor, ...]:
        """Several int64 vectors in one copy."""
        together = self._upload(np.concatenate(arrays))
        ends = list(itertools.accumulate(len(array) for array in arrays))
        return tuple(together[start:end] for start, end in zip([0, *ends], ends, strict=False))

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
