"""Rotary position embedding: frequencies of each scaling type as transformers computes them, the
cos and sin of a step's tokens, and the rotation.

Dynamic NTK is the one type whose frequencies depend on more than the config: transformers grows the
base with the longest length seen, so a token is rotated for the length that its forward had:
`max(prompt length, position + 1)`, since a prompt is one forward and each later token another. Here
that length is each token's own (`ForwardBatch.rope_lens`), so chunks, preemption and neighbours
change nothing. (transformers keeps a grown base for later calls until a short prompt comes; what is
matched is a call on a fresh model.) Keys at one position then differ between prompts longer than
the original limit: their prefixes must not be shared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from millstream.engine.batch import ForwardBatch
from millstream.engine.model_files.rope_config import RopeConfig, RopeType


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[head_dim / 2] float32 on the CPU, and the factor of cos and sin.

    For dynamic NTK these are the frequencies up to the original limit.
    """
    inv_freq = 1.0 / rope.theta ** _exponents(head_dim)
    match rope.type:
        case RopeType.DEFAULT | RopeType.DYNAMIC:
            return inv_freq, 1.0
        case RopeType.LINEAR:
            return inv_freq / rope.factor, 1.0
        case RopeType.LLAMA3:
            return _llama3(rope, inv_freq), 1.0
        case RopeType.YARN:
            return _yarn(rope, head_dim), _yarn_attention_factor(rope)


def _exponents(head_dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    result = torch.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, result)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): the ramp between interpolation and extrapolation."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    frequencies = rope.theta ** _exponents(head_dim)
    return 1.0 / (rope.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RotaryEmbedding:
    """cos and sin of a step's tokens, looked up once a step and shared by all layers.

    They are read from a table of `max_model_len` positions, the engine's limit rather than
    the config's; dynamic NTK computes them.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.table: Tensor | None = (
            None  # [max_model_len, head_dim]: cos of each frequency, then sin
        )
        if rope.type is not RopeType.DYNAMIC:
            inv_freq, factor = inverse_frequencies(rope, head_dim)
            positions = torch.arange(max_model_len, dtype=torch.float32)
            self.table = _cos_sin(torch.outer(positions, inv_freq), factor, dtype).to(device)

    def angles(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """A table [n, head_dim], each row the cos and then the sin of every frequency, and which
        row is whose: [T] int64."""
        if self.table is not None:
            return self.table, batch.positions
        return self._dynamic(batch), torch.arange(len(batch.positions), device=self.device)

    def cos_sin(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [T, 1, head_dim], as `rotate` takes them."""
        table, rows = self.angles(batch)
        cos, sin = table.index_select(0, rows).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _dynamic(self, batch: ForwardBatch) -> Tensor:
        original, factor = self.rope.original_max_position, self.rope.factor
        lengths = batch.positions + 1 if batch.rope_lens is None else batch.rope_lens
        stretch = factor * lengths.clamp_min(original) / original - (factor - 1)
        base = self.rope.theta * stretch ** (self.head_dim / (self.head_dim - 2))
        inv_freq = 1.0 / base.unsqueeze(-1) ** _exponents(self.head_dim, lengths.device)
        return _cos_sin(batch.positions.float().unsqueeze(-1) * inv_freq, 1.0, self.dtype)


def _cos_sin(angles: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates [T, H, head_dim], whose halves are the two coordinates of each frequency."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((second, first), dim=-1) * signed_sin
