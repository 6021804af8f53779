"""TritonOps: what layers compute, in millstream.kernels and cuBLAS, on NVIDIA GPUs; attention in
flash-attn if that was asked for.

Nothing here waits for the device, and a step of decodes alone reads no length on the host: a CUDA
graph of one batch size serves any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millstream.engine.attention import KVCache
from millstream.engine.backends.step_attention import (
    FlashAttention,
    FlashModule,
    StepAttention,
    TritonAttention,
)
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import Linear, RMSNorm, RowParallelLinear
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.ops import SlotSampling, SlotState, Stream
from millstream.engine.parallel import Group
from millstream.engine.rope import RotaryEmbedding
from millstream.engine.sampling import vocab_block
from millstream.kernels import boxes
from millstream.kernels.add_rms_norm import add_rms_norm, rms_norm
from millstream.kernels.decode_state import DecodeInputs, SlotTables, advance_slots, read_slots
from millstream.kernels.gemv import Norm
from millstream.kernels.heads import Heads
from millstream.kernels.invariant_tiles import invariant_tile
from millstream.kernels.linear import ScaledRows, Workspace, linear, num_pieces
from millstream.kernels.linear_configs import Config, Gemv, Tile, choose, choose_heads
from millstream.kernels.paged_decode import (
    DecodeConfig,
    FixedCut,
    PagedDecode,
    choose_config,
    supports,
)
from millstream.kernels.qk_norm_rope_store import qk_norm_rope_store
from millstream.kernels.qkv_heads import qkv_heads
from millstream.kernels.sample import Rows
from millstream.kernels.sample import sample as gumbel_max
from millstream.kernels.sample_filters import thresholds
from millstream.kernels.sample_shards import best_of_shard, best_of_shards
from millstream.kernels.silu_mul import silu_mul
from millstream.kernels.sum_add_rms_norm import sum_add_rms_norm

_MANY_ROWS = 64  # of a decode step


def unsupported(config: ModelConfig, block_size: int) -> str:
    """Why there are no kernels for a model; "" if there are."""
    if supports(config.num_heads, config.num_kv_heads, config.head_dim, block_size):
        return ""
    return (
        f"no kernels for {config.num_heads} heads on {config.num_kv_heads} of {config.head_dim} "
        f"and blocks of {block_size}"
    )


def not_invariant(config: ModelConfig, max_tokens: int) -> str:
    """Why a model's products of up to so many tokens have no tiles for any batch; "" if they do."""
    weights = {**config.layer_products, "lm_head": (config.vocab_size, config.hidden_size)}
    for name, shape in weights.items():
        if invariant_tile(1, *shape) is None:
            return f"{name} is {shape[0]} x {shape[1]}: both must be multiples of 16"
        if name != "lm_head" and invariant_tile(max_tokens, *shape) is None:
            return f"{max_tokens} tokens are too many for {name}, which is {shape[0]} x {shape[1]}"
    return ""


