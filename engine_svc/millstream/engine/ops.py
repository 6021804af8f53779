"""The seam between models and what computes for them: everything but matrix products.

Two implementations: TorchOps (torch_ops.py), for CPUs and as oracle, and TritonOps (triton_ops.py),
for NVIDIA GPUs. Which one a runner uses is settled once, by hardware.resolve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millstream.engine.attention import KVCache
from millstream.engine.batch import ForwardBatch
from millstream.engine.rope import RotaryEmbedding


class StepOps(Protocol):
    """What the layers of one step call."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension of [n, hidden], rounded where transformers rounds."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to the residual stream [n, hidden] in place; returns RMSNorm of the sum."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * size], gates before ups, to silu(gate) * up [n, size]."""

    def attend(
        self, layer: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Attention of a layer for all tokens of the step, over the paged cache.

        Norms the heads of query and key (where there are weights for it), rotates them, stores key
        and value in the cache, attends.

        Args:
            qkv: [T, (Hq + 2 * Hkv) * D]: a token's query heads, then its key and value heads.
            norms: the weights [D] of the norms of query and key, or None; eps is theirs.
        Returns:
            [T, Hq * D].
        """


class Ops(Protocol):
    """What a model and its runner call."""

    def begin_step(self, batch: ForwardBatch, kv_cache: KVCache, rope: RotaryEmbedding) -> StepOps:
        """Prepares once what all layers of a step share."""

    @property
    def sampler(self) -> SlotSampler | None:
        """Samples rows without filters or bans; None: sampling.sample does them, too."""


class SlotSampler(Protocol):
    def __call__(
        self, logits: Tensor, positions: Tensor, slots: Tensor, table: SlotSampling
    ) -> Tensor:
        """One token id [R] int64 for each row of logits [R, V], as sampling.sample would.

        Args:
            positions: [R] int64, the index of the token to sample in prompt + output.
            slots: [R] int64, entries of `table`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """How each slot samples: tables on the device, one entry a slot."""

    temperatures: Tensor  # [slots] float32; 0: greedy
    seeds: Tensor  # [slots] int64: the bits of an unsigned seed
