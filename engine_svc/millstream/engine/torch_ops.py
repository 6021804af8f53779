"""TorchOps: what layers compute besides matrix products, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.engine.attention import KVCache, TorchAttention
from millstream.engine.batch import ForwardBatch
from millstream.engine.model_config import ModelConfig
from millstream.engine.rope import RotaryEmbedding, rotate


class TorchOps:
    """An ops.Ops for any device."""

    sampler = None

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def begin_step(
        self, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding
    ) -> TorchStepOps:
        return TorchStepOps(self._config, batch, kv_cache, rope)


class TorchStepOps:
    """An ops.StepOps."""

    def __init__(
        self, config: ModelConfig, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding
    ) -> None:
        self._num_heads = config.num_heads
        self._keys_end = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._attention = TorchAttention(batch, kv_cache)
        self._cos, self._signed_sin = rope.cos_sin(batch)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)  # rounded before the weight multiplies

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attend(
        self, layer: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        #  heads of one token:  [ query 0 .. Hq )[ key 0 .. Hkv )[ value 0 .. Hkv )
        heads = qkv.view(len(qkv), -1, self._head_dim)
        query_key, value = heads[:, : self._keys_end], heads[:, self._keys_end :]
        if norms is not None:
            q_norm, k_norm = norms
            query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
            query_key = torch.cat(
                (self.rms_norm(query, q_norm, eps), self.rms_norm(key, k_norm, eps)), dim=1
            )
        query_key = rotate(query_key, self._cos, self._signed_sin)
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        return self._attention(layer, query, key, value).reshape(len(qkv), -1)