class TritonOps:
    """An ops.Ops and its SlotOps; a decode kernel, with workspaces, for each of some batches."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_sizes: Sequence[int],
        block_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool = False,
        flash: FlashModule | None = None,
    ) -> None:
        """batch_sizes: ascending; a batch is served by the next larger one. invariant: a token's
        values are the same bits in every batch (16-bit types; see not_invariant). flash: the module
        that attends in place of Triton's kernels."""
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._vocab_size = config.vocab_size
        self._batch_sizes = batch_sizes
        self._block_size, self._max_model_len = block_size, max_model_len
        self._dtype, self._device = dtype, device
        self.invariant = invariant
        self._flash = flash
        # Where products have tiles: they scale rows, of which the product before left the squares.
        gate_up = choose(_MANY_ROWS, *config.layer_products["gate_up"])
        has_tiles = dtype.itemsize == 2 and isinstance(gate_up, Tile)
        self._has_boxes = boxes.are_copied(device)
        self.folds_norms = has_tiles and self._has_boxes and not invariant
        self._decodes: dict[int, PagedDecode] = {}
        self.workspace = Workspace.create(device)

    def begin_step(
        self, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding
    ) -> TritonStepOps:
        if self._flash is None:
            attention: StepAttention = TritonAttention(
                batch, self.decode_for, invariant=self.invariant
            )
        else:
            attention = FlashAttention(self._flash, batch, self._max_model_len)
        return TritonStepOps(self, attention, batch, kv_cache, rope)

    @property
    def on_slots(self) -> TritonOps:
        return self

    def kernels_of(self, num_sequences: int) -> DecodeConfig:
        """Attention's: products change theirs only between numbers of tiles."""
        shape = self.num_heads, self.num_kv_heads, self._head_dim, self._dtype
        return choose_config(num_sequences, *shape)

    def read(self, slots: Tensor, state: SlotState, embedding: Tensor | None) -> DecodeInputs:
        return read_slots(slots, _tables(state), state.block_tables, self._block_size, embedding)

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: SlotSampling,
        *,
        filtered: bool,
        advanced: SlotState | None = None,
    ) -> Tensor:
        least = None
        if filtered:
            least = thresholds(
                logits, slots, table.temperatures, table.top_k, table.top_p, table.min_p
            )
        return gumbel_max(
            self._rows(logits, positions, slots, table, least),
            advanced=None if advanced is None else _tables(advanced),
        )

    def best_of_shard(
        self, logits: Tensor, positions: Tensor, slots: Tensor, table: SlotSampling, first_id: int
    ) -> Tensor:
        return best_of_shard(self._rows(logits, positions, slots, table), first_id=first_id)

    def _rows(
        self,
        logits: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: SlotSampling,
        least: Tensor | None = None,
    ) -> Rows:
        return Rows(
            logits=logits,
            slots=slots,
            positions=positions,
            temperatures=table.temperatures,
            seeds=table.seeds,
            thresholds=least,
            block_size=vocab_block(self._vocab_size),
        )

    def best_of_shards(self, shards: Tensor, slots: Tensor, table: SlotSampling) -> Tensor:
        return best_of_shards(shards, slots, table.temperatures, vocab_size=self._vocab_size)

    def advance(self, slots: Tensor, token_ids: Tensor, state: SlotState) -> None:
        advance_slots(slots, token_ids, _tables(state))

    def decode_for(self, num_sequences: int) -> PagedDecode:
        sizes = self._batch_sizes[-1:] if self.invariant else self._batch_sizes
        size = next(size for size in sizes if size >= num_sequences)
        decode = self._decodes.get(size)
        if decode is None:
            decode = self._decodes[size] = PagedDecode(
                size,
                self.num_heads,
                self.num_kv_heads,
                self._head_dim,
                self._block_size,
                self._max_model_len,
                self._device,
                dtype=self._dtype,
                fixed=FixedCut() if self.invariant else None,
            )
        return decode

    def config_for(self, x: Tensor, layer: Linear) -> Config | None:
        """The configuration of a kernel for x; None: cuBLAS."""
        if x.dtype is torch.float32 or not len(x):
            return None
        if self.invariant:
            tile = invariant_tile(len(x), *layer.weight.shape)
            assert tile is not None, "resolve refused what has none"
            return tile
        config = choose(len(x), *layer.weight.shape) if layer.bias is None else None
        slow = isinstance(config, Tile) and config.stages and not self._has_boxes
        return None if slow else config

    def heads_tile(self, x: Tensor, layer: Linear) -> Tile | None:
        """The tile of QKV's product and what follows in one kernel; None: in two."""
        apart = x.dtype is torch.float32 or self.invariant or layer.bias is not None
        if apart or not self._has_boxes:
            return None
        size, depth = layer.weight.shape
        return choose_heads(len(x), size, depth, self._head_dim)


