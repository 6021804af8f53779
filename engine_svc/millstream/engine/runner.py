"""ModelRunner: loads a model and carries plans out on it.

Loading, in order: process group, config, hardware, model (laid out on meta, filled from safetensors
or with random numbers), slot table, a warm-up forward and a trial CUDA graph that show how much
memory steps take, KV cache sized from what is left, CUDA graphs. Then a step is

    slots.apply(plan) -> batch(layout) -> model -> sample -> slots.advance     (device state to
                                                                                device state)
    -> copy of the sampled tokens to the host, which collect() waits for

and a step of decodes alone is the same in one CUDA graph (graphs.py). Where some row's logits are
edited or scored (slot_edits.py), a graph ends with the logits and the rest is queued behind it. On
a GPU launch() only enqueues, so that two steps may be in flight; it waits for the step before if a
mask follows the tokens. On a CPU it computes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from millstream.engine import startup
from millstream.engine.attention import allocate_kv_cache
from millstream.engine.chunk_graphs import MOST_GRAPHS, ChunkGraphs, most_tokens
from millstream.engine.config import EngineConfig
from millstream.engine.graphs import CudaGraphRecorder, DecodeGraphs, Kind
from millstream.engine.hardware import LoadError, detect, resolve
from millstream.engine.layout import BatchLayout
from millstream.engine.logprobs import StepScores
from millstream.engine.models import Hidden
from millstream.engine.parallel import Group
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.request import GrammarSpec
from millstream.engine.results import CpuResults, GpuResults
from millstream.engine.rope_config import RopeType
from millstream.engine.sampling import sample
from millstream.engine.shard_sampling import ShardSampler
from millstream.engine.slot_edits import SlotEdits
from millstream.engine.slots import SlotTable
from millstream.engine.uploads import Ints

logger = logging.getLogger(__name__)

# A CPU's steps are alike from the first on: its warm-up only proves that the model runs.
_CPU_WARM_UP_TOKENS = 16
# Time to record CUDA graphs at start; those that are left are recorded when they are first needed.
_RECORDING_S = 1.5
# What a graph takes that fits in the largest one's memory pool: its nodes, attention's workspace.
_GRAPH_BYTES = 8 << 20


class Sampled(NamedTuple):
    """What a step leaves on the device."""

    token_ids: torch.Tensor  # [R] int64
    scores: StepScores | None = None  # of a step whose logits were edited or scored


class ModelRunner:
    """A plan.Runner over one model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path | None,
        on_progress: startup.OnProgress | None = None,
        group: Group | None = None,
    ) -> None:
        """Loads the model; raises LoadError (or another ValueError or OSError) with a clear line.

        With load_format dummy no folder is needed when config.model names a shape. group: the ranks
        that hold a part each (ranks.py); it is joined once the weights are loaded.
        """
        self._group = group
        whole = startup.model_config(config, model_dir)
        self._model_config = startup.rank_config(whole, group)
        self._grammars = startup.make_grammars(whole, model_dir, group)
        self._resolved = resolved = resolve(config, detect(config.device), self._model_config)
        startup.set_threads(config, resolved, group)
        # All work of a runner is on one stream, which is not the default one: graphs need that.
        self._stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if resolved.on_gpu:
            # cuDNN's attention plans anew for each length it has not seen: 2 ms a layer and step.
            torch.backends.cuda.enable_cudnn_sdp(False)
            stream = torch.cuda.Stream(resolved.device)  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.stream(stream)
        self._results = GpuResults(resolved) if resolved.on_gpu else CpuResults()
        self._ops = startup.make_ops(resolved, self._model_config)
        # What graphs of Kind.LOGITS leave, one for all: a graph's own would stay as long as it.
        self._logits: torch.Tensor | None = None
        with torch.inference_mode(), self._stream:
            started = time.monotonic()
            self._model = startup.load_model(
                config, resolved, whole, self._ops, model_dir, on_progress, group
            )
            loaded = time.monotonic()
            self._shards: ShardSampler | None = None
            if group is not None:
                group.join()
                self._shards = ShardSampler(group, whole.vocab_size)
            num_blocks = self._set_up(config)
        logger.info(
            "weights in %.1f s, warm-up, KV cache and CUDA graphs in %.1f s: %s on %s (%s), "
            "%d blocks of %d tokens (%.2f GiB)",
            loaded - started,
            time.monotonic() - loaded,
            resolved.dtype,
            resolved.device,
            resolved.attention_backend,
            num_blocks,
            resolved.block_size,
            self._kv_cache.data.nbytes / (1 << 30),
        )
        self.info = RunnerInfo(
            vocab_size=whole.vocab_size,
            eos_token_ids=self._model_config.eos_token_ids,
            max_model_len=startup.served_len(config, resolved, num_blocks),
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            block_size=resolved.block_size,
            num_blocks=num_blocks,
            max_in_flight=resolved.max_in_flight,
            batch_invariant=resolved.batch_invariant,
            prefix_sharing=self._model_config.rope.type is not RopeType.DYNAMIC,
            structured_output=self._grammars is not None,
        )

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        assert self._grammars is not None, "validation refuses what is not there"
        return self._grammars.prepare(spec)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        with self._stream:
            layout = self._take(plan)
            sampled = self._step(layout)
            self._slots.note_advance(layout)
            tokens = self._results.put(plan.step, sampled.token_ids, sampled.scores)
            if sampled.scores is not None:
                self._edits.sampled(tokens)

    def collect(self) -> StepResult:
        return self._results.take()

    def close(self) -> None:
        """Frees the model and the KV cache. Nothing may be called afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        if self._resolved.on_gpu:
            torch.cuda.synchronize(self._resolved.device)
        del self._graphs, self._chunk_graphs, self._logits, self._model, self._ops, self._kv_cache
        del self._slots, self._edits, self._results
        if self._resolved.on_gpu:
            torch.cuda.empty_cache()

    # ---- a step

    def _take(self, plan: Plan) -> BatchLayout:
        if plan.starts:
            self._edits.start(plan.starts)
        graphs = self._chunk_graphs
        return self._slots.apply(plan, None if graphs is None else graphs.choose)

    def _step(self, layout: BatchLayout) -> Sampled:
        """Computes a step from the slots' state, and leaves there what the next one reads."""
        slots, host = self._slots, layout.host
        if self._chunk_graphs is not None and layout.padded is not None:
            return Sampled(self._chunk_graphs(layout))
        if host.special:
            positions = slots.sample_positions(layout)
            if self._edits.wanted(layout, positions):
                return self._edited_step(layout, positions)
        if self._graphs is not None and not host.plan.chunks:
            return Sampled(self._decode_in_graph(self._graphs, layout))
        batch = slots.batch(layout)
        logits = self._model(batch, self._kv_cache)
        positions_on_device = batch.positions[layout.sample_rows] + 1
        if self._shards is None:
            token_ids = self._sample(layout, logits, positions_on_device)
        else:
            token_ids = self._sample_shards(self._shards, layout, logits, positions_on_device)
        slots.advance(batch, layout.sample_slots, token_ids)
        return Sampled(token_ids)

    def _decode_in_graph(self, graphs: DecodeGraphs, layout: BatchLayout) -> torch.Tensor:
        """A step of decodes alone: token ids [R]."""
        slots, ops, shards = self._slots, self._ops.on_slots, self._shards
        if shards is None or not layout.host.plan.whole_rows:
            return graphs(layout, Kind.FILTERED if layout.host.has_filters else Kind.PLAIN)
        assert ops is not None, "resolve chose graphs for ops that can"
        logits = graphs(layout, Kind.LOGITS)
        after = slots.state.computed[layout.slots] + 1
        token_ids = shards.sample_whole(logits, lambda whole: self._sample(layout, whole, after))
        ops.advance(layout.slots, token_ids, slots.state)
        return token_ids

    def _edited_step(self, layout: BatchLayout, positions: Ints) -> Sampled:
        """The same where logits are edited or scored before tokens are sampled."""
        slots, edits, ops = self._slots, self._edits, self._ops.on_slots
        if self._graphs is not None and ops is not None and not layout.host.plan.chunks:
            logits = self._graphs(layout, Kind.LOGITS)
            after = slots.state.computed[layout.slots] + 1
            token_ids = self._of_whole_rows(
                logits, functools.partial(self._edit_and_sample, layout, positions, after)
            )
            ops.advance(layout.slots, token_ids, slots.state)
            return Sampled(token_ids, edits.scores(None))
        batch = slots.batch(layout)
        hidden = self._model.hidden(batch, self._kv_cache)
        logits = self._model.logits(hidden, batch.sample_rows)
        after = batch.positions[layout.sample_rows] + 1
        token_ids = self._of_whole_rows(
            logits, functools.partial(self._edit_and_sample, layout, positions, after)
        )
        slots.advance(batch, layout.sample_slots, token_ids)
        return Sampled(token_ids, edits.scores(functools.partial(self._whole_logits, hidden)))

    def _of_whole_rows(
        self, logits: torch.Tensor, sample: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return sample(logits) if self._shards is None else self._shards.sample_whole(logits, sample)

    def _edit_and_sample(
        self,
        layout: BatchLayout,
        positions: Ints,
        positions_on_device: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids [R] of logits [R, vocab_size], after edits."""
        edited = self._edits.edit(logits, positions)
        token_ids = self._sample(layout, edited, positions_on_device)
        self._edits.settle(logits, token_ids)
        return token_ids

    def _whole_logits(self, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of some tokens of a step."""
        logits = self._model.logits(hidden, rows)
        return logits if self._shards is None else self._shards.whole_rows(logits)

    def _sample(
        self, layout: BatchLayout, logits: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Token ids [R] of logits [R, vocab_size]."""
        slots, ops = self._slots, self._ops.on_slots
        if ops is None:
            return sample(logits.float(), positions, slots.sampling_rows(layout))
        return ops.sample(
            logits,
            positions,
            layout.sample_slots,
            slots.sampling,
            filtered=layout.host.has_filters,
        )

    def _sample_shards(
        self,
        shards: ShardSampler,
        layout: BatchLayout,
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids [R] of this rank's logits."""
        slots, ops = self._slots, self._ops.on_slots
        if layout.host.plan.whole_rows:
            return shards.sample_whole(logits, lambda whole: self._sample(layout, whole, positions))
        if ops is None:
            return shards.sample(logits.float(), positions, slots.sampling_rows(layout))
        return shards.sample_slots(logits, positions, layout.sample_slots, slots.sampling, ops)

    def _decode(self, slots: torch.Tensor, kind: Kind) -> torch.Tensor:
        """The step that a CUDA graph records: `slots` [n] decode."""
        table, ops = self._slots, self._ops.on_slots
        assert ops is not None, "resolve chose graphs for ops that can"
        batch = table.decode_batch(slots, ops)
        logits = self._model(batch, self._kv_cache)
        if kind is Kind.LOGITS:
            if self._logits is None:
                shape = (self._resolved.max_num_seqs, logits.shape[1])
                self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
            return self._logits[: len(slots)].copy_(logits)
        positions = batch.context_lens  # a context's length is the position of the token after it
        if self._shards is None:
            filtered = kind is Kind.FILTERED
            token_ids = ops.sample(logits, positions, slots, table.sampling, filtered=filtered)
        else:
            token_ids = self._shards.sample_slots(logits, positions, slots, table.sampling, ops)
        ops.advance(slots, token_ids, table.state)
        return token_ids

    def _chunk_step(self, layout: BatchLayout, kind: Kind) -> torch.Tensor:
        """The step that a CUDA graph records: chunks and decodes, filled up."""
        slots, ops = self._slots, self._ops.on_slots
        assert ops is not None, "resolve chose graphs for ops that can"
        batch = slots.batch(layout)
        logits = self._model(batch, self._kv_cache)
        positions = batch.positions[layout.sample_rows] + 1
        token_ids = ops.sample(
            logits,
            positions,
            layout.sample_slots,
            slots.sampling,
            filtered=kind is Kind.FILTERED,
        )
        slots.advance(batch, layout.sample_slots, token_ids)
        slots.rest_padding()
        return token_ids

    # ---- set-up

    def _set_up(self, config: EngineConfig) -> int:
        """Everything but the weights; returns how many blocks the KV cache has."""
        resolved = self._resolved
        self._slots = SlotTable(
            max_num_seqs=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            device=resolved.device,
            dynamic_rope=self._model_config.rope.type is RopeType.DYNAMIC,
        )
        self._edits = SlotEdits(
            vocab_size=self._model_config.vocab_size,
            device=resolved.device,
            grammars=self._grammars,
        )
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self._allocate_kv_cache(num_blocks=0)  # first steps write to the scratch block
        reserved_bytes = self._warm_up()
        self._edits.clear()
        if resolved.cuda_graphs:
            reserved_bytes += self._measure_graphs()
        num_blocks = startup.cache_blocks(
            config, resolved, self._model_config, reserved_bytes, self._group
        )
        self._allocate_kv_cache(num_blocks)
        if resolved.cuda_graphs:
            recorder = CudaGraphRecorder()
            self._graphs = self._make_graphs(recorder)
            self._chunk_graphs = self._make_chunk_graphs(recorder)
            self._graphs.record(startup.time_limit(_RECORDING_S, self._group))
        return num_blocks

    def _allocate_kv_cache(self, num_blocks: int) -> None:
        resolved = self._resolved
        self._kv_cache = allocate_kv_cache(
            self._model_config,
            num_blocks=num_blocks,
            block_size=resolved.block_size,
            dtype=resolved.dtype,
            device=resolved.device,
        )

    def _make_graphs(self, recorder: CudaGraphRecorder) -> DecodeGraphs:
        return DecodeGraphs(
            self._decode,
            recorder,
            sizes=self._resolved.batch_sizes,
            padding_slot=self._slots.padding_slot,
            device=self._resolved.device,
        )

    def _make_chunk_graphs(self, recorder: CudaGraphRecorder) -> ChunkGraphs | None:
        if self._group is not None:
            return None
        resolved = self._resolved
        return ChunkGraphs(
            self._chunk_step,
            recorder,
            max_tokens=min(most_tokens(self._model_config), resolved.max_num_batched_tokens),
            max_decodes=resolved.max_num_seqs,
            padding_slot=self._slots.padding_slot,
            device=resolved.device,
        )

    def _measure_graphs(self) -> int:
        """The memory that all CUDA graphs will take, from a trial of the largest."""
        resolved, device = self._resolved, self._resolved.device
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        recorder = CudaGraphRecorder()
        graphs, chunk_graphs = self._make_graphs(recorder), self._make_chunk_graphs(recorder)
        graphs.record(lambda: False)
        num_graphs = len(resolved.batch_sizes)
        if chunk_graphs is not None:
            chunk_graphs.record_largest()
            num_graphs += MOST_GRAPHS
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what they use stays
        taken_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
        del graphs, chunk_graphs, recorder
        torch.cuda.empty_cache()
        logits_bytes = (  # of those that are edited
            resolved.max_num_seqs * self._model_config.vocab_size * resolved.dtype.itemsize
        )
        return max(taken_bytes, 0) + logits_bytes + num_graphs * _GRAPH_BYTES

    def _warm_up_plan(self, num_tokens: int) -> Plan:
        plan = startup.warm_up_plan(self._resolved, num_tokens)
        return plan if self._group is None else replace(plan, whole_rows=True)

    def _warm_up(self) -> int:
        """Runs one step, on a GPU as large as any; returns the bytes that it took at its peak."""
        resolved = self._resolved
        try:
            if not resolved.on_gpu:
                num_tokens = min(_CPU_WARM_UP_TOKENS, resolved.max_num_batched_tokens)
                self._step(self._take(self._warm_up_plan(num_tokens)))
                return 0
            torch.cuda.reset_peak_memory_stats(resolved.device)
            before_bytes = torch.cuda.memory_allocated(resolved.device)
            self._step(self._take(self._warm_up_plan(resolved.max_num_batched_tokens)))
            torch.cuda.synchronize(resolved.device)
            return torch.cuda.max_memory_allocated(resolved.device) - before_bytes
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"max_num_batched_tokens: a step of {resolved.max_num_batched_tokens} tokens does "
                "not fit in the memory beside the weights"
            ) from error
        except RuntimeError as error:
            if resolved.dtype is torch.float32:
                raise  # every device has it: this fault is ours
            raise LoadError(
                f"dtype: the model does not run in {resolved.dtype} on {resolved.device}: {error}"
            ) from error


def create(config: EngineConfig, model_dir: Path | None) -> ModelRunner:
    """The runner that `--runner model` names."""
    return ModelRunner(config, model_dir)
