"""ModelRunner: loads a model and carries plans out on it.

Loading, in order: process group, config, hardware, model (laid out on meta, filled from safetensors
or with random numbers), slot table, a warm-up forward and trial CUDA graphs that show how much
memory steps take, KV cache sized from what is left, CUDA graphs. Then a step (steps.py) leads from
the slots' state on the device to their next, and its tokens are copied to the host, which collect()
waits for. On a GPU launch() only enqueues, so that two steps may be in flight; it waits for the
step before if a mask follows the tokens. On a CPU it computes.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from millstream.engine.attention import KVCache, allocate_kv_cache
from millstream.engine.chunk_graphs import MOST_GRAPHS
from millstream.engine.config import EngineConfig
from millstream.engine.edits.slot_edits import SlotEdits
from millstream.engine.graphs import CudaGraphRecorder
from millstream.engine.hardware import LoadError, detect, resolve
from millstream.engine.model_files.rope_config import RopeType
from millstream.engine.models import DecoderModel
from millstream.engine.ops import Ops
from millstream.engine.parallel import Group
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.ranks.shard_sampling import ShardSampler
from millstream.engine.request import GrammarSpec
from millstream.engine.samplers import RankSampler, Sampler
from millstream.engine.slots import SlotTable
from millstream.engine.startup import runner_parts
from millstream.engine.startup.phases import Phases
from millstream.engine.stepping.results import CpuResults, GpuResults
from millstream.engine.steps import Steps

logger = logging.getLogger(__name__)

# A CPU's steps are alike from the first on: its warm-up only proves that the model runs.
_CPU_WARM_UP_TOKENS = 16
# Time to record CUDA graphs at start; others are recorded while the engine is idle, or when they
# are first needed.
_RECORDING_S = 0.3
# What a graph takes that fits in the largest one's memory pool: its nodes, attention's workspace.
_GRAPH_BYTES = 8 << 20


class ModelRunner:
    """A plan.Runner over one model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path | None,
        on_progress: runner_parts.OnProgress | None = None,
        group: Group | None = None,
    ) -> None:
        """Loads the model; raises LoadError (or another ValueError or OSError) with a clear line.

        With load_format dummy no folder is needed when config.model names a shape. group: the ranks
        that hold a part each (ranks/children.py); it is joined once the weights are loaded.
        """
        self._phases = Phases()
        self._group = group
        whole = runner_parts.model_config(config, model_dir)
        self._model_config = runner_parts.rank_config(whole, group)
        self._grammars = runner_parts.make_grammars(whole, model_dir, group)
        self._resolved = resolved = resolve(config, detect(config.device), self._model_config)
        runner_parts.set_threads(config, resolved, group)
        # All work of a runner is on one stream, which is not the default one: graphs need that.
        self._stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._results: CpuResults | GpuResults = CpuResults()
        if resolved.on_gpu:
            # cuDNN's attention plans anew for each length it has not seen: 2 ms a layer and step.
            torch.backends.cuda.enable_cudnn_sdp(False)
            stream = torch.cuda.Stream(resolved.device)  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.stream(stream)
        self._phases.end("device")
        ops = runner_parts.make_ops(resolved, self._model_config)
        if resolved.on_gpu:
            self._results = runner_parts.gpu_results(resolved, ops)
        with torch.inference_mode(), self._stream:
            model = runner_parts.load_model(
                config, resolved, whole, ops, model_dir, on_progress, group
            )
            self._phases.end("weights")
            if group is not None:
                group.join(whole.hidden_size)
                self._phases.end("meeting the other ranks")
            self._steps = self._make_steps(model, ops)
            self._phases.end("slots")
            num_blocks = self._set_up(config)
        logger.info(
            "loaded in %s: %s on %s (%s), %d blocks of %d tokens (%.2f GiB)",
            self._phases,
            resolved.dtype,
            resolved.device,
            resolved.attention_backend,
            num_blocks,
            resolved.block_size,
            self._steps.kv_cache.data.nbytes / (1 << 30),
        )
        max_model_len = runner_parts.served_len(config, resolved, num_blocks)
        self.info = self._make_info(num_blocks, max_model_len, whole.vocab_size)

    def _make_info(self, num_blocks: int, max_model_len: int, vocab_size: int) -> RunnerInfo:
        """vocab_size: of the whole model."""
        resolved = self._resolved
        return RunnerInfo(
            vocab_size=vocab_size,
            eos_token_ids=self._model_config.eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            block_size=resolved.block_size,
            num_blocks=num_blocks,
            max_in_flight=resolved.max_in_flight,
            batch_invariant=resolved.batch_invariant,
            prefix_sharing=self._model_config.rope.type is not RopeType.DYNAMIC,
            structured_output=self._grammars is not None,
            phases=self._phases.so_far(),
        )

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        assert self._grammars is not None, "validation refuses what is not there"
        return self._grammars.prepare(spec)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        with self._stream:
            steps = self._steps
            layout = steps.take(plan)
            sampled = steps.run(layout)
            steps.slots.note_advance(layout)
            tokens = self._results.put(plan.step, sampled.token_ids, sampled.scores)
            if sampled.scores is not None:
                steps.edits.sampled(tokens)

    def collect(self) -> StepResult:
        return self._results.take()

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        with self._stream:
            return self._steps.record_next()

    def close(self) -> None:
        """Frees the model and the KV cache. Nothing may be called afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        if self._resolved.on_gpu:
            torch.cuda.synchronize(self._resolved.device)
        self._steps.use_no_graphs()  # they and the steps hold each other
        del self._steps, self._results
        if self._resolved.on_gpu:
            torch.cuda.empty_cache()

    # ---- set-up

    def _make_steps(self, model: DecoderModel, ops: Ops) -> Steps:
        resolved, group, vocab_size = self._resolved, self._group, self._model_config.vocab_size
        slots = SlotTable(
            max_num_seqs=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            device=resolved.device,
            dynamic_rope=self._model_config.rope.type is RopeType.DYNAMIC,
        )
        edits = SlotEdits(
            vocab_size=vocab_size,
            device=resolved.device,
            grammars=self._grammars,
        )
        sampler = Sampler(slots, ops.on_slots)
        if group is not None:
            sampler = RankSampler(slots, ops.on_slots, ShardSampler(group, vocab_size))
        first_kv_cache = self._kv_cache(num_blocks=0)  # steps write to the scratch block
        return Steps(
            resolved,
            model,
            ops,
            slots,
            edits,
            first_kv_cache,
            sampler,
        )

    def _set_up(self, config: EngineConfig) -> int:
        """Everything but the weights; returns how many blocks the KV cache has."""
        resolved, steps = self._resolved, self._steps
        reserved_bytes = self._warm_up()
        steps.edits.clear()
        self._phases.end("warm-up")
        if resolved.cuda_graphs:
            reserved_bytes += self._measure_graphs()
            self._phases.end("trial graphs")
        num_blocks = runner_parts.cache_blocks(
            config, resolved, self._model_config, reserved_bytes, self._group
        )
        steps.kv_cache = self._kv_cache(num_blocks)
        self._phases.end("KV cache")
        if resolved.cuda_graphs:
            steps.use_graphs(CudaGraphRecorder(self._group))
            assert steps.graphs is not None
            steps.graphs.record(runner_parts.time_limit(_RECORDING_S, self._group))
            self._phases.end("graphs")
        return num_blocks

    def _kv_cache(self, num_blocks: int) -> KVCache:
        resolved = self._resolved
        return allocate_kv_cache(
            self._model_config,
            num_blocks=num_blocks,
            block_size=resolved.block_size,
            dtype=resolved.dtype,
            device=resolved.device,
        )

    def _measure_graphs(self) -> int:
        """The memory that all CUDA graphs will take, from a trial of the largest."""
        resolved, device = self._resolved, self._resolved.device
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        steps = self._steps
        steps.use_graphs(CudaGraphRecorder())
        assert steps.graphs is not None
        steps.graphs.record(lambda: False)
        num_graphs = len(resolved.batch_sizes)
        if steps.chunk_graphs is not None:
            steps.chunk_graphs.record_largest()
            num_graphs += MOST_GRAPHS
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what they use stays
        taken_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
        steps.use_no_graphs()
        torch.cuda.empty_cache()
        logits_bytes = (  # of those that are edited
            resolved.max_num_seqs * self._model_config.vocab_size * resolved.dtype.itemsize
        )
        return max(taken_bytes, 0) + logits_bytes + num_graphs * _GRAPH_BYTES

    def _warm_up_plan(self, num_tokens: int, *, short: bool = False) -> Plan:
        plan = runner_parts.warm_up_plan(self._resolved, num_tokens, short=short)
        return plan if self._group is None else replace(plan, whole_rows=True)

    def _run(self, plan: Plan) -> None:
        """A step and the way of its tokens, of which a kernel may be part; nobody wants them."""
        sampled = self._steps.run(self._steps.take(plan))
        self._results.put(plan.step, sampled.token_ids)
        self._results.take()

    def _warm_up(self) -> int:
        """Runs a step; on a GPU, where that compiles kernels, one as large as any and one of short
        prompts. Returns the bytes that they took at their peak."""
        resolved = self._resolved
        try:
            if not resolved.on_gpu:
                num_tokens = min(_CPU_WARM_UP_TOKENS, resolved.max_num_batched_tokens)
                self._run(self._warm_up_plan(num_tokens))
                return 0
            torch.cuda.reset_peak_memory_stats(resolved.device)
            before_bytes = torch.cuda.memory_allocated(resolved.device)
            for short in (False, True):
                self._run(self._warm_up_plan(resolved.max_num_batched_tokens, short=short))
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
