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
from millstream.engine.backends.products import Products
from millstream.engine.backends.step_attention import (
    FlashAttention,
    FlashModule,
    StepAttention,
    TritonAttention,
)
from millstream.engine.backends.triton_step_ops import TritonStepOps
from millstream.engine.batch import ForwardBatch
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.ops import SlotSampling, SlotState
from millstream.engine.rope import RotaryEmbedding
from millstream.engine.sampling import vocab_block
from millstream.kernels.copy_out import copy_out
from millstream.kernels.decode_state import DecodeInputs, SlotTables, advance_slots, read_slots
from millstream.kernels.paged_decode import (
    DecodeConfig,
    FixedCut,
    PagedDecode,
    choose_config,
    supports,
)
from millstream.kernels.sample import Rows
from millstream.kernels.sample import sample as gumbel_max
from millstream.kernels.sample_filters import thresholds
from millstream.kernels.sample_shards import best_of_shard, best_of_shards


def unsupported(config: ModelConfig, block_size: int) -> str:
    """Why there are no kernels for a model; "" if there are."""
    if supports(config.num_heads, config.num_kv_heads, config.head_dim, block_size):
        return ""
    return (
        f"no kernels for {config.num_heads} heads on {config.num_kv_heads} of {config.head_dim} "
        f"and blocks of {block_size}"
    )


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
        values are the same bits in every batch (16-bit types; see products.py). flash: the module
        that attends in place of Triton's kernels."""
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._vocab_size = config.vocab_size
        self._batch_sizes = batch_sizes
        self._block_size, self._max_model_len = block_size, max_model_len
        self._dtype, self._device = dtype, device
        self._invariant = invariant
        self._flash = flash
        self.products = Products(config, dtype=dtype, device=device, invariant=invariant)
        self._decodes: dict[int, PagedDecode] = {}

    def begin_step(
        self, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding
    ) -> TritonStepOps:
        if self._flash is None:
            attention: StepAttention = TritonAttention(
                batch, self.decode_for, invariant=self._invariant
            )
        else:
            attention = FlashAttention(self._flash, batch, self._max_model_len)
        return TritonStepOps(
            self.products, attention, batch, kv_cache, rope, num_heads=self._num_heads
        )

    @property
    def folds_norms(self) -> bool:
        return self.products.folds_norms

    @property
    def on_slots(self) -> TritonOps:
        return self

    def kernels_of(self, num_sequences: int) -> DecodeConfig:
        """Attention's: products change theirs only between numbers of tiles."""
        size = self._decode_size(num_sequences)
        return choose_config(size, self._num_heads, self._num_kv_heads, self._head_dim, self._dtype)

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

    def copy_out(self, token_ids: Tensor, out: Tensor) -> None:
        copy_out(token_ids, out)

    def decode_for(self, num_sequences: int) -> PagedDecode:
        size = self._decode_size(num_sequences)
        decode = self._decodes.get(size)
        if decode is None:
            decode = self._decodes[size] = PagedDecode(
                size,
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                self._block_size,
                self._max_model_len,
                self._device,
                dtype=self._dtype,
                fixed=FixedCut() if self._invariant else None,
            )
        return decode

    def _decode_size(self, num_sequences: int) -> int:
        """The batch whose decode kernel serves so many."""
        sizes = self._batch_sizes[-1:] if self._invariant else self._batch_sizes
        return next(size for size in sizes if size >= num_sequences)


def _tables(state: SlotState) -> SlotTables:
    return SlotTables(computed=state.computed, last_tokens=state.last_tokens)
