"""Exp(1) noise of blocks and of tokens, for sampling kernels: functions of (seed, position, id).

Philox4x32-10, keyed by the seed, of the counter (word, position, level, 0): a block's noise is the
first word that block id makes at level 1, a token's is word id % 4 of those that id // 4 makes at
level 0. Oracle: the engine's stepping/noise.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _exponential(words: tl.tensor) -> tl.tensor:
    """Exp(1) noise of 32-bit words: -log1p(-u), u = (word + 0.5) / 2^32.

    For small u by five terms of its series (the rest is 2^-22 of it at most): log(1 - u) would lose
    there what makes the smallest E, those that win, differ.
    """
    u = (words.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 16, series, -tl.log(1 - u))


@triton.jit  # type: ignore[untyped-decorator]
def block_noise(seed: tl.tensor, position: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Noise of block ids: a counter each, whose third word sets them apart from tokens."""
    zero = block * 0
    word, _, _, _ = tl.philox(seed, block, zero + position.to(tl.int32), zero + 1, zero)
    return _exponential(word)


@triton.jit  # type: ignore[untyped-decorator]
def token_noise(
    seed: tl.tensor, position: tl.tensor, first_id: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Noise [BLOCK] of token ids first_id and up, four to a counter."""
    counter = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.int32)
    zero = counter * 0
    word_0, word_1, word_2, word_3 = tl.philox(
        seed, counter, zero + position.to(tl.int32), zero, zero
    )
    #  [counter, i, j] is word 2 * i + j of the counter, hence of token id 4 * counter + 2 * i + j
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3)).reshape([BLOCK])
    return _exponential(words)
