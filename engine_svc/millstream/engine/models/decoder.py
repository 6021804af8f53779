"""The decoder that Llama and Qwen3 share, top down; Qwen3 adds RMSNorms over the heads of q and k.

token ids -> embedding -> layers -> norm -> LM head -> logits
layer:  x + attention(norm(x)), then x + MLP(norm(x))

Everything but the embedding is an operation of ops.StepOps, which fuses what a device runs best
together: a norm with the projection after it, an addition with the projection before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from millstream.engine.attention import KVCache
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import (
    Embedding,
    FusedLinear,
    Layer,
    Linear,
    LMHead,
    ParameterPart,
    RMSNorm,
)
from millstream.engine.model_config import ModelConfig
from millstream.engine.ops import Ops, StepOps, Stream
from millstream.engine.rope import RotaryEmbedding


class DecoderModel(nn.Module):
    """A model of one process; its only input is the ForwardBatch, its only state the KV cache."""

    rope: RotaryEmbedding  # made after the parameters: it has contents, they come from a checkpoint

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.tied = config.tie_word_embeddings  # the LM head's weight is the embedding
        self.model = Decoder(config)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if self.tied else None,
        )

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits [R, vocab_size] of the tokens in batch.sample_rows, in the model's dtype; fills
        the KV cache."""
        ops = self.ops.begin_step(batch, kv_cache, self.rope)
        stream: Stream = self.model(batch, ops)
        if len(batch.sample_rows) < len(batch.token_ids):  # else they are all, in their order
            stream = stream.rows(batch.sample_rows)
        return ops.norm_linear(stream, self.model.norm, self.lm_head)

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

    def forward(self, batch: ForwardBatch, ops: StepOps) -> Stream:
        """The residual stream [T, hidden_size], before the final norm."""
        stream = Stream(self.embed_tokens(batch.token_ids))
        for layer in self.layers:
            stream = layer(stream, ops)
        return stream


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, stream: Stream, ops: StepOps) -> Stream:
        stream = self.self_attn(stream, self.input_layernorm, ops)
        output: Stream = self.mlp(stream, self.post_attention_layernorm, ops)
        return output


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
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

    def forward(self, stream: Stream, norm: RMSNorm, ops: StepOps) -> Stream:
        qkv = ops.norm_linear(stream, norm, self.qkv_proj)
        norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        attended = ops.attend(self.index, qkv, norms)
        return ops.add_linear(attended, self.o_proj, stream.residual)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = FusedLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=config.mlp_bias
        )
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, stream: Stream, norm: RMSNorm, ops: StepOps) -> Stream:
        x = ops.norm_swiglu(stream, norm, self.gate_up_proj)
        return ops.add_linear(x, self.down_proj, stream.residual)
