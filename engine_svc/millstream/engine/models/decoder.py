"""The decoder that Llama and Qwen3 share, top down; Qwen3 adds RMSNorms over the heads of q and k.

token ids -> embedding -> layers -> norm -> LM head -> logits
layer:  x + attention(norm(x)), then x + MLP(norm(x))

The last layer stores the keys and values of all tokens; behind its attention, it goes on with those
alone whose hidden states are wanted.

With several ranks (parallel.py) each computes its heads and its part of the MLP; attention and MLP
end with the sum over the ranks.

Everything but the embedding is an operation of ops.StepOps, which fuses what a device runs best
together: a norm with the projection after it, an addition with the projection before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from millstream.engine.attention import KVCache
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import (
    FusedLinear,
    Layer,
    Linear,
    LMHead,
    ParameterPart,
    RMSNorm,
    embedding,
    row_linear,
)
from millstream.engine.ops import Ops, StepOps, Stream
from millstream.engine.parallel import Group, Share
from millstream.engine.rope import RotaryEmbedding


class Hidden(NamedTuple):
    """What a step has computed before the LM head."""

    ops: StepOps
    stream: Stream  # of the tokens that were asked for, before the final norm


class DecoderModel(nn.Module):
    """A rank's part of a model, all of it without a group; its only input is the ForwardBatch, its
    only state the KV cache."""

    rope: RotaryEmbedding  # made after the parameters: it has contents, they come from a checkpoint

    def __init__(self, share: Share, ops: Ops, group: Group | None) -> None:
        super().__init__()
        config = share.config
        self.config = config
        self.ops = ops
        self.tied = config.tie_word_embeddings  # the LM head's weight is the embedding
        self.model = Decoder(share, group)
        self.lm_head = LMHead(
            share.vocab,
            config.hidden_size,
            tied_to=self.model.embed_tokens if self.tied else None,
        )

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits [R, vocab_size] of the tokens in batch.sample_rows, in the model's dtype, or of
        this rank's part of the vocabulary; fills the KV cache."""
        # As many as there are decodes, alone: they are all, in their order. Chunks that are filled
        # up (chunk_graphs.py) may want as many rows as there are tokens, and others.
        every = len(batch.sample_rows) == len(batch.token_ids) == batch.num_decodes
        return self.logits(self.hidden(batch, kv_cache, None if every else batch.sample_rows))

    @property
    def whole_embedding(self) -> Tensor | None:
        """[vocab_size, hidden_size]; None where ranks have a part each."""
        embedding = self.model.embed_tokens
        return embedding.weight if embedding.rows.is_whole else None

    def hidden(self, batch: ForwardBatch, kv_cache: KVCache, rows: Tensor | None = None) -> Hidden:
        """All of a step but the LM head, for its tokens rows [n] int64, or for all; fills the KV
        cache."""
        ops = self.ops.begin_step(batch, kv_cache, self.rope)
        return Hidden(ops, self.model(batch, ops, rows))

    def logits(self, hidden: Hidden, rows: Tensor | None = None) -> Tensor:
        """As forward, of rows [n] int64 of `hidden`. None: of all; `hidden` is used up then."""
        ops, stream = hidden
        if rows is not None:
            stream = stream.rows(rows)
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
            if isinstance(module, DecoderLayer) and self.ops.folds_norms:
                module.fold_norms()
            elif isinstance(module, Linear):
                module.pack()


class Decoder(nn.Module):
    def __init__(self, share: Share, group: Group | None) -> None:
        super().__init__()
        config = share.config
        self.embed_tokens = embedding(share.vocab, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(share, i, group) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch, ops: StepOps, rows: Tensor | None) -> Stream:
        """The residual stream [n, hidden_size] of tokens rows [n], or of all, before the final
        norm."""
        embedded = batch.embedded
        stream = Stream(self.embed_tokens(batch.token_ids) if embedded is None else embedded)
        *layers, last = self.layers
        for layer in layers:
            stream = layer(stream, ops)
        output: Stream = last(stream, ops, rows)
        return output


class DecoderLayer(nn.Module):
    def __init__(self, share: Share, index: int, group: Group | None) -> None:
        super().__init__()
        config = share.config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(share, index, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(share, group)

    def fold_norms(self) -> None:
        self.input_layernorm.fold_into(self.self_attn.qkv_proj)
        self.post_attention_layernorm.fold_into(self.mlp.gate_up_proj)

    def forward(self, stream: Stream, ops: StepOps, rows: Tensor | None = None) -> Stream:
        """Of all tokens, or of rows [n]."""
        stream = self.self_attn(stream, self.input_layernorm, ops, rows)
        output: Stream = self.mlp(stream, self.post_attention_layernorm, ops)
        return output


class Attention(nn.Module):
    def __init__(self, share: Share, index: int, group: Group | None) -> None:
        super().__init__()
        config, bias = share.config, share.config.attention_bias
        self.index = index
        query = share.heads.times(config.head_dim)
        key_value = share.kv_heads.times(config.head_dim)
        outputs = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        self.qkv_proj = FusedLinear(config.hidden_size, outputs, bias=bias)
        self.o_proj = row_linear(query, config.hidden_size, bias=bias, group=group)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, stream: Stream, norm: RMSNorm, ops: StepOps, rows: Tensor | None) -> Stream:
        head_norms = (self.q_norm, self.k_norm) if self.qk_norm else None
        attended = ops.attend(self.index, stream, norm, self.qkv_proj, head_norms)
        residual = stream.residual
        if rows is not None:
            attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
        return ops.add_linear(attended, self.o_proj, residual)


class MLP(nn.Module):
    def __init__(self, share: Share, group: Group | None) -> None:
        super().__init__()
        size, bias = share.config.hidden_size, share.config.mlp_bias
        outputs = {"gate_proj": share.mlp, "up_proj": share.mlp}
        self.gate_up_proj = FusedLinear(size, outputs, bias=bias)
        self.down_proj = row_linear(share.mlp, size, bias=bias, group=group)

    def forward(self, stream: Stream, norm: RMSNorm, ops: StepOps) -> Stream:
        x = ops.norm_swiglu(stream, norm, self.gate_up_proj)
        return ops.add_linear(x, self.down_proj, stream.residual)
