"""A model's products on GPUs: which are kernels of millstream.kernels and which are cuBLAS's, and
what of the norm before and of the addition behind is within them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.engine.layers import Linear, RMSNorm, RowParallelLinear
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.ops import Stream
from millstream.engine.parallel import Group
from millstream.kernels import boxes
from millstream.kernels.add_rms_norm import add_rms_norm, rms_norm
from millstream.kernels.gemv import Norm
from millstream.kernels.heads import Heads
from millstream.kernels.invariant_tiles import invariant_tile
from millstream.kernels.linear import ScaledRows, Workspace, linear, num_pieces
from millstream.kernels.linear_configs import Config, Gemv, Tile, choose, choose_heads
from millstream.kernels.qk_norm_rope_store import qk_norm_rope_store
from millstream.kernels.qkv_heads import qkv_heads
from millstream.kernels.silu_mul import silu_mul
from millstream.kernels.sum_add_rms_norm import sum_add_rms_norm

_MANY_ROWS = 64  # of a decode step


def not_invariant(config: ModelConfig, max_tokens: int) -> str:
    """Why a model's products of up to so many tokens have no tiles for any batch; "" if they do."""
    weights = {**config.layer_products, "lm_head": (config.vocab_size, config.hidden_size)}
    for name, shape in weights.items():
        if invariant_tile(1, *shape) is None:
            return f"{name} is {shape[0]} x {shape[1]}: both must be multiples of 16"
        if name != "lm_head" and invariant_tile(max_tokens, *shape) is None:
            return f"{max_tokens} tokens are too many for {name}, which is {shape[0]} x {shape[1]}"
    return ""


class Products:
    """The products of an engine's steps, one after the other."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, invariant: bool
    ) -> None:
        """invariant: a token's values are the same bits in every batch (see not_invariant)."""
        self._invariant = invariant
        self._head_dim = config.head_dim
        self._workspace = Workspace.create(device)
        self._has_boxes = boxes.are_copied(device)
        # Where products have tiles: they scale rows, of which the product before left the squares.
        gate_up = choose(_MANY_ROWS, *config.layer_products["gate_up"])
        has_tiles = dtype.itemsize == 2 and isinstance(gate_up, Tile)
        self.folds_norms = has_tiles and self._has_boxes and not invariant

    def normed(self, stream: Stream, norm: RMSNorm, layer: Linear, *, swiglu: bool) -> Tensor:
        """StepOps.norm_linear, or norm_swiglu."""
        config = self.config_for(stream.residual, layer)
        x, within = _normed_rows(stream, norm, config)
        if config is not None and layer.bias is None:
            return linear(x, layer.weight, config, self._workspace, swiglu=swiglu, norm=within)
        product = self._product(x, layer, config)
        return silu_mul(product) if swiglu else product

    def added(self, x: Tensor, layer: Linear, residual: Tensor) -> Stream:
        """StepOps.add_linear."""
        config = self.config_for(x, layer)
        if isinstance(layer, RowParallelLinear):  # the residual is added once, to the sum
            return Stream(residual, self._product(x, layer, config), layer.group)
        if config is None or layer.bias is not None:
            return Stream(residual, self._product(x, layer, config))
        squares = None
        if self.folds_norms and isinstance(config, Tile):
            pieces = num_pieces(len(layer.weight), config)
            squares = torch.empty((len(x), pieces), dtype=torch.float32, device=x.device)
        workspace = self._workspace
        total = linear(x, layer.weight, config, workspace, residual=residual, squares=squares)
        return Stream(total, squares=squares)

    def heads(self, stream: Stream, norm: RMSNorm, layer: Linear, heads: Heads) -> Tensor:
        """QKV's product and what follows: the query [n, Hq, D]; key and value are in the cache."""
        tile = self.heads_tile(stream.residual, layer)
        if tile is None:
            return qk_norm_rope_store(self.normed(stream, norm, layer, swiglu=False), heads)
        x, scale = _normed_rows(stream, norm, tile)
        assert not isinstance(scale, Norm)
        return qkv_heads(x, layer.weight, tile, heads, scale=scale)

    def config_for(self, x: Tensor, layer: Linear) -> Config | None:
        """The configuration of a kernel for x; None: cuBLAS."""
        if x.dtype is torch.float32 or not len(x):
            return None
        if self._invariant:
            tile = invariant_tile(len(x), *layer.weight.shape)
            assert tile is not None, "resolve refused what has none"
            return tile
        config = choose(len(x), *layer.weight.shape) if layer.bias is None else None
        slow = isinstance(config, Tile) and config.stages and not self._has_boxes
        return None if slow else config

    def heads_tile(self, x: Tensor, layer: Linear) -> Tile | None:
        """The tile of QKV's product and what follows in one kernel; None: in two."""
        apart = x.dtype is torch.float32 or self._invariant or layer.bias is not None
        if apart or not self._has_boxes:
            return None
        size, depth = layer.weight.shape
        return choose_heads(len(x), size, depth, self._head_dim)

    def _product(self, x: Tensor, layer: Linear, config: Config | None) -> Tensor:
        """A layer's output, with its bias."""
        if config is None:
            return layer.product(x)
        bias = None if layer.bias is None else layer.bias.expand(len(x), -1)
        return linear(x, layer.weight, config, self._workspace, residual=bias)


def _normed_rows(
    stream: Stream, norm: RMSNorm, config: Config | None
) -> tuple[Tensor, Norm | ScaledRows | None]:
    """What a product multiplies, and the norm if it is left to the product."""
    residual, pending, ranks, squares = stream
    if pending is None:
        if isinstance(config, Gemv) and residual.shape[1] <= config.block_k:
            return residual, Norm(weight=norm.weight, eps=norm.eps)
        if isinstance(config, Tile) and norm.folded and squares is not None:
            return residual, ScaledRows(squares=squares, eps=norm.eps)
        return rms_norm(residual, norm.weight, norm.eps), None
    if ranks is None:
        return add_rms_norm(pending, residual, norm.weight, norm.eps), None
    return _summed_norm(pending, residual, norm, ranks), None


def _summed_norm(part: Tensor, residual: Tensor, norm: RMSNorm, ranks: Group) -> Tensor:
    """add_rms_norm of the sum of the ranks' parts."""
    mailboxes = ranks.mailboxes(part)
    if mailboxes is None:
        return add_rms_norm(ranks.all_reduce(part), residual, norm.weight, norm.eps)
    return sum_add_rms_norm(part, residual, norm.weight, norm.eps, mailboxes)
