"""What a runner keeps of each slot, and the batches that it makes of plans.

State that a step changes (computed tokens, last token) lives on the device and is read there by the
next step: a decode's input never visits the host. What the host can know without the device, it
keeps in numpy: lengths and parameters, by slot. Whatever a plan changes goes up in one copy; a
steady decode step uploads nothing.

One slot more than sequences can have pads the batches of CUDA graphs: its block table is the
scratch block, and it stays at position 0 for ever.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from millstream.engine.batch import ForwardBatch
from millstream.engine.edits.slot_edits import is_special
from millstream.engine.ops import SlotOps, SlotSampling, SlotState
from millstream.engine.plan import Plan, SlotStart
from millstream.engine.sampling import ALL_GREEDY, SamplingRows
from millstream.engine.stepping.batch_layout import (
    BatchLayout,
    Bucket,
    HostLayout,
    layout_arrays,
    layout_of,
    padded_arrays,
)
from millstream.engine.stepping.uploads import Ints, Uploader

# Rows of the parameter tables; a column is a slot.
_PROMPT_LEN, _SEED, _TOP_K = range(3)
_TEMPERATURE, _TOP_P, _MIN_P = range(3)


class SlotTable:
    """State of max_num_seqs slots, and of the padding slot, on one device; used by one thread."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        dynamic_rope: bool = False,
    ) -> None:
        num_slots = max_num_seqs + 1
        self.padding_slot = max_num_seqs
        self._block_size = block_size
        self._dynamic_rope = dynamic_rope
        self._upload = Uploader(device)
        self._host_computed: Ints = np.zeros(num_slots, dtype=np.int64)
        self._host_ints: Ints = np.zeros((3, num_slots), dtype=np.int64)
        self._host_floats = np.zeros((3, num_slots), dtype=np.float64)
        self._num_blocks = [0] * num_slots
        self._special = np.zeros(num_slots, dtype=bool)
        self._computed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._ints = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        self._floats = torch.zeros(3, num_slots, dtype=torch.float32, device=device)
        self._table_width = -(-max_model_len // block_size)
        self._block_tables = torch.zeros(
            num_slots, self._table_width, dtype=torch.int32, device=device
        )
        self._decode_rows = torch.arange(num_slots + 1, device=device)
        self._decode_starts = self._decode_rows.int()
        self.state = SlotState(
            computed=self._computed,
            last_tokens=self._last_tokens,
            block_tables=self._block_tables,
        )
        self.sampling = SlotSampling(
            temperatures=self._floats[_TEMPERATURE],
            seeds=self._ints[_SEED],
            top_k=self._ints[_TOP_K],
            top_p=self._floats[_TOP_P],
            min_p=self._floats[_MIN_P],
        )
        self._steady: BatchLayout | None = None
        self._rows: tuple[BatchLayout, SamplingRows] | None = None  # those made last

    # ---- a plan comes

    def apply(
        self, plan: Plan, choose_bucket: Callable[[HostLayout], Bucket | None] | None = None
    ) -> BatchLayout:
        """Takes over a plan's starts and block appends; returns what the step computes, filled up
        if a bucket is chosen for its chunks."""
        starts = self._note_starts(plan.starts) if plan.starts else []
        blocks = self._note_blocks(plan) if plan.starts or plan.block_appends else []
        layout = self._steady
        if plan.starts or plan.chunks or layout is None or not layout.decodes_as(plan):
            layout = None
        host = self._host_layout(plan) if layout is None else None
        bucket = choose_bucket(host) if choose_bucket and host and plan.chunks else None
        arrays = [*starts, *blocks, *(self._arrays(host, bucket) if host else ())]
        if arrays:
            parts = iter(self._upload(arrays))
            if starts:
                self._write_starts(*itertools.islice(parts, len(starts)))
            if blocks:
                # The step in flight reads nothing behind a context; but a start takes the slot of
                # one that has ended, which that step may still compute. (With three in flight a
                # start one plan ago would matter, too.)
                beside = contextlib.nullcontext() if starts else self._upload.ahead()
                with beside:
                    self._write_blocks(*itertools.islice(parts, len(blocks)))
            if host:
                layout = layout_of(host, bucket, *parts)
        assert layout is not None
        self._steady = None if plan.chunks else layout
        return layout

    def _arrays(self, host: HostLayout, bucket: Bucket | None) -> list[Ints]:
        if bucket is None:
            return layout_arrays(host)
        return padded_arrays(host, bucket, self.padding_slot)

    def _note_starts(self, starts: Sequence[SlotStart]) -> list[Ints]:
        slots = np.array([start.slot for start in starts], dtype=np.int64)
        for start in starts:
            sampling = start.sampling
            self._host_computed[start.slot] = start.num_computed_tokens
            self._host_ints[:, start.slot] = (
                start.min_position - sampling.min_tokens,
                sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed,  # same bits
                sampling.top_k,
            )
            self._host_floats[:, start.slot] = (
                0.0 if sampling.greedy else sampling.temperature,
                sampling.top_p,
                sampling.min_p,
            )
            self._num_blocks[start.slot] = 0
            self._special[start.slot] = is_special(start)
        floats = np.ascontiguousarray(self._host_floats[:, slots])
        return [
            slots,
            self._host_computed[slots],
            self._host_ints[:, slots].ravel(),
            floats.view(np.int64).ravel(),
        ]

    def _write_starts(
        self, slots: torch.Tensor, computed: torch.Tensor, ints: torch.Tensor, floats: torch.Tensor
    ) -> None:
        self._computed.index_copy_(0, slots, computed)
        self._ints.index_copy_(1, slots, ints.view(-1, len(slots)))
        floats = floats.view(torch.float64).view(-1, len(slots))
        self._floats.index_copy_(1, slots, floats.float())

    def _note_blocks(self, plan: Plan) -> list[Ints]:
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
        return [np.array(places, dtype=np.int64), np.array(block_ids, dtype=np.int64)]

    def _write_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        self._block_tables.view(-1).index_copy_(0, places, block_ids.int())

    def _host_layout(self, plan: Plan) -> HostLayout:
        chunks, num_decodes = plan.chunks, len(plan.decode_slots)
        assert all(chunk.start == self._host_computed[chunk.slot] for chunk in chunks)
        slots = np.array([*(chunk.slot for chunk in chunks), *plan.decode_slots], dtype=np.int64)
        query_lens = np.ones(len(slots), dtype=np.int64)
        query_lens[: len(chunks)] = [len(chunk.token_ids) for chunk in chunks]
        query_starts = np.zeros(len(slots) + 1, dtype=np.int64)
        query_lens.cumsum(out=query_starts[1:])
        samples = np.array([chunk.samples for chunk in chunks] + [True] * num_decodes, dtype=bool)
        sample_slots = slots[samples]
        temperatures, top_p, min_p = self._host_floats[:, sample_slots]
        filtered = (self._host_ints[_TOP_K, sample_slots] > 0) | (top_p < 1) | (min_p > 0)
        return HostLayout(
            plan=plan,
            slots=slots,
            query_lens=query_lens,
            query_starts=query_starts,
            samples=samples,
            sample_slots=sample_slots,
            has_filters=bool((filtered & (temperatures > 0)).any()),
            special=bool(self._special[slots].any()) or plan.has_targets,
        )

    # ---- the device's part of a step: from the slots' state to their next

    def batch(self, layout: BatchLayout) -> ForwardBatch:
        """The model's input, read from the slots' state."""
        host = layout.host
        slots = layout.slots[layout.rows]
        positions = self._computed[slots] + layout.offsets
        rope_lens = None
        if self._dynamic_rope:
            rope_lens = torch.maximum(self._ints[_PROMPT_LEN, slots], positions + 1)
        num_chunk_tokens = len(layout.chunk_token_ids)
        blocks = self._block_tables[slots, positions // self._block_size].long()
        return ForwardBatch(
            token_ids=torch.cat(
                (layout.chunk_token_ids, self._last_tokens[slots[num_chunk_tokens:]])
            ),
            positions=positions,
            kv_indices=blocks * self._block_size + positions % self._block_size,
            query_starts=layout.query_starts,
            context_lens=(positions[layout.query_starts[1:] - 1] + 1).int(),
            block_tables=self._block_tables,
            slots=layout.slots,
            sample_rows=layout.sample_rows,
            num_decodes=len(layout.rows) - num_chunk_tokens,
            query_lens=tuple(host.query_lens.tolist()),
            contexts=tuple((self._host_computed[host.slots] + host.query_lens).tolist()),
            rope_lens=rope_lens,
        )

    def decode_batch(
        self, slots: torch.Tensor, ops: SlotOps, embedding: torch.Tensor | None
    ) -> ForwardBatch:
        """The input of a step in which `slots` [n], some of them perhaps the padding slot, decode.
        All that it reads from the host is n: a CUDA graph may record it. embedding: as ops.read."""
        num_slots, inputs = len(slots), ops.read(slots, self.state, embedding)
        return ForwardBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            kv_indices=inputs.kv_indices,
            query_starts=self._decode_starts[: num_slots + 1],
            context_lens=inputs.context_lens,
            block_tables=self._block_tables,
            slots=slots,
            sample_rows=self._decode_rows[:num_slots],
            num_decodes=num_slots,
            query_lens=(1,) * num_slots,
            contexts=(),
            embedded=inputs.embedded,
        )

    def advance(
        self, batch: ForwardBatch, sample_slots: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Records that the batch is computed and that `token_ids` [R] were sampled."""
        self._computed.index_copy_(0, batch.slots, batch.context_lens.long())
        self._last_tokens.index_copy_(0, sample_slots, token_ids)

    def rest_padding(self) -> None:
        """Takes the padding slot back to where it was before a batch with it advanced."""
        self._computed[self.padding_slot].zero_()
        self._last_tokens[self.padding_slot].zero_()

    def note_advance(self, layout: BatchLayout) -> None:
        """The host's part of advance()."""
        self._host_computed[layout.host.slots] += layout.host.query_lens

    # ---- sampling; both are asked before note_advance()

    def sample_positions(self, layout: BatchLayout) -> Ints:
        """[R]: the index in prompt + output of each token that is sampled."""
        host = layout.host
        return (self._host_computed[host.slots] + host.query_lens)[host.samples]

    def sampling_rows(self, layout: BatchLayout) -> SamplingRows:
        """How the rows sample; uploaded once, then kept while the batch stays."""
        if self._rows is None or self._rows[0] is not layout:
            self._rows = layout, self._make_sampling_rows(layout)
        return self._rows[1]

    def _make_sampling_rows(self, layout: BatchLayout) -> SamplingRows:
        slots = layout.host.sample_slots
        random = np.flatnonzero(self._host_floats[_TEMPERATURE, slots] > 0)
        if not len(random):
            return ALL_GREEDY
        _, top_p, min_p = self._host_floats[:, slots[random]]
        top_k = self._host_ints[_TOP_K, slots[random]]
        with_top_k, with_top_p = np.flatnonzero(top_k > 0), np.flatnonzero(top_p < 1)
        random_rows, top_k_rows, top_p_rows = self._upload((random, with_top_k, with_top_p))
        random_slots = layout.sample_slots[random_rows]
        ints, floats = self._ints[:, random_slots], self._floats[:, random_slots]
        return SamplingRows(
            random=random_rows,
            temperatures=floats[_TEMPERATURE],
            seeds=ints[_SEED],
            top_k_rows=top_k_rows if len(with_top_k) else None,
            top_k=ints[_TOP_K, top_k_rows] if len(with_top_k) else None,
            max_top_k=int(top_k.max()),
            top_p_rows=top_p_rows if len(with_top_p) else None,
            top_p=floats[_TOP_P, top_p_rows] if len(with_top_p) else None,
            min_p=floats[_MIN_P] if (min_p > 0).any() else None,
        )
