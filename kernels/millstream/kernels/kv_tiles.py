"""Where a tile of consecutive tokens lies in a paged cache: shared by decode and prefill."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def block_ids(
    table_ptr: tl.tensor, token: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The block of a tile that starts at `token`; of each of its tokens if it spans several.

    To stay int32 until they are used: Triton does not pipeline a loop that carries them as int64.
    """
    last = tl.maximum(end - 1, 0)
    if TILE > BLOCK:
        token = token + tl.arange(0, TILE)
    return tl.load(table_ptr + tl.minimum(token, last) // BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def tile_offsets(
    ids: tl.tensor,
    token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[TILE, HEAD_DIM] int64: elements of tokens from `token` on, from a head's first in a cache
    [blocks, BLOCK, Hkv, HEAD_DIM] whose tokens are TOKEN_STRIDE apart; `ids` are from block_ids."""
    offset = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM)
    ids = ids.to(tl.int64)
    if TILE > BLOCK:
        rows = ids * (BLOCK * TOKEN_STRIDE) + (token + offset) % BLOCK * TOKEN_STRIDE
        at = rows[:, None] + column[None, :]
    else:
        first = ids * (BLOCK * TOKEN_STRIDE) + token % BLOCK * TOKEN_STRIDE
        at = first + (offset[:, None] * TOKEN_STRIDE + column[None, :])
    return at
