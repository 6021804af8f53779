"""y = x W^T for few rows: kernels that read the weights once, started before x is there.

Decoding is bound by reading weights, and cuBLAS is far from that limit for matrices of a few
megabytes. With dependent launch (pdl.py) the first weights are on their way while the kernel before
still runs. A row alone is a matrix-vector product without tensor cores; more rows are padded tiles,
some with K split over programs, the last of which to arrive adds the parts up in their order.
An epilogue adds the residual, or turns gate and up into SwiGLU's output. RMSNorm can be part of it
too: for one row as it is, for more as a factor, of the squares that the product before left. Which
configuration for which shape, and where cuBLAS is better: linear_configs.py. Oracle and rounding:
reference.linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.kernels import pdl
from millstream.kernels.gemv import PLAIN, RESIDUAL, SWIGLU, Norm, gemv, swiglu_of, weight_rows
from millstream.kernels.linear_configs import Config, Gemv, Tile, fits
from millstream.kernels.padding import padded, whole_tiles
from millstream.kernels.pdl import launch_dependents, wait

_PARTIAL_ELEMENTS = 1 << 20
_COUNTERS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Scratch of split-K, 4 MiB; for the kernels of one stream, one after the other."""

    partials: torch.Tensor  # [_PARTIAL_ELEMENTS] float32
    counters: torch.Tensor  # [_COUNTERS] int32: zero between kernels

    @staticmethod
    def create(device: torch.device) -> Workspace:
        return Workspace(
            partials=torch.empty(_PARTIAL_ELEMENTS, device=device),
            counters=torch.zeros(_COUNTERS, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRows:
    """An RMSNorm without weight before the product, of rows whose squares are known: the product
    is scaled in place of x. A norm's weight is to be in the product's (RMSNorm.folded)."""

    squares: torch.Tensor  # [M, pieces] float32: each piece's sum
    eps: float


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
def row_squares(scale_ptr: tl.tensor, m: tl.tensor, SCALES: tl.constexpr) -> tl.tensor:
    """The sums of squares [rows, at least SCALES] of rows m."""
    piece = tl.arange(0, triton.next_power_of_2(SCALES))
    at = scale_ptr + m[:, None] * SCALES + piece[None, :]
    return tl.load(at, mask=(piece < SCALES)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tile_kernel(
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
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    SCALES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile of the output, or its share of one part of K.

    PIECES: so many sums of squares of a row of the output are left, one by each tile of it; 0:
    none. SCALES: so many of a row of x are there to scale it by; 0: it is not.

    STAGES 0: all weights of the program (up to four chunks) go to registers before the wait;
    otherwise a pipelined loop; x_from and weight_from are descriptors then (see operands).
    """
    launch_dependents(PDL)
    PART: tl.constexpr = K // SPLIT_K
    CHUNKS: tl.constexpr = PART // BLOCK_K
    #  program = (part * tiles of N + tile of N) * tiles of M + tile of M: those that share weights
    #  are neighbours
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    tile_n = tl.program_id(0) // tiles_m % (N // BLOCK_N)
    part = tl.program_id(0) // tiles_m // (N // BLOCK_N)
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
        tile = tile_n * tiles_m + tile_m
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


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    workspace: Workspace,
    *,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    norm: Norm | ScaledRows | None = None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T [M, N] as a new tensor; + residual [M, N], or SwiGLU's output [M, N / 2].

    norm: RMSNorm(x) is what W multiplies. A Norm is for one row (a Gemv) only: it saves a launch
    where a row is one chunk, and costs registers where it is many. ScaledRows are for tiles.
    squares: [M, num_pieces(N, config)] float32, for the sums of squares of the output's rows, of a
    product that has no SwiGLU.

    x: [M, K]; weight: [N, K], contiguous; bfloat16 or float16, all of one dtype, rows of unit
    stride; for tiles with stages x's rows begin at multiples of 16 bytes. For SwiGLU the weight's
    first half is gate, the second up. config: of
    linear_configs.choose. Raises ValueError if the shapes are not the configuration's.
    """
    check_product(x, weight, config)
    _check_beside(x, weight, config, residual, swiglu, norm)
    scale = norm if isinstance(norm, ScaledRows) else None
    check_squares(x, weight, config, swiglu, scale, squares)
    num_rows, (size, depth) = x.shape[0], weight.shape
    epilogue = SWIGLU if swiglu else PLAIN if residual is None else RESIDUAL
    columns = size // 2 if swiglu else size
    # QKV and logits are not multiplied next; of one row these would take 39 MB for 128.
    out = x.new_empty(num_rows, columns) if epilogue == PLAIN else padded(num_rows, columns, like=x)
    shape = {"N": size, "K": depth, "EPILOGUE": epilogue}
    if isinstance(config, Gemv):
        gemv(x, weight, out, config, epilogue, residual, norm)  # type: ignore[arg-type]
        return out
    tiles = triton.cdiv(num_rows, config.block_m) * (size // config.block_n)
    if config.split_k > 1:
        elements = tiles * config.split_k * config.block_m * config.block_n
        if tiles > _COUNTERS or elements > _PARTIAL_ELEMENTS:
            raise ValueError(f"{config} of {num_rows} x {size} does not fit the workspace")
    _tile_kernel[(tiles * config.split_k,)](
        *operands(x, weight, config, swiglu=swiglu),
        residual,
        out,
        squares,
        None if scale is None else scale.squares,
        workspace.partials,
        workspace.counters,
        0.0 if scale is None else scale.eps,
        num_rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        **shape,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        STAGES=config.stages,
        PIECES=0 if squares is None else squares.shape[1],
        SCALES=0 if scale is None else scale.squares.shape[1],
        num_warps=config.num_warps,
        **pdl.options(x.device),
    )
    return out


def num_pieces(out_features: int, tile: Tile) -> int:
    """Of how many pieces of an output row the sums of squares are left."""
    return out_features // tile.block_n


def operands(x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, swiglu: bool) -> tuple[Any, Any]:
    """x and the weight as the kernel takes them: descriptors, of which the GPU's copy engine loads
    boxes; as they are where weights go to registers. A box of SwiGLU's weight is as many rows of
    gate as of up."""
    if not tile.stages:
        return x, weight
    box = [tile.block_n, tile.block_k]
    if swiglu:
        weight, box = weight.view(2, -1, weight.shape[1]), [2, tile.block_n // 2, tile.block_k]
    boxes_of = TensorDescriptor.from_tensor
    rows = whole_tiles(x, tile.block_m)
    return boxes_of(rows, [tile.block_m, tile.block_k]), boxes_of(weight, box)


def check_product(x: torch.Tensor, weight: torch.Tensor, config: Config) -> None:
    """Raises ValueError unless the configuration's kernel can multiply these (see linear)."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not x.shape[0]:
        raise ValueError(f"x, weight: {tuple(x.shape)}, {tuple(weight.shape)}, not [M, K], [N, K]")
    if not fits(config, x.shape[0], *weight.shape):
        raise ValueError(f"{config} does not fit {x.shape[0]} rows of {tuple(weight.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"dtypes: {x.dtype}, {weight.dtype}")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("x must have unit stride along K, and weight be contiguous")
    if isinstance(config, Tile) and config.stages and (x.data_ptr() | x.stride(0) * 2) % 16:
        raise ValueError("x and its rows must begin at multiples of 16 bytes")


def _check_beside(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    residual: torch.Tensor | None,
    swiglu: bool,
    norm: Norm | ScaledRows | None,
) -> None:
    if isinstance(norm, Norm):
        if not isinstance(config, Gemv):
            raise ValueError("a norm with a weight is fused for one row only")
        if norm.weight.shape != weight.shape[1:] or norm.weight.dtype != x.dtype:
            raise ValueError(f"norm: {norm.weight.dtype} of {tuple(norm.weight.shape)}")
        if not norm.weight.is_contiguous():
            raise ValueError("the norm's weight must be contiguous")
    if residual is not None:
        if swiglu or residual.shape != (x.shape[0], weight.shape[0]):
            raise ValueError("a residual is [M, N], and not for SwiGLU")
        if residual.dtype != x.dtype or residual.stride(1) != 1:
            raise ValueError(f"residual: {residual.dtype}, strides {residual.stride()}")


def check_squares(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    swiglu: bool,
    scale: ScaledRows | None,
    squares: torch.Tensor | None,
) -> None:
    """Raises ValueError unless x can be scaled so, and the output's squares be left there."""
    scales = None if scale is None else scale.squares
    given = [tensor for tensor in (squares, scales) if tensor is not None]
    if given and not isinstance(config, Tile):
        raise ValueError("squares are for tiles")
    if any(t.dtype != torch.float32 or not t.is_contiguous() or len(t) != len(x) for t in given):
        raise ValueError("squares must be float32, contiguous, one row for each of x")
    if squares is not None and isinstance(config, Tile):
        pieces = num_pieces(weight.shape[0], config)
        if swiglu or squares.shape != (len(x), pieces):
            raise ValueError(f"squares: {tuple(squares.shape)}, {pieces} pieces of each output row")
