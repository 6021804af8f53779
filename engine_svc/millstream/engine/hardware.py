"""What the machine has, and the settings that follow from it, the model and the config."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from millstream.engine.config import DEVICES, EngineConfig
from millstream.engine.graphs import batch_sizes
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.rope_config import RopeType

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_LARGE_GPU_BYTES = 70 * _GIB
_CPU_KV_BYTES = 4 * _GIB
_CPU_KV_SHARE = 0.4  # of the memory that is available
# What CUDA itself, its libraries and loaded kernels take of a GPU, beside what torch reserves.
_CUDA_BYTES = _GIB
# A pool that holds so many sequences of full length at once is large enough, also as prefix cache.
_ENOUGH_SEQUENCES = 256


class LoadError(ValueError):
    """The engine cannot start: one clear line that names the setting or the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where a model can run."""

    device: torch.device
    total_memory_bytes: int  # of the GPU, or of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The settings that were left open in EngineConfig, decided."""

    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int
    # Positions that the model is built for; the KV cache may hold fewer.
    max_model_len: int
    block_size: int
    max_in_flight: int  # steps launched and not collected
    attention_backend: str  # triton, flash-attn (with triton for the rest) or torch
    # Batch sizes that kernels are laid out for, ascending; the last is max_num_seqs.
    batch_sizes: tuple[int, ...]
    batch_invariant: bool
    cuda_graphs: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def detect(device: str) -> Hardware:
    """The hardware that `device` (auto, cpu or cuda) names. Raises LoadError if it is not there."""
    if device not in DEVICES:
        raise LoadError(f"device: one of {', '.join(DEVICES)}, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise LoadError("device: cuda, but torch finds no CUDA device")
    if device == "cpu" or not torch.cuda.is_available():
        return Hardware(device=torch.device("cpu"), total_memory_bytes=_memory_bytes("MemTotal"))
    index = torch.cuda.current_device()
    return Hardware(
        device=torch.device("cuda", index),
        total_memory_bytes=torch.cuda.get_device_properties(index).total_memory,
    )


def check_devices(device: str, num_ranks: int) -> None:
    """Raises LoadError if there are too few GPUs for as many ranks."""
    if detect(device).device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise LoadError(
            f"tensor_parallel_size: {num_ranks} ranks need as many GPUs, and torch finds "
            f"{torch.cuda.device_count()}"
        )


def resolve(config: EngineConfig, hardware: Hardware, model: ModelConfig) -> ResolvedConfig:
    """Every open setting, decided; pure. Raises LoadError for what the model cannot do."""
    on_gpu = hardware.device.type == "cuda"
    large = on_gpu and hardware.total_memory_bytes >= _LARGE_GPU_BYTES
    dtype = config.dtype
    if dtype == "auto":
        dtype = (model.dtype or "bfloat16") if on_gpu else "float32"
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise LoadError(
            f"max_model_len: the model has {model.max_position} positions, "
            f"so {max_model_len} is too long"
        )
    with_flash = config.attention_backend == "flash-attn"
    block_size = config.block_size or (256 if with_flash else 64 if on_gpu else 16)
    attention_backend = _attention_backend(config, hardware, model, block_size)
    if with_flash and (problem := _flash_problem(dtype, block_size)):
        raise LoadError(f"attention_backend: {problem}")
    max_num_seqs = config.max_num_seqs or (1024 if large else 256)
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 2048)
    if config.batch_invariant:
        most_tokens = max_num_batched_tokens + max_num_seqs  # of a step that fills up a graph
        _check_invariant(config, attention_backend, dtype, model, most_tokens)
    return ResolvedConfig(
        device=hardware.device,
        dtype=getattr(torch, dtype),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        max_in_flight=2 if on_gpu else 1,
        attention_backend=attention_backend,
        batch_sizes=tuple(batch_sizes(max_num_seqs)),
        batch_invariant=config.batch_invariant,
        cuda_graphs=on_gpu
        and attention_backend != "torch"
        and not config.enforce_eager
        and model.rope.type is not RopeType.DYNAMIC,
    )


