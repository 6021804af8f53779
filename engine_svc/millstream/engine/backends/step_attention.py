"""Attention of one step for its chunks and for its decodes: millstream.kernels' and flash-attn's.

Both read the paged cache, in which the step's own keys and values are already, and nothing of the
host that depends on lengths: a CUDA graph may record them. Which one a runner uses is settled by
hardware.resolve.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream.engine.batch import ForwardBatch
from millstream.kernels.paged_decode import PagedDecode
from millstream.kernels.paged_prefill import paged_prefill


class StepAttention(Protocol):
    """query [T, Hq, D] of the step's chunks or of its decodes, and a layer's keys and values
    [blocks, block_size, Hkv, D]; returns what is attended, in `out` if that is given."""

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor: ...

    def decode(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor: ...


class TritonAttention:
    """A StepAttention."""

    def __init__(
        self,
        batch: ForwardBatch,
        decode_for: Callable[[int], PagedDecode],
        *,
        invariant: bool = False,
    ) -> None:
        """decode_for: the decode kernel of so many sequences. invariant: chunks are attended to in
        the same tiles whatever the others' lengths are."""
        self._batch = batch
        self._num_chunks = num_chunks = len(batch.slots) - batch.num_decodes
        self._longest = None if invariant else max(batch.contexts[:num_chunks], default=None)
        if batch.num_decodes:
            self._decode = decode_for(batch.num_decodes)
            self._decode.begin_step(
                batch.block_tables, batch.slots[num_chunks:], batch.context_lens[num_chunks:]
            )

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor:
        batch, num_chunks = self._batch, self._num_chunks
        return paged_prefill(
            query,
            keys,
            values,
            batch.block_tables,
            batch.slots[:num_chunks],
            batch.query_starts[: num_chunks + 1],
            batch.context_lens[:num_chunks],
            out=out,
            longest=self._longest,
        )

    def decode(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return self._decode(query, keys, values, out)


class FlashModule(Protocol):
    """What is used of the package flash_attn, version 2."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        block_table: Tensor,
    ) -> Tensor: ...

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        causal: bool,
    ) -> Tensor: ...


def load_flash() -> FlashModule:
    """The package flash_attn. Raises ImportError with a clear line if there is none that fits."""
    try:
        module: Any = importlib.import_module("flash_attn")
    except OSError as error:  # a library that it needs does not load
        raise ImportError(f"flash_attn: {error}") from error
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        if not hasattr(module, name):
            version = getattr(module, "__version__", "unknown")
            raise ImportError(f"flash_attn {version} has no {name}; version 2 is needed")
    flash: FlashModule = module
    return flash


class FlashAttention:
    """A StepAttention.

    The lengths that flash-attn takes as ints are upper bounds, from which it lays out its grid:
    exact ones where the host knows them, else what the batch's shape and the model allow. Those of
    decoding come from the width of the block tables.
    """

    def __init__(self, flash: FlashModule, batch: ForwardBatch, max_model_len: int) -> None:
        self._flash = flash
        self._max_model_len = max_model_len
        num_chunks = len(batch.slots) - batch.num_decodes
        tables = batch.block_tables.index_select(0, batch.slots)  # it wants a row for each sequence
        self._chunk_tables, self._decode_tables = tables[:num_chunks], tables[num_chunks:]
        self._decode_lens = batch.context_lens[num_chunks:]
        self._query_starts = batch.query_starts[: num_chunks + 1]
        self._longest_chunk = max(batch.query_lens[:num_chunks], default=None)
        if num_chunks:
            ends = batch.context_lens[:num_chunks].cumsum(0, dtype=torch.int32)
            self._key_starts = torch.cat((ends.new_zeros(1), ends))

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor:
        attended = self._flash.flash_attn_varlen_func(
            query,
            keys,
            values,
            self._query_starts,
            self._key_starts,
            self._longest_chunk or len(query),
            self._max_model_len,
            causal=True,
            block_table=self._chunk_tables,
        )
        return attended if out is None else out.copy_(attended)

    def decode(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None
    ) -> Tensor:
        attended = self._flash.flash_attn_with_kvcache(
            query[:, None],
            keys,
            values,
            cache_seqlens=self._decode_lens,
            block_table=self._decode_tables,
            causal=True,
        )[:, 0]
        return attended if out is None else out.copy_(attended)
