"""The paged KV cache, the seam for attention backends, and the one in plain torch.

TorchAttention is what the engine runs on CPUs and the oracle that later kernels are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.engine.batch import ForwardBatch
from millstream.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of every layer, in blocks. Block 0 is scratch: written, never attended to."""

    data: Tensor  # [num_layers, 2 (key, value), num_blocks + 1, block_size, num_kv_heads, head_dim]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def num_blocks(self) -> int:
        """Usable blocks; their ids are 1..num_blocks."""
        return self.data.shape[2] - 1


def allocate_kv_cache(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """An uninitialised cache of num_blocks usable blocks and the scratch block."""
    shape = (config.num_layers, 2, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
    return KVCache(data=torch.empty(shape, dtype=dtype, device=device))


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    values = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return values * dtype.itemsize


class StepAttention(Protocol):
    """Attention of one step: called once by each layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores key and value [T, Hkv, D] of the step's tokens in the cache, then attends.

        Args:
            layer: index of the layer.
            query: [T, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        Returns:
            [T, Hq, D].
        """


class AttentionBackend(Protocol):
    """Computes attention over the paged cache."""

    def begin_step(self, batch: ForwardBatch, kv_cache: KVCache) -> StepAttention:
        """Prepares once what all layers of a step share."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence of which this step computes rows [start, end)."""

    start: int
    end: int
    slots: Tensor | None  # [2 * context]: cache rows of its keys, then values; None: no prefix
    mask: Tensor | None  # [end - start, context] bool: which keys a query sees


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of one token each, of similar context lengths, attended to together."""

    rows: Tensor | None  # [n] rows of the step's tokens; None: all of its decodes, in order
    slots: Tensor  # [2 * n * longest]: cache rows of their keys, then values
    mask: Tensor | None  # [n, 1, 1, longest] bool; None: equal lengths
    size: int


class TorchAttention:
    """Gathers each sequence's keys and values out of its blocks, then attends with torch's SDPA."""

    def begin_step(self, batch: ForwardBatch, kv_cache: KVCache) -> StepAttention:
        return _TorchStep(batch, kv_cache)


class _TorchStep:
    """The index tensors of one step. A cache *row* is a token's place: block * block_size + offset;
    a layer's cache is seen as one matrix, the rows of its keys above those of its values."""

    def __init__(self, batch: ForwardBatch, kv_cache: KVCache) -> None:
        data = kv_cache.data
        self._num_rows = data.shape[2] * data.shape[3]
        self._layers = data.view(data.shape[0], 2 * self._num_rows, *data.shape[4:])
        self._block_size = kv_cache.block_size
        self._kv_indices = batch.kv_indices
        num_chunks = len(batch.query_lens) - batch.num_decodes
        self._chunks = []
        start = 0
        for index in range(num_chunks):
            end = start + batch.query_lens[index]
            self._chunks.append(self._chunk(batch, index, start, end))
            start = end
        self._first_decode = start
        self._groups = self._decode_groups(batch, num_chunks) if batch.num_decodes else []

    def _chunk(self, batch: ForwardBatch, index: int, start: int, end: int) -> _Chunk:
        queries, context = end - start, batch.contexts[index]
        if queries == context:  # its keys and values are this step's
            return _Chunk(start, end, None, None)
        positions = torch.arange(context, device=batch.positions.device)
        slots = self._slots(batch.block_tables[index], positions)
        mask = positions <= positions[context - queries :, None]
        return _Chunk(start, end, slots, mask)

    def _decode_groups(self, batch: ForwardBatch, first: int) -> list[_DecodeGroup]:
        longest = max(batch.contexts[first:])
        device = batch.positions.device
        lengths = batch.context_lens[first:, None]
        positions = torch.arange(longest, device=device)[None, :]
        mask = positions < lengths
        # Padding reads the sequence's first token: a zero weight does not silence a NaN, and an
        # unused row may hold one.
        slots = self._slots(batch.block_tables[first:], torch.where(mask, positions, 0))
        equal = min(batch.contexts[first:]) == longest
        return [
            _DecodeGroup(None, slots, None if equal else mask[:, None, None, :], batch.num_decodes)
        ]

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Cache rows of positions [.., n] given tables [.., width]: of keys, then of values."""
        blocks = block_tables.gather(-1, positions // self._block_size)
        keys = (blocks * self._block_size + positions % self._block_size).flatten()
        return torch.cat((keys, keys + self._num_rows))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self._layers[layer]
        cache[: self._num_rows].index_copy_(0, self._kv_indices, key)
        cache[self._num_rows :].index_copy_(0, self._kv_indices, value)
        output = torch.empty_like(query)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            output[rows] = self._attend_chunk(chunk, cache, query[rows], key[rows], value[rows])
        for group in self._groups:
            output[self._first_decode :] = self._attend_decodes(
                group, cache, query[self._first_decode :]
            )
        return output

    def _attend_chunk(
        self, chunk: _Chunk, cache: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        if chunk.slots is not None:
            key, value = cache.index_select(0, chunk.slots).chunk(2)
        return F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)

    def _attend_decodes(self, group: _DecodeGroup, cache: Tensor, query: Tensor) -> Tensor:
        num_kv_heads, head_dim = cache.shape[-2:]
        gathered = cache.index_select(0, group.slots)
        key, value = gathered.view(2, group.size, -1, num_kv_heads, head_dim).transpose(2, 3)
        # The query heads of a KV head stand where queries of one head would: nothing is expanded.
        query = query.view(group.size, num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        return attended.reshape(group.size, -1, head_dim)
