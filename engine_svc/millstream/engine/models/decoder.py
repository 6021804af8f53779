"""The decoder that Llama and Qwen3 share, top down; Qwen3 adds RMSNorms over the heads of q and k.

token ids -> embedding -> layers -> norm -> LM head -> logits
layer:  x + attention(norm(x)), then x + MLP(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream.engine.attention import AttentionBackend, KVCache, StepAttention
from millstream.engine.batch import ForwardBatch
from millstream.engine.model_config import ModelConfig
from millstream.engine.models.layers import (
    Embedding,
    FusedLinear,
    Layer,
    Linear,
    LMHead,
    ParameterPart,
    RMSNorm,
)
from millstream.engine.models.rope import RotaryEmbedding, rotate


class DecoderModel(nn.Module):
    """A model of one process; its only input is the ForwardBatch, its only state the KV cache."""

    rope: RotaryEmbedding  # made after the parameters: it has contents, they come from a checkpoint

    def __init__(self, config: ModelConfig, attention: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.tied = config.tie_word_embeddings  # the LM head's weight is the embedding
        self.model = Decoder(config)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if self.tied else None,
        )

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits [R, vocab_size] float32 of the tokens in batch.sample_rows; fills the KV cache."""
        attention = self.attention.begin_step(batch, kv_cache)
        cos, sin = self.rope(batch)
        hidden = self.model(batch.token_ids, cos, sin, attention)
        logits: Tensor = self.lm_head(self.model.norm(hidden.index_select(0, batch.sample_rows)))
        return logits

    def checkpoint_parts(self) -> Iterator[tuple[str, ParameterPart]]:
        """Every tensor that a checkpoint must hold: its name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, Layer) and not (module is self.lm_head and self.tied):
                yield from module.checkpoint_parts(path)

    def untie(self, weight: Tensor) -> None:
        """Gives the LM head a weight of its own."""
        self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        self.tied = False

    def pack(self) -> None:
        """To be called once the parameters have their contents; they cannot be loaded again."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, cos: Tensor, sin: Tensor, attend: StepAttention) -> Tensor:
        """The hidden states [T, hidden_size], before the final norm."""
        x: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: StepAttention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
        )
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: StepAttention) -> Tensor:
        #  heads of one token:  [ query 0 .. Hq )[ key 0 .. Hkv )[ value 0 .. Hkv )
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        keys_end = self.num_heads + self.num_kv_heads
        query_key, value = heads[:, :keys_end], heads[:, keys_end:]
        if self.qk_norm:
            query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query_key = rotate(query_key, cos, sin)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        attended = attend(self.index, query, key, value)
        output: Tensor = self.o_proj(attended.reshape(x.shape[0], -1))
        return output


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = FusedLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=config.mlp_bias
        )
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output
