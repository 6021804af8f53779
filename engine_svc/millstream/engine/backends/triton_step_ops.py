"""TritonStepOps: a step's operations on GPUs. Its products are products.py's, its attention
step_attention.py's; chunks and decodes are attended to by a kernel each.
"""

from __future__ import annotations

from torch import Tensor

from millstream.engine.attention import KVCache
from millstream.engine.backends.products import Products
from millstream.engine.backends.step_attention import StepAttention
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import Linear, RMSNorm
from millstream.engine.ops import Stream
from millstream.engine.rope import RotaryEmbedding
from millstream.kernels import boxes
from millstream.kernels.heads import Heads


class TritonStepOps:
    """An ops.StepOps."""

    def __init__(
        self,
        products: Products,
        attention: StepAttention,
        batch: ForwardBatch,
        kv_cache: KVCache,
        rope: RotaryEmbedding,
        *,
        num_heads: int,
    ) -> None:
        self._products = products
        self._attention = attention
        self._num_heads = num_heads
        self._caches = kv_cache.layers
        table, self._rows = rope.angles(batch)
        self._cos, self._sin = table.chunk(2, dim=-1)
        self._kv_indices = batch.kv_indices
        self._num_decodes = batch.num_decodes
        self._num_chunk_tokens = len(batch.token_ids) - batch.num_decodes

    def norm_linear(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        return self._products.normed(stream, norm, layer, swiglu=False)

    def norm_swiglu(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        return self._products.normed(stream, norm, layer, swiglu=True)

    def add_linear(self, x: Tensor, layer: Linear, residual: Tensor) -> Stream:
        return self._products.added(x, layer, residual)

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
        q_norm, k_norm = head_norms or (None, None)
        heads = Heads(
            num_heads=self._num_heads,
            num_kv_heads=keys.shape[2],
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
        return self._products.heads(stream, norm, projection, heads)
