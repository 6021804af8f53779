"""The paged KV cache, and attention over it in plain torch: what the engine runs on CPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.engine.batch import ForwardBatch
from millstream.engine.model_files.model_config import ModelConfig

# Padding contexts up to so many tokens costs less than another group of them.
_SHORT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of every layer, in blocks. Block 0 is scratch: written, never attended to."""

    data: Tensor  # [num_layers, 2 (key, value), num_blocks + 1, block_size, num_kv_heads, head_dim]
    layers: tuple[tuple[Tensor, Tensor], ...]  # views of keys and values, a pair a layer

    @classmethod
    def of(cls, data: Tensor) -> KVCache:
        return cls(data=data, layers=tuple((keys, values) for keys, values in data))

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
    return KVCache.of(torch.empty(shape, dtype=dtype, device=device))


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    values = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return values * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence of which this step computes the tokens in `tokens`."""

    tokens: slice
    rows: Tensor | None  # [2 * Hkv * context] cache rows to gather; None: it has no prefix
    mask: Tensor | None  # [tokens, context] added to scores; None: causal


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences of one token each that are attended to together."""

    tokens: slice | Tensor  # n tokens
    rows: Tensor  # [2 * n * Hkv * longest] cache rows to gather
    mask: Tensor | None  # [n, 1, 1, longest] added to scores; None: equal lengths
    gathered: Tensor  # [rows, head_dim] to gather into


class TorchAttention:
    """Attention of one step over the paged cache: gathers each sequence's keys and values out of
    its blocks, then attends with torch's SDPA. Holds the index tensors that the layers share.

    A layer's cache is seen as one matrix with a row for each head of each token:
        key rows   (block * block_size + offset) * Hkv + head
        value rows   the same, below all the keys
    """

    def __init__(self, batch: ForwardBatch, kv_cache: KVCache) -> None:
        data = kv_cache.data
        self._batch = batch
        self._data = data
        self._block_size, self._num_kv_heads, self._head_dim = data.shape[3:]
        self._num_tokens = data.shape[2] * self._block_size  # that a layer's cache has room for
        # [S, blocks of the longest context]: entries past a context are never read
        used = -(-max(batch.contexts) // self._block_size)
        self._block_tables = batch.block_tables[:, :used].index_select(0, batch.slots)
        self._kv_heads = torch.arange(self._num_kv_heads, device=data.device)[:, None]
        first_decode = len(batch.query_lens) - batch.num_decodes
        ends = list(itertools.accumulate(batch.query_lens[:first_decode], initial=0))
        self._chunks = [
            self._chunk(index, slice(*bounds))
            for index, bounds in enumerate(itertools.pairwise(ends))
        ]
        groups = _similar_lengths(batch.contexts[first_decode:])
        self._decodes = [
            self._decode_group(group, first_decode, ends[-1], len(groups)) for group in groups
        ]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores key and value [T, Hkv, D] of the step's tokens in a layer's cache, then attends
        with query [T, Hq, D], whose head h reads KV head h // (Hq / Hkv). Returns [T, Hq, D]."""
        cache = self._data[layer].view(2, self._num_tokens, self._num_kv_heads, self._head_dim)
        cache[0].index_copy_(0, self._batch.kv_indices, key)
        cache[1].index_copy_(0, self._batch.kv_indices, value)
        rows = cache.view(-1, self._head_dim)
        output = torch.empty_like(query)
        for chunk in self._chunks:
            output[chunk.tokens] = self._attend_chunk(chunk, rows, query, key, value)
        for decodes in self._decodes:
            output[decodes.tokens] = self._attend_decodes(decodes, rows, query[decodes.tokens])
        return output

    def _chunk(self, index: int, tokens: slice) -> _Chunk:
        queries, context = tokens.stop - tokens.start, self._batch.contexts[index]
        if queries == context:  # its keys and values are this step's
            return _Chunk(tokens, None, None)
        positions = torch.arange(context, device=self._data.device)
        rows = self._rows(self._block_tables[index], positions)
        return _Chunk(tokens, rows, self._mask(positions <= positions[-queries:, None]))

    def _decode_group(
        self, group: list[int], first_sequence: int, first_token: int, num_groups: int
    ) -> _Decodes:
        """`group` counts from the first decode, which is that sequence and that token."""
        sequences: slice | Tensor = slice(first_sequence, None)
        tokens: slice | Tensor = slice(first_token, None)
        if num_groups > 1:
            members = torch.tensor(group, device=self._data.device)
            sequences, tokens = members + first_sequence, members + first_token
        contexts = [self._batch.contexts[first_sequence + member] for member in group]
        longest = max(contexts)
        positions = torch.arange(longest, device=self._data.device)
        seen = positions < self._batch.context_lens[sequences, None]
        # Padding reads the first token of its sequence: a weight of zero does not silence a NaN,
        # and an unused row may hold one.
        rows = self._rows(self._block_tables[sequences], torch.where(seen, positions, 0))
        mask = None if min(contexts) == longest else self._mask(seen[:, None, None, :])
        return _Decodes(tokens, rows, mask, self._data.new_empty(len(rows), self._head_dim))

    def _rows(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Cache rows [2, .., Hkv, n], flattened, of positions [.., n] given tables [.., width]."""
        blocks = block_tables.gather(-1, positions // self._block_size)
        tokens = blocks * self._block_size + positions % self._block_size
        keys = (tokens.unsqueeze(-2) * self._num_kv_heads + self._kv_heads).flatten()
        return torch.cat((keys, keys + self._num_tokens * self._num_kv_heads))

    def _mask(self, seen: Tensor) -> Tensor:
        """What is added to scores: 0 where `seen`, -inf elsewhere."""
        return torch.zeros_like(seen, dtype=self._data.dtype).masked_fill_(~seen, -math.inf)

    def _attend_chunk(
        self, chunk: _Chunk, cache: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        query = query[chunk.tokens].transpose(0, 1)
        if chunk.rows is None:
            key, value = key[chunk.tokens].transpose(0, 1), value[chunk.tokens].transpose(0, 1)
        else:
            gathered = cache.index_select(0, chunk.rows)
            key, value = gathered.view(2, self._num_kv_heads, -1, self._head_dim)
        return F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)

    def _attend_decodes(self, decodes: _Decodes, cache: Tensor, query: Tensor) -> Tensor:
        torch.index_select(cache, 0, decodes.rows, out=decodes.gathered)
        shape = (len(query), self._num_kv_heads, -1, self._head_dim)
        key, value = decodes.gathered.view(2, *shape)
        # The query heads of a KV head stand where one head's queries would: nothing is expanded.
        attended = F.scaled_dot_product_attention(
            query.view(shape), key, value, attn_mask=decodes.mask
        )
        return attended.reshape(query.shape)  # not contiguous on every device


def _similar_lengths(contexts: Sequence[int]) -> list[list[int]]:
    """Indices of contexts, in groups whose work padding to the longest at most doubles."""
    groups: list[list[int]] = []
    for index in sorted(range(len(contexts)), key=lambda index: -contexts[index]):
        longest = contexts[groups[-1][0]] if groups else math.inf
        if longest <= max(2 * contexts[index], _SHORT_TOKENS):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]
