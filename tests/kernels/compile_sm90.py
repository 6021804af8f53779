"""Compiles the kernels that ship for Hopper on a machine without a GPU, and reads what ptxas says.

    python -m tests.kernels.compile_sm90

Prints a line per kernel and configuration: registers, bytes spilled, bytes of shared memory; exits
with 1 if one spills or asks for more shared memory than there is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from tests.bench.compilation import Hopper
from tests.kernels.attention_jobs import attention_jobs
from tests.kernels.early_reads import EARLY_READS, PUBLISHING
from tests.kernels.roles import BEFORE, epilogue_of
from triton.runtime import driver

from millstream.kernels import (
    add_rms_norm,
    copy_out,
    decode_state,
    gemv,
    linear,
    qk_norm_rope_store,
    qkv_heads,
    sample,
    sample_filters,
    sample_masses,
    sample_shards,
    silu_mul,
    sum_add_rms_norm,
    tile_kernel,
)
from millstream.kernels.invariant_tiles import invariant_tile
from millstream.kernels.linear_configs import _HEADS, _MEASURED, Gemv, Tile, choose

_SHARED_BYTES = 227 * 1024
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64

Job = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, arguments, constants


def jobs() -> Iterator[Job]:
    norm = add_rms_norm._rms_norm_kernel
    for hidden in (1024, 5120, 8192):
        block = triton.next_power_of_2(hidden)
        for add in (True, False):
            sizes = {"HIDDEN": hidden, "BLOCK": block, "ADD": add}
            warps = min(max(block // 256, 1), 16)
            yield norm, (BF16,) * 4 + (hidden,) * 3 + (1e-6,), {**sizes, "num_warps": warps}
    for hidden, ranks in ((5120, 2), (5120, 4), (5120, 8), (8192, 8)):
        block = triton.next_power_of_2(hidden // 2)
        sizes = {"WORDS": hidden // 2, "BLOCK": block, "RANKS": ranks}
        arguments = (I32, I32, I32, I32, I64, I32, 1, 256, hidden // 2, 1e-6)
        yield (
            sum_add_rms_norm._sum_add_rms_norm_kernel,
            arguments,
            {**sizes, "num_warps": min(block // sum_add_rms_norm._WORDS_PER_WARP, 16)},
        )
    swiglu = {"SIZE": 3072, "BLOCK": silu_mul._BLOCK, "num_warps": silu_mul._NUM_WARPS}
    yield silu_mul._silu_mul_kernel, (BF16, BF16, 6144, 3072), swiglu
    yield copy_out._copy_out_kernel, (I64, I64, 256), {"BLOCK": copy_out._BLOCK, "num_warps": 4}
    for rows in (1, 256):
        sizes = {"ROWS": decode_state._ROWS, "num_warps": 1}
        yield decode_state._advance_kernel, (I64, I64, I64, I64, 256, rows), sizes
        for hidden, warps in ((0, 1), (1024, 4), (5120, 16)):
            rows_of = BF16 if hidden else None
            sizes = {"BLOCK_SIZE": 64, "HIDDEN": hidden, "num_warps": warps}
            yield (
                decode_state._read_kernel,
                (I64, I64, I64, I32, rows_of, I64, I32, rows_of, 640, rows),
                {**sizes, "WIDTH": triton.next_power_of_2(max(hidden, 1))},
            )
    yield from samplers()
    yield from attention_jobs()
    yield from products()


def products() -> Iterator[Job]:
    for shape, configs in _MEASURED.items():
        for rows, config in configs:
            if config is not None:
                for scales in scales_of(rows, shape):
                    yield linear_job(rows, *shape, config, scales=scales, folded=True)
    for shape, tiles in _HEADS.items():
        for rows, tile in tiles:
            if tile is not None:
                for scales in scales_of(rows, shape):
                    yield heads_job(rows, *shape, tile, scales)
    for size, depth in ((34816, 5120), (5120, 17408)):
        yield linear_job(1, size, depth, Gemv(block_n=4))
    for shape in ((6144, 1024), (1024, 2048), (151936, 1024), (34816, 5120), (48, 80)):
        for rows in (1, 200, 4096):
            yield linear_job(rows, *shape, invariant_tile(rows, *shape))


def scales_of(rows: int, shape: tuple[int, int]) -> set[int]:
    """How many squares of a row of x a product is given: none, or what the one before leaves."""
    before = BEFORE.get(shape)
    tile = None if before is None else choose(rows, *before)
    return {0, linear.num_pieces(before[0], tile)} if before and isinstance(tile, Tile) else {0}


def samplers() -> Iterator[Job]:
    for logits in (BF16, F32):
        for extra in (True, False):
            thresholds = F32 if extra else None
            sizes = {"HAS_THRESHOLDS": extra, "BLOCK": 1024}
            pointers = (logits, I64, F32, thresholds, F32, F32)
            shape = {"BLOCKS": 2, "PIECE": 512 // logits.itemsize, "num_warps": 1}
            yield (
                sample_masses._masses_kernel,
                (*pointers, 151_936, 3, 151_936, 149),
                {**sizes, **shape},
            )
            for shard, advance in ((False, False), (False, True), (True, False)):
                table = I64 if advance else None
                out = F32 if shard else I64
                pointers = (logits, I64, I64, F32, I64, thresholds, F32, F32, out, table, table)
                sizes |= {"SHARD": shard, "ADVANCE": advance, "WIDTH": 256}
                yield (
                    sample._choice_kernel,
                    (*pointers, 256, 151_936, 3, 5, 151_936, 149, 0, 256),
                    {**sizes, "num_warps": sample._CHOICE_WARPS},
                )
        yield (
            sample_filters._thresholds_kernel,
            (logits, I64, F32, I64, F32, F32, F32, 151_936, 3, 5, 3, 3, 151_936),
            {"STEP": sample_filters._STEP, "num_warps": sample_filters._NUM_WARPS},
        )
    arguments = (I64, F32, F32, I64, 3, 256, 2, 151_936)
    yield sample_shards._merge_kernel, arguments, {"WIDTH": 2, "num_warps": 1}


def linear_job(
    rows: int, size: int, depth: int, config: Any, *, scales: int = 0, folded: bool = False
) -> Job:
    """With the epilogue of the matrix's role, and a row's norm where its product can take it in.
    folded: norms are, so that what adds to the residual leaves its squares."""
    epilogue = epilogue_of((size, depth))
    residual = BF16 if epilogue == gemv.RESIDUAL else None
    constants = {"N": size, "K": depth, "EPILOGUE": epilogue, "num_warps": config.num_warps}
    constants |= {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    if isinstance(config, Gemv):
        norm = BF16 if residual is None else None
        arguments: tuple[Any, ...] = (BF16, BF16, residual, norm, BF16, 1e-6)
        return gemv._gemv_kernel, arguments, {**constants, "NORM": norm is not None}
    x, weight = (torch.empty(n, depth, dtype=BF16, device="meta") for n in (rows, size))
    loaded: tuple[Any, ...] = (BF16, BF16)
    if config.stages:
        loaded = linear.operands(x, weight, config, swiglu=epilogue == gemv.SWIGLU)
    strides = (depth, size if residual else 0, size)
    pieces = linear.num_pieces(size, config) if residual and folded else 0
    pointers = (F32 if pieces else None, F32 if scales else None, F32, I32)
    arguments = (*loaded, residual, BF16, *pointers, 1e-6, rows, *strides)
    constants |= {"BLOCK_M": config.block_m, "SPLIT_K": config.split_k, "ACROSS": config.across}
    return (
        tile_kernel.tile_kernel,
        arguments,
        {
            **constants,
            "STAGES": config.stages,
            "PIECES": pieces,
            "SCALES": scales,
        },
    )


def heads_job(rows: int, size: int, depth: int, tile: Tile, scales: int) -> Job:
    x, weight = (torch.empty(n, depth, dtype=BF16, device="meta") for n in (rows, size))
    loaded = linear.operands(x, weight, tile, swiglu=False)
    scale = F32 if scales else None
    pointers = (scale, BF16, BF16, BF16, BF16, I64, I64, BF16, BF16, BF16)
    constants = {
        "K": depth,
        "NUM_HEADS": 16,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": tile.block_n,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "ACROSS": tile.across,
        "STAGES": tile.stages,
        "SCALES": scales,
        "NORM": True,
        "TABLE": True,
        "num_warps": tile.num_warps,
        **qk_norm_rope_store.KEEP_ROUNDING,
    }
    return qkv_heads._qkv_heads_kernel, (*loaded, *pointers, 1e-6, 1e-6, rows, 128), constants


def compile_one(job: Job) -> tuple[int, int, int]:
    """Registers, spilled bytes and bytes of shared memory."""
    kernel, arguments, constants = job
    compiled = kernel.warmup(*arguments, grid=(1,), PDL=True, launch_pdl=True, **constants)
    ptx = compiled.asm["ptx"]
    check_dependent_launch(kernel.fn.__name__, ptx)
    # torch rounds each of two products before it adds them; a fused multiply-add would not.
    rotating = (qk_norm_rope_store._qk_norm_rope_store_kernel, qkv_heads._qkv_heads_kernel)
    assert kernel not in rotating or "fma.rn.bf16" not in ptx
    if kernel is tile_kernel.tile_kernel and constants["BLOCK_M"] >= 64:
        # Tiles of a batch-invariant product have one order of summation: that of this instruction.
        assert f"n{min(constants['BLOCK_N'], 256)}k16" in ptx and "mma.sync" not in ptx
    architecture = "sm_90a" if "sm_90a" in ptx else "sm_90"
    ptxas = next(Path(triton.__file__).parent.rglob("ptxas"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [ptxas, "-v", f"-arch={architecture}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    return (
        registers,
        sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        compiled.metadata.shared,
    )


def check_dependent_launch(name: str, ptx: str) -> None:
    """Raises AssertionError unless the compiler kept pdl.py's rules: before its first wait a kernel
    writes nothing and, unless it is known to, reads nothing; what publishes has stored by then."""
    waits, said = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
    early = re.findall(r"\b(?:ld|st|red|atom)\.global|\bcp\.async", ptx[:waits])
    assert not early or (name in EARLY_READS and set(early) == {"ld.global"}), f"{name}: {early}"
    if name in PUBLISHING:
        *steps, last = (ptx.rindex(what) for what in ("st.global", "fence.acq_rel.gpu", "bar.sync"))
        assert waits < steps[0] < steps[1] < last < said, f"{name} publishes early"
    else:
        assert said < waits, f"{name} lets the next kernel start late"


def main() -> int:
    driver.set_active(Hopper())
    failed = 0
    # Once each: batches and dtypes may share a kernel.
    unique = {(job[0], str(job[1]), *job[2].items()): job for job in jobs()}
    for job in unique.values():
        registers, spilled, shared = compile_one(job)
        bad = spilled > 0 or shared > _SHARED_BYTES
        failed |= bad
        constants = " ".join(f"{key}={value}" for key, value in job[2].items())
        print(
            f"{'BAD ' if bad else ''}{job[0].fn.__name__}: {registers} registers, "
            f"{spilled} spilled, {shared} shared: {constants}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
