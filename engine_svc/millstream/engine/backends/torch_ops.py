"""TorchOps: what layers compute, in plain torch."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.engine.attention import KVCache, TorchAttention
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import Linear, RMSNorm
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.ops import Stream
from millstream.engine.rope import RotaryEmbedding, rotate


class TorchOps:
    """An ops.Ops for any device."""

    on_slots = None
    folds_norms = False

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

    def norm_linear(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        if stream.pending is not None:
            stream.residual.add_(stream.pending)
        return cast(Tensor, layer(_rms_norm(stream.residual, norm)))

    def norm_swiglu(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        gate, up = self.norm_linear(stream, norm, layer).chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_linear(self, x: Tensor, layer: Linear, residual: Tensor) -> Stream:
        return Stream(residual, layer(x))

    def attend(
        self,
        layer: int,
        stream: Stream,
        norm: RMSNorm,
        projection: Linear,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Tensor:
        qkv = self.norm_linear(stream, norm, projection)
        #  heads of one token:  [ query 0 .. Hq )[ key 0 .. Hkv )[ value 0 .. Hkv )
        heads = qkv.view(len(qkv), -1, self._head_dim)
        query_key, value = heads[:, : self._keys_end], heads[:, self._keys_end :]
        if head_norms is not None:
            q_norm, k_norm = head_norms
            query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
            query_key = torch.cat((_rms_norm(query, q_norm), _rms_norm(key, k_norm)), dim=1)
        query_key = rotate(query_key, self._cos, self._signed_sin)
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        return self._attention(layer, query, key, value).reshape(len(qkv), -1)


def _rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    weight, eps = norm.weight, norm.eps
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)  # rounded before the weight multiplies
