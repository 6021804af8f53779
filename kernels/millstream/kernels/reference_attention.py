"""Torch oracles of the kernels around the paged KV cache, said as plainly as can be."""

from __future__ import annotations

import torch


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    kv_indices: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """The query [T, Hq, D]; key and value go into the caches [blocks, block_size, Hkv, D].

    Rounded where transformers' Qwen3 rounds: the norm is computed in float32 and rounded before
    the weight multiplies it, and every product and sum of the rotation is rounded.
    """
    head_dim = key_cache.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    keys_end = num_heads + num_kv_heads
    query, key, value = heads[:, :num_heads], heads[:, num_heads:keys_end], heads[:, keys_end:]
    if q_weight is not None and k_weight is not None:
        query, key = _norm(query, q_weight, eps), _norm(key, k_weight, eps)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    stored = kv_indices >= 0
    rows = kv_indices[stored]
    key_cache.view(-1, num_kv_heads, head_dim)[rows] = key[stored]
    value_cache.view(-1, num_kv_heads, head_dim)[rows] = value[stored]
    return query


def _norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(heads.dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """Causal attention [T, Hq, D] in float32 of sequences whose last tokens are the queries.

    query [T, Hq, D], caches [blocks, block_size, Hkv, D], block_tables [num_slots, width], slots
    and context_lens [S], query_starts [S + 1]. Rows that belong to no sequence, or to one whose
    context is 0, are zero. Decode is the case of one query for each sequence.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for sequence, (slot, context) in enumerate(zip(slots.tolist(), contexts, strict=True)):
        tokens = slice(starts[sequence], starts[sequence + 1])
        queries = query[tokens].float()
        if not context or not len(queries):
            continue
        at = torch.arange(context, device=query.device)
        rows = block_tables[slot, at // block_size].long() * block_size + at % block_size
        key, value = (
            cache.reshape(-1, num_kv_heads, head_dim)[rows]
            .float()
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, key) * head_dim**-0.5
        seen = at[None, :] <= (context - len(queries) + torch.arange(len(queries))).to(at)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, value)
    return out
