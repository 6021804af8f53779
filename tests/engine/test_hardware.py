"""hardware.py: what is chosen for which machine, and which settings are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millstream.engine import hardware
from millstream.engine.config import EngineConfig
from millstream.engine.hardware import (
    Hardware,
    LoadError,
    check_devices,
    cpu_kv_bytes,
    detect,
    num_kv_blocks,
    resolve,
)
from millstream.engine.model_files.shapes import named_shape

GIB = 1 << 30
MODEL = named_shape("qwen3-0.6b")
assert MODEL is not None
CPU = Hardware(device=torch.device("cpu"), total_memory_bytes=16 * GIB)
SMALL_GPU = Hardware(device=torch.device("cuda", 0), total_memory_bytes=24 * GIB)
LARGE_GPU = Hardware(device=torch.device("cuda", 0), total_memory_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("machine", "dtype", "num_seqs", "batched_tokens", "block_size", "in_flight"),
    [
        (CPU, torch.float32, 256, 2048, 16, 1),
        (SMALL_GPU, torch.bfloat16, 256, 8192, 64, 2),
        (LARGE_GPU, torch.bfloat16, 1024, 8192, 64, 2),
    ],
)
def test_defaults(
    machine: Hardware,
    dtype: torch.dtype,
    num_seqs: int,
    batched_tokens: int,
    block_size: int,
    in_flight: int,
) -> None:
    got = resolve(EngineConfig(), machine, MODEL)
    assert (got.device, got.dtype) == (machine.device, dtype)
    assert (got.max_num_seqs, got.max_num_batched_tokens) == (num_seqs, batched_tokens)
    assert (got.block_size, got.max_in_flight) == (block_size, in_flight)
    assert got.max_model_len == MODEL.max_position


def test_what_is_set_is_kept() -> None:
    config = EngineConfig(
        dtype="float16", max_num_seqs=3, max_num_batched_tokens=5, max_model_len=7, block_size=2
    )
    got = resolve(config, CPU, MODEL)
    assert got.dtype is torch.float16
    assert (got.max_num_seqs, got.max_num_batched_tokens) == (3, 5)
    assert (got.max_model_len, got.block_size) == (7, 2)


def test_dtype_auto_follows_the_checkpoint_on_cuda_only() -> None:
    half = replace(MODEL, dtype="float16")
    untold = replace(MODEL, dtype=None)
    assert resolve(EngineConfig(), LARGE_GPU, half).dtype is torch.float16
    assert resolve(EngineConfig(), LARGE_GPU, untold).dtype is torch.bfloat16
    assert resolve(EngineConfig(), CPU, half).dtype is torch.float32


def test_row_78_no_positions_beyond_the_models() -> None:
    limit = MODEL.max_position
    assert resolve(EngineConfig(max_model_len=limit), CPU, MODEL).max_model_len == limit
    with pytest.raises(LoadError, match=f"max_model_len: the model has {limit} positions"):
        resolve(EngineConfig(max_model_len=limit + 1), CPU, MODEL)


def test_batch_invariance_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_triton_problem", lambda *arguments: "")
    odd = replace(MODEL, vocab_size=MODEL.vocab_size + 1)
    for machine, options, model, says in (
        (CPU, {}, MODEL, "needs attention_backend triton, not torch"),
        (LARGE_GPU, {"attention_backend": "torch"}, MODEL, "needs attention_backend triton"),
        (LARGE_GPU, {"dtype": "float32"}, MODEL, "needs dtype bfloat16 or float16, not float32"),
        (LARGE_GPU, {"tensor_parallel_size": 2}, MODEL, "not with tensor_parallel_size"),
        (LARGE_GPU, {"max_num_batched_tokens": 1 << 20}, MODEL, "tokens are too many for qkv"),
        (LARGE_GPU, {}, odd, r"lm_head is 151937 x 1024: both must be multiples of 16"),
    ):
        with pytest.raises(LoadError, match=rf"^batch_invariant: .*{says}"):
            resolve(EngineConfig(batch_invariant=True, **options), machine, model)  # type: ignore[arg-type]
    assert resolve(EngineConfig(batch_invariant=True), LARGE_GPU, MODEL).batch_invariant
    assert not resolve(EngineConfig(), LARGE_GPU, MODEL).batch_invariant


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    check_devices("cpu", 100)
    monkeypatch.setattr("millstream.engine.hardware.detect", lambda _: LARGE_GPU)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_devices("auto", 2)
    with pytest.raises(LoadError, match=r"^tensor_parallel_size: 3 ranks need as many GPUs, and"):
        check_devices("auto", 3)


def test_detect() -> None:
    assert detect("cpu").device == torch.device("cpu")
    assert detect("cpu").total_memory_bytes > GIB // 2
    with pytest.raises(LoadError, match=r"^device: one of auto, cpu, cuda"):
        detect("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_not_there() -> None:
    assert detect("auto").device.type == "cpu"
    with pytest.raises(LoadError, match=r"^device: cuda, but"):
        detect("cuda")


def test_blocks_of_a_cache() -> None:
    resolved = resolve(EngineConfig(max_num_seqs=4, max_model_len=64), CPU, MODEL)
    assert num_kv_blocks(resolved, kv_bytes=1000, block_bytes=100) == 10
    assert num_kv_blocks(resolved, kv_bytes=1 << 60, block_bytes=100) == 256 * 4
    for kv_bytes in (99, 0, -5):
        with pytest.raises(LoadError, match="no room for a KV cache"):
            num_kv_blocks(resolved, kv_bytes=kv_bytes, block_bytes=100)


def test_cpu_cache_is_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's memory, or what a container's control group leaves."""
    files = {"/proc/meminfo": ["MemTotal: 9 kB", f"MemAvailable:   {5 * GIB // 1024} kB"]}
    monkeypatch.setattr(hardware, "_lines", lambda path: files.get(path, []))
    assert cpu_kv_bytes() == 2 * GIB
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert cpu_kv_bytes() == 2 * GIB
    files["/sys/fs/cgroup/memory.max"] = [str(2 * GIB)]
    files["/sys/fs/cgroup/memory.current"] = [str(GIB)]
    assert cpu_kv_bytes() == int(0.4 * GIB)
    files["/proc/meminfo"] = [f"MemAvailable: {500 * GIB // 1024} kB"]
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert cpu_kv_bytes() == 4 * GIB