class TritonStepOps:
    """An ops.StepOps. Chunks and decodes of a step are attended to by a kernel each."""

    def __init__(
        self,
        ops: TritonOps,
        attention: StepAttention,
        batch: ForwardBatch,
        kv_cache: KVCache,
        rope: RotaryEmbedding,
    ) -> None:
        self._ops = ops
        self._attention = attention
        self._caches = kv_cache.layers
        table, self._rows = rope.angles(batch)
        self._cos, self._sin = table.chunk(2, dim=-1)
        self._kv_indices = batch.kv_indices
        self._num_decodes = batch.num_decodes
        self._num_chunk_tokens = len(batch.token_ids) - batch.num_decodes

    def norm_linear(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        return self._normed(stream, norm, layer, swiglu=False)

    def norm_swiglu(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        return self._normed(stream, norm, layer, swiglu=True)

    def add_linear(self, x: Tensor, layer: Linear, residual: Tensor) -> Stream:
        config = self._ops.config_for(x, layer)
        if isinstance(layer, RowParallelLinear):  # the residual is added once, to the sum
            return Stream(residual, self._product(x, layer, config), layer.group)
        if config is None or layer.bias is not None:
            return Stream(residual, self._product(x, layer, config))
        squares = None
        if self._ops.folds_norms and isinstance(config, Tile):
            pieces = num_pieces(len(layer.weight), config)
            squares = torch.empty((len(x), pieces), dtype=torch.float32, device=x.device)
        workspace = self._ops.workspace
        total = linear(x, layer.weight, config, workspace, residual=residual, squares=squares)
        return Stream(total, squares=squares)

    def _normed(self, stream: Stream, norm: RMSNorm, layer: Linear, *, swiglu: bool) -> Tensor:
        config = self._ops.config_for(stream.residual, layer)
        x, within = _rows(stream, norm, config)
        if config is not None and layer.bias is None:
            workspace = self._ops.workspace
            return linear(x, layer.weight, config, workspace, swiglu=swiglu, norm=within)
        product = self._product(x, layer, config)
        return silu_mul(product) if swiglu else product

    def _product(self, x: Tensor, layer: Linear, config: Config | None) -> Tensor:
        """A layer's output, with its bias."""
        if config is None:
            return layer.product(x)
        bias = None if layer.bias is None else layer.bias.expand(len(x), -1)
        return linear(x, layer.weight, config, self._ops.workspace, residual=bias)

    def attend(
        self,
        layer: int,
        stream: Stream,
        norm: RMSNorm,
        projection: Linear,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Tensor:
        keys, values = self._caches[layer]
        query = self._query(keys, values, stream, norm, projection, head_norms)
        attention = self._attention
        if not self._num_decodes:
            attended = attention.prefill(query, keys, values)
        elif not self._num_chunk_tokens:
            attended = attention.decode(query, keys, values)
        else:
            attended = boxes.padded(*query.shape, like=query)
            chunks, decodes = slice(self._num_chunk_tokens), slice(self._num_chunk_tokens, None)
            attention.prefill(query[chunks], keys, values, attended[chunks])
            attention.decode(query[decodes], keys, values, attended[decodes])
        return attended.view(len(query), -1)

    def _query(
        self,
        keys: Tensor,
        values: Tensor,
        stream: Stream,
        norm: RMSNorm,
        projection: Linear,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Tensor:
        """[n, Hq, D]; key and value are in the cache then."""
        ops = self._ops
        q_norm, k_norm = head_norms or (None, None)
        heads = Heads(
            num_heads=ops.num_heads,
            num_kv_heads=ops.num_kv_heads,
            q_weight=q_norm.weight if q_norm else None,
            k_weight=k_norm.weight if k_norm else None,
            eps=q_norm.eps if q_norm else 0.0,
            cos=self._cos,
            sin=self._sin,
            positions=self._rows,
            kv_indices=self._kv_indices,
            key_cache=keys,
            value_cache=values,
        )
        tile = ops.heads_tile(stream.residual, projection)
        if tile is None:
            return qk_norm_rope_store(self.norm_linear(stream, norm, projection), heads)
        x, scale = _rows(stream, norm, tile)
        assert not isinstance(scale, Norm)
        return qkv_heads(x, projection.weight, tile, heads, scale=scale)


def _tables(state: SlotState) -> SlotTables:
    return SlotTables(computed=state.computed, last_tokens=state.last_tokens)


def _rows(
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
