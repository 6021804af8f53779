"""Decode attention over the paged KV cache: one query token for each sequence, grouped heads.

    begin_step, once a step:  context_lens -> work list (work_list.py)
    each layer:               one program for each item of the list and KV head

Items of one sequence leave partial results, and the last of them to finish combines these. Oracle:
reference_attention.paged_attention.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.kernels import boxes, pdl
from millstream.kernels.decode_configs import (
    DecodeConfig,
    choose_config,
    invariant_config,
    supports,
)
from millstream.kernels.paged_decode_kernel import paged_decode_kernel
from millstream.kernels.work_list import FixedCut, WorkList

__all__ = ["DecodeConfig", "FixedCut", "PagedDecode", "choose_config", "combine_parts", "supports"]


class PagedDecode:
    """Decode attention of up to max_batch sequences: workspaces, grid and configuration.

    Made once for each batch size that a CUDA graph is captured for; one stream at a time uses it.
    With a FixedCut one of the largest size serves all: a sequence's result is then the same bits
    whatever the batch is.
    """

    def __init__(
        self,
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_context: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        config: DecodeConfig | None = None,
        fixed: FixedCut | None = None,
    ) -> None:
        """Raises ValueError for shapes that the kernel does not have (see `supports`)."""
        if not supports(num_heads, num_kv_heads, head_dim, block_size):
            raise ValueError(
                f"no decode kernel for {num_heads} heads on {num_kv_heads}, head_dim {head_dim}, "
                f"blocks of {block_size}"
            )
        shape = num_heads, num_kv_heads, head_dim, dtype
        if config is None:
            config = choose_config(max_batch, *shape) if fixed is None else invariant_config(*shape)
        self.config = config
        self.work = WorkList(
            max_batch=max_batch,
            num_kv_heads=num_kv_heads,
            num_programs=_multiprocessors(device) * self.config.items_per_multiprocessor,
            tile=self.config.tile,
            least=self.config.least_share,
            max_context=max_context,
            device=device,
            fixed=fixed,
        )
        self._repeat = fixed is not None
        # Of a loop without masks: a box has all tokens of its tile, and those lie in one block.
        whole = self.config.tail_apart and self.config.tile <= block_size
        self._boxes = whole and boxes.are_copied(device)
        self._query_shape = (num_heads, head_dim)
        self._cache_shape = (block_size, num_kv_heads, head_dim)
        self._dtype = dtype
        parts = (self.work.capacity, num_heads)
        self._partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=device)
        self._maximum = torch.empty(parts, dtype=torch.float32, device=device)
        self._total = torch.empty(parts, dtype=torch.float32, device=device)
        # All zero between layers: the program that combines resets its counter.
        self._arrivals = torch.zeros(max_batch, num_kv_heads, dtype=torch.int32, device=device)
        self._block_tables: torch.Tensor | None = None
        self._batch = 0

    def begin_step(
        self, block_tables: torch.Tensor, slots: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        """Builds the work list that all layers of a step share.

        Args:
            block_tables: [num_slots, width] int32, a slot's block ids in order; rows of unit
                stride. Each layer reads it; entries past a context are not read.
            slots: [B] int32 or int64, the row of block_tables of each sequence.
            context_lens: [B] int32, tokens of each sequence with the new one; 0: a padding row,
                whose output is zeros and whose slot must be valid all the same.
        """
        if block_tables.dtype != torch.int32 or block_tables.dim() != 2:
            raise ValueError(f"block_tables must be [num_slots, width] int32, {block_tables.dtype}")
        if block_tables.stride(1) != 1:
            raise ValueError("block_tables must have rows of unit stride")
        self.work.build(slots, context_lens)
        self._block_tables, self._batch = block_tables, context_lens.shape[0]

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [B, Hq, D] of query [B, Hq, D] over one layer's caches.

        key_cache, value_cache: [blocks, block_size, Hkv, D]. All contiguous, of one dtype.
        """
        out = boxes.padded(*query.shape, like=query) if out is None else out
        tables = self._check(query, key_cache, value_cache, out)
        (num_heads, head_dim), num_kv_heads = self._query_shape, self._cache_shape[1]
        config = self.config
        group = num_heads // num_kv_heads
        combine_heads = triton.next_power_of_2(group)
        options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        paged_decode_kernel[(self.work.programs_for(self._batch) * num_kv_heads,)](
            query,
            self._boxes_of(key_cache),
            self._boxes_of(value_cache),
            key_cache,
            value_cache,
            out,
            tables,
            self.work.items,
            self._arrivals,
            self._partial,
            self._maximum,
            self._total,
            tables.stride(0),
            head_dim**-0.5 * math.log2(math.e),
            self.work.capacity,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK=self._cache_shape[0],
            TILE=config.tile,
            NUM_STAGES=config.num_stages,
            TOKENS_ARE_ROWS=config.tokens_are_rows,
            TAIL_APART=config.tail_apart,
            COMBINE_HEADS=combine_heads,
            COMBINE_PARTS=combine_parts(config.num_warps, combine_heads),
            REPEAT=self._repeat,
            BOXES=self._boxes,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **options,
            **pdl.options(query.device),
        )
        return out

    def _boxes_of(self, cache: torch.Tensor) -> TensorDescriptor | None:
        """A head's tiles in a cache, taken as tokens [blocks * block_size, Hkv, D]."""
        if not self._boxes:
            return None
        num_kv_heads, head_dim = self._cache_shape[1:]
        tokens = cache.view(-1, num_kv_heads, head_dim)
        return TensorDescriptor.from_tensor(tokens, [self.config.tile, 1, head_dim])

    def _check(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Raises ValueError unless the kernel may run on these; returns the step's block tables."""
        if self._block_tables is None or query.shape != (self._batch, *self._query_shape):
            raise ValueError(f"query has shape {tuple(query.shape)}, the step {self._batch} rows")
        if key_cache.shape[1:] != self._cache_shape or key_cache.shape != value_cache.shape:
            shapes = tuple(key_cache.shape), tuple(value_cache.shape)
            raise ValueError(f"caches have shapes {shapes}, not [blocks, *{self._cache_shape}]")
        tensors = (query, key_cache, value_cache, out)
        if out.shape != query.shape or any(tensor.dtype != self._dtype for tensor in tensors):
            raise ValueError(f"query, caches and out must be {self._dtype}, out shaped like query")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("query, caches and out must be contiguous")
        return self._block_tables


def combine_parts(num_warps: int, heads: int) -> int:
    """Partial results combined at once: 32 registers a thread of head_dim 128."""
    return max(1, 8 * num_warps // heads)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few, so that some sequences are cut and some are not
    return torch.cuda.get_device_properties(device).multi_processor_count
