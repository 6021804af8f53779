"""Steps: one step of a model on a device, from the slots' state to their next.

    slots.apply(plan) -> batch(layout) -> model -> sample -> slots.advance

A step of decodes alone is the same in one CUDA graph (graphs.py), one with chunks too where that
pays (chunk_graphs.py). Where some row's logits are edited or scored (edits/slot_edits.py), a graph
ends with the logits and the rest is queued behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from millstream.engine.attention import KVCache
from millstream.engine.chunk_graphs import ChunkGraphs, most_tokens
from millstream.engine.edits.slot_edits import SlotEdits
from millstream.engine.graphs import DecodeGraphs, Kind, Record, kind_of
from millstream.engine.hardware import ResolvedConfig
from millstream.engine.models import DecoderModel, Hidden
from millstream.engine.ops import Ops, SlotOps
from millstream.engine.plan import Plan
from millstream.engine.samplers import Sampler
from millstream.engine.slots import SlotTable
from millstream.engine.stepping.batch_layout import BatchLayout
from millstream.engine.stepping.logprobs import StepScores
from millstream.engine.stepping.uploads import Ints


class Sampled(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [R] int64
    scores: StepScores | None = None  # of a step whose logits were edited or scored


class Steps:
    """Computes steps; used by one thread, on one stream."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        model: DecoderModel,
        ops: Ops,
        slots: SlotTable,
        edits: SlotEdits,
        kv_cache: KVCache,
        sampler: Sampler,
    ) -> None:
        self._resolved = resolved
        self.model = model
        self._ops = ops
        self.slots = slots
        self.edits = edits
        self.kv_cache = kv_cache
        self._sampler = sampler
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        # What graphs of Kind.LOGITS leave, one for all: a graph's own would stay as long as it.
        self._logits: torch.Tensor | None = None

    def use_graphs(self, record: Record) -> None:
        """From now on; none is recorded yet."""
        resolved, padding_slot = self._resolved, self.slots.padding_slot
        self.graphs = DecodeGraphs(
            self.decode,
            record,
            sizes=resolved.batch_sizes,
            kernels_of=self._on_slots.kernels_of,
            padding_slot=padding_slot,
            device=resolved.device,
        )
        self.chunk_graphs = ChunkGraphs(
            self.chunks,
            record,
            max_tokens=min(most_tokens(self.model.config), resolved.max_num_batched_tokens),
            max_decodes=resolved.max_num_seqs,
            padding_slot=padding_slot,
            device=resolved.device,
        )

    @property
    def _on_slots(self) -> SlotOps:
        ops = self._ops.on_slots
        assert ops is not None, "resolve chose graphs for ops that can"
        return ops

    def record_next(self) -> bool:
        """Records a graph that may be needed; False if there is none left."""
        if self.graphs is None:
            return False
        if self.graphs.record_next():
            return True
        return self.chunk_graphs is not None and self.chunk_graphs.record_next()

    def use_no_graphs(self) -> None:
        """Frees them."""
        self.graphs = self.chunk_graphs = self._logits = None

    def take(self, plan: Plan) -> BatchLayout:
        """Takes over what a plan says of slots; returns what `run` computes."""
        if plan.starts:
            self.edits.start(plan.starts)
        graphs = self.chunk_graphs
        return self.slots.apply(plan, None if graphs is None else graphs.choose)

    def run(self, layout: BatchLayout) -> Sampled:
        """Computes a step from the slots' state, and leaves there what the next one reads."""
        slots, host = self.slots, layout.host
        if self.chunk_graphs is not None and layout.padded is not None:
            return Sampled(self.chunk_graphs(layout))
        if host.special:
            positions = slots.sample_positions(layout)
            if self.edits.wanted(layout, positions):
                return self._edited_step(layout, positions)
        if self.graphs is not None and not host.plan.chunks:
            return Sampled(self._decode_in_graph(self.graphs, layout))
        return Sampled(self._compute(layout))

    def _compute(self, layout: BatchLayout) -> torch.Tensor:
        """Any step without edits: token ids [R]."""
        batch = self.slots.batch(layout)
        logits = self.model(batch, self.kv_cache)
        after = batch.positions[layout.sample_rows] + 1
        token_ids = self._sampler.sample(layout, logits, after)
        self.slots.advance(batch, layout.sample_slots, token_ids)
        return token_ids

    def _decode_in_graph(self, graphs: DecodeGraphs, layout: BatchLayout) -> torch.Tensor:
        """A step of decodes alone: token ids [R]."""
        if not layout.host.plan.whole_rows:
            return graphs(layout, kind_of(layout.host))
        return self._sample_behind(
            graphs, layout, lambda after, whole: self._sampler.sample_whole(layout, whole, after)
        )

    def _sample_behind(
        self,
        graphs: DecodeGraphs,
        layout: BatchLayout,
        choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """A step of decodes whose graph ends with the logits: token ids [R], by `choose` of the
        positions [R] and the whole rows."""
        slots, ops = self.slots, self._on_slots
        logits = graphs(layout, Kind.LOGITS)
        after = slots.state.computed[layout.slots] + 1
        token_ids = self._sampler.choose(logits, functools.partial(choose, after))
        ops.advance(layout.slots, token_ids, slots.state)
        return token_ids

    def _edited_step(self, layout: BatchLayout, positions: Ints) -> Sampled:
        """The same where logits are edited or scored before tokens are sampled."""
        slots, edits = self.slots, self.edits
        edit_and_sample = functools.partial(self._edit_and_sample, layout, positions)
        if self.graphs is not None and not layout.host.plan.chunks:
            token_ids = self._sample_behind(self.graphs, layout, edit_and_sample)
            return Sampled(token_ids, edits.scores())
        batch, prompt_logits = slots.batch(layout), None
        if layout.host.plan.has_targets:
            hidden = self.model.hidden(batch, self.kv_cache)
            logits = self.model.logits(hidden, batch.sample_rows)
            prompt_logits = functools.partial(self._whole_logits, hidden)
        else:  # the same products as on ranks that know of no edits
            logits = self.model(batch, self.kv_cache)
        after = batch.positions[layout.sample_rows] + 1
        token_ids = self._sampler.choose(logits, functools.partial(edit_and_sample, after))
        slots.advance(batch, layout.sample_slots, token_ids)
        return Sampled(token_ids, edits.scores(prompt_logits))

    def _edit_and_sample(
        self,
        layout: BatchLayout,
        positions: Ints,
        positions_on_device: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids [R] of logits [R, vocab_size], after edits."""
        edited = self.edits.edit(logits, positions)
        token_ids = self._sampler.sample_whole(layout, edited, positions_on_device)
        self.edits.settle(logits, token_ids)
        return token_ids

    def _whole_logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of some tokens of a step."""
        return self._sampler.whole_rows(self.model.logits(hidden, rows))

    def decode(self, slots: torch.Tensor, kind: Kind) -> torch.Tensor:
        """The step that a CUDA graph records: `slots` [n] decode."""
        table, ops = self.slots, self._on_slots
        batch = table.decode_batch(slots, ops, self.model.whole_embedding)
        logits = self.model(batch, self.kv_cache)
        if kind is Kind.LOGITS:
            if self._logits is None:
                shape = (self._resolved.max_num_seqs, logits.shape[1])
                self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
            return self._logits[: len(slots)].copy_(logits)
        positions = batch.context_lens  # a context's length is the position of the token after it
        filtered = kind is Kind.FILTERED
        return self._sampler.sample_and_advance(logits, positions, slots, filtered=filtered)

    def chunks(self, layout: BatchLayout) -> torch.Tensor:
        """The step that a CUDA graph records: chunks and decodes, filled up."""
        token_ids = self._compute(layout)
        self.slots.rest_padding()
        return token_ids
