"""What a layer does with the heads of its QKV projection, and with which tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """RMSNorm over each head of q and k, rotary embedding, k and v into the paged cache.

    All floating-point tensors have one dtype and device.
    """

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    q_weight: torch.Tensor | None  # [D], RMSNorm's; None: no norm
    k_weight: torch.Tensor | None
    eps: float
    # [max_len, D / 2], the table that `positions` indexes, or [T, D / 2], a row for each token,
    # with positions None. Rows of unit stride and one distance, such as halves of one table.
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None  # [T] int64 or int32, inside the table
    # [T] int64 or int32, block * block_size + offset; negative: nothing is stored.
    kv_indices: torch.Tensor
    key_cache: torch.Tensor  # [blocks, block_size, Hkv, D] of one layer, contiguous
    value_cache: torch.Tensor

    @property
    def head_dim(self) -> int:
        return self.key_cache.shape[-1]

    def pointers(self, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the kernels take of it, from q_weight_ptr to value_cache_ptr. What is not there is
        not read: some other tensor stands for it."""
        return (
            query if self.q_weight is None else self.q_weight,
            query if self.k_weight is None else self.k_weight,
            self.cos,
            self.sin,
            self.kv_indices if self.positions is None else self.positions,
            self.kv_indices,
            query,
            self.key_cache,
            self.value_cache,
        )

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernels' constexprs that follow from it."""
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "NORM": self.q_weight is not None,
            "TABLE": self.positions is not None,
        }

    def new_query(self, x: torch.Tensor) -> torch.Tensor:
        """[T, Hq, D] of x's type and device, uninitialized, for its T rows."""
        return x.new_empty(len(x), self.num_heads, self.head_dim)

    def check(self, x: torch.Tensor, width: int) -> None:
        """Raises ValueError unless this can be done with the heads of a projection [T, width], for
        which x [T, ..] stands."""
        num_tokens, head_dim = x.shape[0], self.head_dim
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        key_cache, value_cache, cos, sin = self.key_cache, self.value_cache, self.cos, self.sin
        positions, kv_indices = self.positions, self.kv_indices
        if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or head_dim % 2:
            shapes = tuple(key_cache.shape), tuple(value_cache.shape)
            raise ValueError(
                f"caches have shapes {shapes}, not [blocks, block_size, Hkv, D], D even"
            )
        if key_cache.shape[2] != num_kv_heads or not 0 < num_kv_heads <= num_heads:
            raise ValueError(
                f"{num_heads} heads, {num_kv_heads} KV heads, {key_cache.shape[2]} cached"
            )
        if x.dim() != 2 or width != (num_heads + 2 * num_kv_heads) * head_dim:
            raise ValueError(f"qkv is {width} wide, not {num_heads} + 2 * {num_kv_heads} heads")
        if kv_indices.shape != (num_tokens,) or (
            positions is not None and positions.shape != (num_tokens,)
        ):
            raise ValueError("positions and kv_indices must have one entry for each token")
        rows = cos.shape[0] if positions is not None else num_tokens
        if cos.shape != (rows, head_dim // 2) or cos.shape != sin.shape:
            raise ValueError(f"cos, sin have shapes {tuple(cos.shape)}, {tuple(sin.shape)}")
        if (self.q_weight is None) != (self.k_weight is None):
            raise ValueError("q_weight and k_weight must both be given or both be None")
        weights = [w for w in (self.q_weight, self.k_weight) if w is not None]
        if any(weight.shape != (head_dim,) for weight in weights):
            raise ValueError(f"q_weight and k_weight must have shape [{head_dim}]")
        floats = [x, *weights, cos, sin, key_cache, value_cache]
        if len({tensor.dtype for tensor in floats}) != 1 or not x.is_floating_point():
            raise ValueError(f"dtypes differ: {[tensor.dtype for tensor in floats]}")
        indices = [kv_indices] if positions is None else [kv_indices, positions]
        if any(index.dtype not in (torch.int32, torch.int64) for index in indices):
            raise ValueError("positions and kv_indices must be int32 or int64")
        if len({tensor.device for tensor in (*floats, *indices)}) != 1:
            raise ValueError("the tensors are on different devices")
        if cos.stride(0) != sin.stride(0) or any(t.stride(-1) != 1 for t in (*floats, *indices)):
            raise ValueError(
                "rows must have unit stride, and cos and sin the same distance of rows"
            )
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            raise ValueError("key_cache and value_cache must be contiguous")
