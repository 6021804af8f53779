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
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.kernels import pdl
from millstream.kernels.boxes import padded, whole_tiles
from millstream.kernels.gemv import PLAIN, RESIDUAL, SWIGLU, Norm, gemv
from millstream.kernels.linear_configs import Config, Gemv, Tile, fits
from millstream.kernels.tile_kernel import tile_kernel

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
    stride; for tiles with stages x's rows begin at multiples of 16 bytes, each at another. For
    SwiGLU the weight's first half is gate, the second up. config: of linear_configs.choose. Raises
    ValueError if the shapes are not the configuration's.
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
    if isinstance(config, Gemv):
        assert not isinstance(norm, ScaledRows), "check_squares refuses it"
        gemv(x, weight, out, config, epilogue, residual, norm)
        return out
    tiles = triton.cdiv(num_rows, config.block_m) * (size // config.block_n)
    if config.split_k > 1:
        elements = tiles * config.split_k * config.block_m * config.block_n
        if tiles > _COUNTERS or elements > _PARTIAL_ELEMENTS:
            raise ValueError(f"{config} of {num_rows} x {size} does not fit the workspace")
    tile_kernel[(tiles * config.split_k,)](
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
        N=size,
        K=depth,
        EPILOGUE=epilogue,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        ACROSS=config.across,
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
    has_boxes = isinstance(config, Tile) and config.stages > 0
    if has_boxes and ((x.data_ptr() | x.stride(0) * 2) % 16 or not x.stride(0)):
        raise ValueError("x and its rows must begin at multiples of 16 bytes, each at another")


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
