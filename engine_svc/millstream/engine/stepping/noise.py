"""Exp(1) noise of a vocabulary's blocks and tokens: functions of (seed, position, id), from Philox.

Philox is keyed by the seed. A block's noise is the first word of counter (block id, position, 1,
0), a token's is word token id % 4 of counter (token id // 4, position, 0, 0): the same whatever
other noise is drawn, and never the same word for both. Triton's kernels draw it too (sample_noise).
"""

from __future__ import annotations

import torch

# The third word of the counter.
_TOKENS, _BLOCKS = 0, 1

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def block_noise(
    seeds: torch.Tensor, positions: torch.Tensor, first_block: int, count: int
) -> torch.Tensor:
    """Exp(1) noise of `count` blocks from first_block on: [N], [N] -> [N, count] float32."""
    blocks = torch.arange(first_block, first_block + count, device=seeds.device)
    words = philox(seeds[:, None], blocks[None, :], positions[:, None], _BLOCKS)
    return _to_exponential(words[0])


def token_noise(
    seeds: torch.Tensor, positions: torch.Tensor, first_ids: torch.Tensor, count: int
) -> torch.Tensor:
    """Exp(1) noise of `count` token ids from each first_ids on, all multiples of 4: three [N] ->
    [N, count] float32."""
    counters = first_ids[:, None] // 4 + torch.arange(count // 4, device=seeds.device)
    words = philox(seeds[:, None], counters, positions[:, None], _TOKENS)
    return _to_exponential(torch.stack(words, dim=-1).flatten(1))


def _to_exponential(words: torch.Tensor) -> torch.Tensor:
    """Uniform 32-bit words to Exp(1): -log1p(-u), u = (word + 0.5) / 2**32, at most 1 - 2**-24.

    Small u, hence the small E that win, keep all 32 bits of resolution; Triton's own mapping to
    floats keeps 31 and can give 0, whose logarithm is no score.
    """
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def philox(
    seeds: torch.Tensor, word_0: torch.Tensor, word_1: torch.Tensor, third_word: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words below 2**32 as int64, per counter of
    word_0, word_1, third_word and 0; arguments broadcast. As Triton's tl.philox."""
    # Words 0 and 2, and 1 and 3, in one tensor each: few rows cost what their operations' calls do.
    even = torch.stack((word_0, torch.full_like(word_0, third_word)))
    odd = torch.stack((word_1, torch.zeros_like(word_1)))
    multipliers = _constants(_MULTIPLIER_A, _MULTIPLIER_B, even)
    steps = torch.arange(_ROUNDS, device=seeds.device).view(-1, *(1,) * even.dim())
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    keys = (key + steps * _constants(_WEYL_A, _WEYL_B, even)) & _MASK
    for key in keys:
        # The products wrap around in int64, which leaves their 64 bits as they should be.
        products = (even * multipliers).flip(0)
        even = (products >> 32).bitwise_and_(_MASK) ^ odd ^ key
        odd = products.bitwise_and_(_MASK)
    return even[0], odd[0], even[1], odd[1]


def _constants(first: int, second: int, like: torch.Tensor) -> torch.Tensor:
    """Two numbers along the first axis of an int64 tensor, made where it lies."""
    shape = (1,) * (like.dim() - 1)
    return torch.stack((like.new_full(shape, first), like.new_full(shape, second)))
