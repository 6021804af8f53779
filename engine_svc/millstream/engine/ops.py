"""The seam between models and what computes for them.

Two implementations: TorchOps (backends/torch_ops.py), for CPUs and as oracle, and TritonOps
(backends/triton_ops.py), for NVIDIA GPUs. Which one a runner uses is settled once, by
hardware.resolve.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from millstream.engine.attention import KVCache
from millstream.engine.batch import ForwardBatch
from millstream.engine.layers import Linear, RMSNorm
from millstream.engine.parallel import Group
from millstream.engine.rope import RotaryEmbedding


class Stream(NamedTuple):
    """The residual stream of n tokens, and what is still to be added to it: an addition is part of
    the operation before it (add_linear) or after it (norm_linear), wherever it costs least."""

    residual: Tensor  # [n, hidden]
    pending: Tensor | None = None  # [n, hidden]
    ranks: Group | None = None  # those whose pendings are the parts of a sum; None: it is whole
    squares: Tensor | None = None  # [n, pieces] float32: sums of residual's squares, if known

    def rows(self, index: Tensor) -> Stream:
        """Some of the tokens."""
        pending = None if self.pending is None else self.pending.index_select(0, index)
        return Stream(self.residual.index_select(0, index), pending, self.ranks)


class StepOps(Protocol):
    """What the layers of one step call; n tokens. Rounding is transformers', but behind a norm that
    is folded: its output is never rounded."""

    def norm_linear(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        """Adds what is pending to stream.residual, in place; returns a projection [n, out_features]
        of the RMSNorm of the sum."""

    def norm_swiglu(self, stream: Stream, norm: RMSNorm, layer: Linear) -> Tensor:
        """As norm_linear, of a projection whose first half are gates, the second ups: silu(gate) *
        up [n, out_features / 2]."""

    def add_linear(self, x: Tensor, layer: Linear, residual: Tensor) -> Stream:
        """The residual stream with a projection of x [n, in_features] added, or pending."""

    def attend(
        self,
        layer: int,
        stream: Stream,
        norm: RMSNorm,
        projection: Linear,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Tensor:
        """Attention of a layer for all tokens of the step, over the paged cache: [n, Hq * D].

        Projects as norm_linear does, to [n, (Hq + 2 * Hkv) * D]: a token's query heads, then its
        key and value heads. Norms those of query and key (where there are norms for it), rotates
        them, stores key and value in the cache, attends.
        """


class Ops(Protocol):
    """What a model and its runner call."""

    def begin_step(self, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding) -> StepOps:
        """Prepares once what all layers of a step share."""

    @property
    def folds_norms(self) -> bool:
        """Whether the projections of attention and MLP are to have the weights of the norms before
        them folded in (RMSNorm.folded)."""

    @property
    def on_slots(self) -> SlotOps | None:
        """None: only batches that the host lays out can be computed, and rows sampled."""


class SlotOps(Protocol):
    """A step of decodes from the slots' state to their next, without the host: what a CUDA graph
    holds besides the model."""

    def kernels_of(self, num_sequences: int) -> Hashable:
        """The same for two sizes of a step that launch the same kernels, grids apart, if their
        products have as many tiles (graphs.stand_ins). What cuBLAS takes is its own affair."""

    def read(self, slots: Tensor, state: SlotState, embedding: Tensor | None) -> DecodeInputs:
        """What the model reads when `slots` [n] compute a token each; their embeddings among it if
        `embedding` [vocab_size, hidden] is given."""

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: SlotSampling,
        *,
        filtered: bool,
        advanced: SlotState | None = None,
    ) -> Tensor:
        """One token id [R] int64 for each row of logits [R, V], as sampling.sample would.

        Args:
            positions: [R] int32 or int64, the index of the token to sample in prompt + output.
            slots: [R] int64, entries of `table`.
            filtered: some of the rows may have top-k, top-p or min-p.
            advanced: then to be as `advance` leaves it, of slots that computed a token each.
        """

    def best_of_shard(
        self, logits: Tensor, positions: Tensor, slots: Tensor, table: SlotSampling, first_id: int
    ) -> Tensor:
        """As shard_sampling.best_of_shard, with positions and slots as in `sample`."""

    def best_of_shards(self, shards: Tensor, slots: Tensor, table: SlotSampling) -> Tensor:
        """As shard_sampling.best_of_shards, with slots as in `sample`."""

    def advance(self, slots: Tensor, token_ids: Tensor, state: SlotState) -> None:
        """Records that `slots` [n] computed a token each and sampled token_ids [n]; the padding
        slot stays as it is."""

    def copy_out(self, token_ids: Tensor, out: Tensor) -> None:
        """Queues a copy of token_ids [R] int64 to `out` [R], pinned memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What steps change of each slot, on the device; the last slot pads batches."""

    computed: Tensor  # [slots] int64: computed tokens
    last_tokens: Tensor  # [slots] int64: sampled last
    block_tables: Tensor  # [slots, width] int32


class DecodeInputs(Protocol):
    """The tensors of a ForwardBatch, [n] each, that differ from step to step."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def kv_indices(self) -> Tensor: ...
    @property
    def context_lens(self) -> Tensor: ...
    @property
    def embedded(self) -> Tensor | None:
        """[n, hidden]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """How each slot samples: tables on the device, one entry a slot."""

    temperatures: Tensor  # [slots] float32; 0: greedy
    seeds: Tensor  # [slots] int64: the bits of an unsigned seed
    top_k: Tensor  # [slots] int64; 0: off
    top_p: Tensor  # [slots] float32; 1: off
    min_p: Tensor  # [slots] float32; 0: off
