"""ModelRunner: loads a model and carries plans out on it.

Loading, in order: process group, config, hardware, model (laid out on meta, filled from safetensors
or with random numbers), a warm-up forward that shows how much memory a step takes, KV cache sized
from what is left, slot table. Then a step is

    slots.apply(plan) -> batch(layout) -> model -> sample -> slots.advance     (device state to
                                                                                device state)
    -> copy of the sampled tokens to the host, which collect() waits for

On a GPU launch() only enqueues, so that two steps may be in flight. On a CPU it computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from millstream.engine.attention import TorchAttention, allocate_kv_cache, bytes_per_block
from millstream.engine.config import LOAD_FORMATS, EngineConfig
from millstream.engine.hardware import (
    LoadError,
    ResolvedConfig,
    cpu_kv_bytes,
    detect,
    gpu_kv_bytes,
    num_kv_blocks,
    resolve,
)
from millstream.engine.model_config import ModelConfig, load_model_config
from millstream.engine.models import DecoderModel, build_model
from millstream.engine.parallel import join_process_group
from millstream.engine.plan import Chunk, Plan, RunnerInfo, SlotStart, StepResult
from millstream.engine.request import Sampling
from millstream.engine.results import CpuResults, GpuResults
from millstream.engine.rope_config import RopeType
from millstream.engine.sampling import sample
from millstream.engine.shapes import SHAPE_NAMES, named_shape
from millstream.engine.slots import BatchLayout, SlotTable
from millstream.engine.weights import init_dummy_weights, load_weights

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (bytes of weights read, bytes in all)

# A CPU's steps are alike from the first on: its warm-up only proves that the model runs.
_CPU_WARM_UP_TOKENS = 16


class ModelRunner:
    """A plan.Runner over one model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path | None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Loads the model; raises LoadError (or another ValueError or OSError) with a clear line.

        With load_format dummy no folder is needed when config.model names a shape.
        """
        join_process_group(config.tensor_parallel_size)
        model_config = _model_config(config, model_dir)
        self._resolved = resolved = resolve(config, detect(config.device), model_config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if resolved.on_gpu:
            # cuDNN's attention plans anew for each length it has not seen: 2 ms a layer and step.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._results = GpuResults(resolved) if resolved.on_gpu else CpuResults()
        with torch.inference_mode():
            started = time.monotonic()
            self._model = _load_model(config, resolved, model_config, model_dir, on_progress)
            loaded = time.monotonic()
            self._set_up(model_config, num_blocks=0)  # the warm-up writes to the scratch block
            workspace_bytes = self._warm_up()
            num_blocks = _num_blocks(config, resolved, model_config, workspace_bytes)
            self._set_up(model_config, num_blocks)
        logger.info(
            "weights in %.1f s, warm-up and KV cache in %.1f s: %s on %s, %d blocks of %d tokens "
            "(%.2f GiB)",
            loaded - started,
            time.monotonic() - loaded,
            resolved.dtype,
            resolved.device,
            num_blocks,
            resolved.block_size,
            self._kv_cache.data.nbytes / (1 << 30),
        )
        self.info = RunnerInfo(
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            max_model_len=_served_len(config, resolved, num_blocks),
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            block_size=resolved.block_size,
            num_blocks=num_blocks,
            max_in_flight=resolved.max_in_flight,
            prefix_sharing=model_config.rope.type is not RopeType.DYNAMIC,
        )

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        layout = self._slots.apply(plan)
        self._results.put(plan.step, self._step(layout))

    def collect(self) -> StepResult:
        return self._results.take()

    def close(self) -> None:
        """Frees the model and the KV cache. Nothing may be called afterwards."""
        del self._model, self._kv_cache, self._slots, self._results
        if self._resolved.on_gpu:
            torch.cuda.empty_cache()

    def _step(self, layout: BatchLayout) -> torch.Tensor:
        """Computes a step from the slots' state, and leaves there what the next one reads.

        Returns the sampled token ids [R] int64, on the device.
        """
        batch = self._slots.batch(layout)
        logits = self._model(batch, self._kv_cache)
        token_ids = sample(logits, batch.positions[batch.sample_rows] + 1, layout.sampling)
        self._slots.advance(layout, batch, token_ids)
        return token_ids

    def _set_up(self, model_config: ModelConfig, num_blocks: int) -> None:
        resolved = self._resolved
        self._kv_cache = allocate_kv_cache(
            model_config,
            num_blocks=num_blocks,
            block_size=resolved.block_size,
            dtype=resolved.dtype,
            device=resolved.device,
        )
        self._slots = SlotTable(
            max_num_seqs=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            device=resolved.device,
            dynamic_rope=model_config.rope.type is RopeType.DYNAMIC,
        )

    def _warm_up(self) -> int:
        """Runs one step, on a GPU as large as any; returns the bytes that it took at its peak."""
        resolved = self._resolved
        try:
            if not resolved.on_gpu:
                num_tokens = min(_CPU_WARM_UP_TOKENS, resolved.max_num_batched_tokens)
                self._step(self._slots.apply(_warm_up_plan(resolved, num_tokens)))
                return 0
            torch.cuda.reset_peak_memory_stats(resolved.device)
            before_bytes = torch.cuda.memory_allocated(resolved.device)
            plan = _warm_up_plan(resolved, resolved.max_num_batched_tokens)
            self._step(self._slots.apply(plan))
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


def _model_config(config: EngineConfig, model_dir: Path | None) -> ModelConfig:
    if config.load_format not in LOAD_FORMATS:
        raise LoadError(
            f"load_format: one of {', '.join(LOAD_FORMATS)}, not {config.load_format!r}"
        )
    if model_dir is not None:
        return load_model_config(model_dir)
    shape = named_shape(config.model or "") if config.load_format == "dummy" else None
    if shape is None:
        raise LoadError(
            f"model: a folder, or with load_format dummy one of {', '.join(SHAPE_NAMES)}, "
            f"not {config.model!r}"
        )
    return shape


def _load_model(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    model_dir: Path | None,
    on_progress: OnProgress | None,
) -> DecoderModel:
    try:
        model = build_model(
            model_config,
            dtype=resolved.dtype,
            device=resolved.device,
            max_model_len=resolved.max_model_len,
            attention=TorchAttention(),
        )
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed)
        else:
            assert model_dir is not None
            load_weights(model, model_dir, on_progress=on_progress)
    except torch.OutOfMemoryError as error:
        raise LoadError(f"model: its weights do not fit in the memory of {resolved.device}") from (
            error
        )
    return model


def _warm_up_plan(resolved: ResolvedConfig, num_tokens: int) -> Plan:
    """A step of `num_tokens` tokens of as many sequences as there can be, all in scratch block 0:
    chunks as long as can be, then decodes; sampling with every filter."""
    num_seqs = min(resolved.max_num_seqs, num_tokens)
    longest = resolved.max_model_len - 1
    spare = num_tokens - num_seqs  # tokens beyond one for each sequence
    chunks: list[Chunk] = []
    while spare and len(chunks) < num_seqs and longest > 1:
        length = min(longest, spare + 1)
        chunks.append(Chunk(slot=len(chunks), start=0, token_ids=(0,) * length, samples=True))
        spare -= length - 1
    sampling = Sampling(max_tokens=1, top_k=1, top_p=0.5, min_p=0.1)
    starts = [
        SlotStart(
            slot=slot,
            sampling=sampling,
            min_position=0,
            banned_token_ids=(),
            num_computed_tokens=0,
            block_ids=(0,) * -(-longest // resolved.block_size) if slot < len(chunks) else (0,),
        )
        for slot in range(num_seqs)
    ]
    return Plan(
        step=0,
        starts=tuple(starts),
        chunks=tuple(chunks),
        decode_slots=tuple(range(len(chunks), num_seqs)),
    )


def _num_blocks(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelConfig, workspace_bytes: int
) -> int:
    if config.kv_cache_bytes is not None:
        kv_bytes = config.kv_cache_bytes
    elif resolved.on_gpu:
        kv_bytes = gpu_kv_bytes(
            resolved.device,
            utilization=config.gpu_memory_utilization,
            workspace_bytes=workspace_bytes,
        )
    else:
        kv_bytes = cpu_kv_bytes()
    block_bytes = bytes_per_block(model, resolved.block_size, resolved.dtype)
    return num_kv_blocks(resolved, kv_bytes=kv_bytes, block_bytes=block_bytes)


def _served_len(config: EngineConfig, resolved: ResolvedConfig, num_blocks: int) -> int:
    """max_model_len as clients see it: one that nobody asked for shrinks to what the pool holds."""
    pool_tokens = num_blocks * resolved.block_size
    if resolved.max_model_len <= pool_tokens:
        return resolved.max_model_len
    if config.max_model_len is not None:
        logger.warning(
            "the KV cache holds %d tokens, fewer than max_model_len (%d): longer requests are "
            "refused",
            pool_tokens,
            resolved.max_model_len,
        )
        return resolved.max_model_len
    logger.warning(
        "max_model_len is %d instead of the model's %d: that is what the KV cache holds",
        pool_tokens,
        resolved.max_model_len,
    )
    return pool_tokens