def _attention_backend(
    config: EngineConfig, hardware: Hardware, model: ModelConfig, block_size: int
) -> str:
    wanted = config.attention_backend
    if wanted == "torch" or (wanted == "auto" and hardware.device.type != "cuda"):
        return "torch"
    problem = _triton_problem(hardware, model, block_size)
    if problem and wanted != "auto":
        raise LoadError(f"attention_backend: {problem}")
    if problem:
        logger.warning("attention_backend is torch, which is slow on a GPU: %s", problem)
    return "torch" if problem else "triton" if wanted == "auto" else wanted


def _triton_problem(hardware: Hardware, model: ModelConfig, block_size: int) -> str:
    """Why Triton's kernels cannot serve a model; "" if they can. Imports Triton."""
    try:
        import triton

        from millstream.engine.backends.triton_ops import unsupported
    except ImportError as error:
        return f"{error}"
    if hardware.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"triton has no compiler for {hardware.device}"
    return unsupported(model, block_size)


def _flash_problem(dtype: str, block_size: int) -> str:
    """Why flash-attn cannot serve; "" if it can. Imports it."""
    if dtype == "float32":
        return "flash-attn needs dtype bfloat16 or float16, not float32"
    if block_size % 256:
        return f"flash-attn needs a block_size of 256, not {block_size}"
    from millstream.engine.backends.step_attention import load_flash

    try:
        load_flash()
    except ImportError as error:
        return f"flash-attn is not installed, or does not load: {error}"
    return ""


def _check_invariant(
    config: EngineConfig, backend: str, dtype: str, model: ModelConfig, max_tokens: int
) -> None:
    """Raises LoadError where a token's bits depend on the batch."""
    if backend != "triton":
        raise LoadError(
            f"batch_invariant: needs attention_backend triton, not {backend}, whose libraries "
            "may choose how they sum by the number of rows"
        )
    if config.tensor_parallel_size > 1:
        raise LoadError(
            "batch_invariant: not with tensor_parallel_size above 1: the order of sums over ranks "
            "depends on the number of rows"
        )
    if dtype == "float32":
        raise LoadError("batch_invariant: needs dtype bfloat16 or float16, not float32")
    from millstream.engine.backends.products import not_invariant

    if problem := not_invariant(model, max_tokens):
        raise LoadError(f"batch_invariant: {problem}")


def num_kv_blocks(resolved: ResolvedConfig, *, kv_bytes: int, block_bytes: int) -> int:
    """Blocks in so much memory, but no more than are of use. Raises LoadError if there is none."""
    sequences = max(resolved.max_num_seqs, _ENOUGH_SEQUENCES)
    useful = sequences * math.ceil(resolved.max_model_len / resolved.block_size)
    blocks = min(kv_bytes // block_bytes, useful)
    if blocks < 1:
        raise LoadError(
            f"no room for a KV cache: a block of {resolved.block_size} tokens takes {block_bytes} "
            f"bytes, and there are {max(kv_bytes, 0)} (kv_cache_bytes, gpu_memory_utilization)"
        )
    return blocks


def cpu_kv_bytes() -> int:
    """The KV cache's share of the memory that is available now."""
    return min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * _memory_bytes("MemAvailable")))


def gpu_kv_bytes(
    device: torch.device, *, utilization: float, group_bytes: int, reserved_bytes: int
) -> int:
    """What `utilization` of the GPU leaves beside this process's tensors, what its group of ranks
    took, and `reserved_bytes`, for what comes later; but no more than other processes leave."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device) + _CUDA_BYTES + group_bytes
    return min(int(total_bytes * utilization) - own_bytes, free_bytes) - reserved_bytes


def _memory_bytes(field: str) -> int:
    """MemTotal or MemAvailable of /proc/meminfo, within the control group's limit."""
    amounts = []
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == field:
            amounts.append(int(rest.split()[0]) * 1024)
    limit = " ".join(_lines("/sys/fs/cgroup/memory.max"))
    if limit.isdigit():
        used = " ".join(_lines("/sys/fs/cgroup/memory.current"))
        counted = int(used) if field == "MemAvailable" and used.isdigit() else 0
        amounts.append(max(int(limit) - counted, 0))
    return min(amounts, default=_CPU_KV_BYTES)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
