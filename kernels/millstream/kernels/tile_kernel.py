"""The kernel of products of several rows: a program makes a tile of the output, or its share of one
part of K. Launched by linear.linear."""

from __future__ import annotations

import triton
import triton.language as tl

from millstream.kernels.gemv import swiglu_of, weight_rows
from millstream.kernels.pdl import launch_dependents, wait


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(
    sums: tl.tensor,
    residual: tl.tensor,
    out_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    tile_m: tl.tensor,
    tile_n: tl.tensor,
    num_rows: tl.tensor,
    out_stride: tl.tensor,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Stores what the epilogue makes of a tile's sums [BLOCK_M, BLOCK_N]. For SwiGLU gate and up
    are two HALVES of its columns, or side by side. PIECES: as in tile_kernel."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m < num_rows)[:, None]
    if EPILOGUE == 2:
        n = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        if HALVES:
            pairs = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        else:
            pairs = tl.reshape(sums, (BLOCK_M, BLOCK_N // 2, 2))
        out = swiglu_of(pairs, dtype)
    else:
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        out = sums.to(dtype)
        if EPILOGUE == 1:
            out = (out.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        if PIECES > 0:
            wide = out.to(tl.float32)
            piece = squares_ptr + m * PIECES + tile_n
            tl.store(piece, tl.sum(wide * wide, axis=1), mask=m < num_rows)
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], out, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(
    num_rows: tl.tensor, BLOCK_M: tl.constexpr, TILES_N: tl.constexpr, ACROSS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A program's tile of M and of N, and its part of K. Neighbours share a tile's weights; ACROSS:
    its rows of x."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tile = program % (tiles_m * TILES_N)
    if ACROSS:
        tile_m, tile_n = tile // TILES_N, tile % TILES_N
    else:
        tile_m, tile_n = tile % tiles_m, tile // tiles_m
    return tile_m, tile_n, program // (tiles_m * TILES_N)


@triton.jit  # type: ignore[untyped-decorator]
def row_squares(scale_ptr: tl.tensor, m: tl.tensor, SCALES: tl.constexpr) -> tl.tensor:
    """The SCALES sums of squares of each of rows m, [rows, SCALES or with zeros a power of 2]."""
    piece = tl.arange(0, triton.next_power_of_2(SCALES))
    at = scale_ptr + m[:, None] * SCALES + piece[None, :]
    return tl.load(at, mask=(piece < SCALES)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def tile_kernel(
    x_from: tl.tensor,
    weight_from: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    SCALES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile of the output, or its share of one part of K.

    PIECES: so many sums of squares of a row of the output are left, one by each tile of it; 0:
    none. SCALES: so many of a row of x are there to scale it by; 0: it is not.

    STAGES 0: all weights of the program (up to four chunks) go to registers before the wait;
    otherwise a pipelined loop; x_from and weight_from are descriptors then (linear.operands).
    """
    launch_dependents(PDL)
    PART: tl.constexpr = K // SPLIT_K
    CHUNKS: tl.constexpr = PART // BLOCK_K
    tile_m, tile_n, part = tile_of(num_rows, BLOCK_M, N // BLOCK_N, ACROSS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the last row it goes on at the first: masks slow a full tile down, and were it all the
    # last row, all programs would wait for one line of the L2. A descriptor's boxes end with 0.
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % num_rows
    residual = 0.0
    squares = 0.0
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if STAGES == 0:
        k = part * PART + tl.arange(0, BLOCK_K)
        weights = weight_from + weight_rows(n, N, EPILOGUE)[:, None] * K + k[None, :]
        xs = x_from + m[:, None] * x_stride + k[None, :]
        weight_0 = tl.load(weights)
        if CHUNKS > 1:
            weight_1 = tl.load(weights + BLOCK_K)
        if CHUNKS > 2:
            weight_2 = tl.load(weights + 2 * BLOCK_K)
        if CHUNKS > 3:
            weight_3 = tl.load(weights + 3 * BLOCK_K)
        wait(PDL)
        if EPILOGUE == 1:
            residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :])
        if SCALES > 0:
            squares = row_squares(scale_ptr, m, SCALES)
        sums = tl.dot(tl.load(xs), tl.trans(weight_0), sums)
        if CHUNKS > 1:
            sums = tl.dot(tl.load(xs + BLOCK_K), tl.trans(weight_1), sums)
        if CHUNKS > 2:
            sums = tl.dot(tl.load(xs + 2 * BLOCK_K), tl.trans(weight_2), sums)
        if CHUNKS > 3:
            sums = tl.dot(tl.load(xs + 3 * BLOCK_K), tl.trans(weight_3), sums)
    else:
        wait(PDL)
        if EPILOGUE == 1:  # on its way while the loop runs
            residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :])
        if SCALES > 0:
            squares = row_squares(scale_ptr, m, SCALES)
        for start in tl.range(part * PART, (part + 1) * PART, BLOCK_K, num_stages=STAGES):
            if EPILOGUE == 2:
                weight = weight_from.load([0, tile_n * (BLOCK_N // 2), start])
                weight = tl.reshape(weight, (BLOCK_N, BLOCK_K))
            else:
                weight = weight_from.load([tile_n * BLOCK_N, start])
            x = x_from.load([tile_m * BLOCK_M, start])
            sums = tl.dot(x, tl.trans(weight), sums)
    if SCALES > 0:
        sums *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    if SPLIT_K > 1:
        tile = tl.program_id(0) % (tl.num_programs(0) // SPLIT_K)
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partials = partial_ptr + tile * (SPLIT_K * BLOCK_M * BLOCK_N) + at
        tl.store(partials + part * (BLOCK_M * BLOCK_N), sums)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT_K):
                # From L2: another program wrote it.
                total += tl.load(partials + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
            _store_tile(
                total, residual, out_ptr, squares_ptr, tile_m, tile_n, num_rows, out_stride,
                EPILOGUE, BLOCK_M, BLOCK_N, STAGES > 0, PIECES,
            )  # fmt: skip
    else:
        _store_tile(
            sums, residual, out_ptr, squares_ptr, tile_m, tile_n, num_rows, out_stride,
            EPILOGUE, BLOCK_M, BLOCK_N, STAGES > 0, PIECES,
        )  # fmt: skip
