"""Which engine has had the beginning of a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from millstream.client.prefixes import PIECE_TOKENS, KnownPrefixes, beginnings


@dataclass
class Limits:
    block_size: int = 16
    num_blocks: int = 1 << 20


def test_whole_pieces_are_known_and_what_is_behind_them_is_not() -> None:
    known = KnownPrefixes(Limits())
    prompt = list(range(3 * PIECE_TOKENS + 5))
    assert known.num_tokens(beginnings("", prompt)) == 0
    known.add(beginnings("", prompt))
    assert known.num_tokens(beginnings("", prompt)) == 3 * PIECE_TOKENS
    assert known.num_tokens(beginnings("", [*prompt, *prompt])) == 3 * PIECE_TOKENS
    assert known.num_tokens(beginnings("", prompt[:-6])) == 2 * PIECE_TOKENS
    assert known.num_tokens(beginnings("", prompt[: PIECE_TOKENS - 1])) == 0
    assert known.num_tokens(beginnings("", [7, *prompt])) == 0, "elsewhere in the prompt"
    assert known.num_tokens(beginnings("salt", prompt)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_two_prompts_are_alike_as_far_as_their_pieces(seed: int) -> None:
    rng = random.Random(seed)
    one = [rng.randrange(3) for _ in range(rng.randrange(600))]
    other = one.copy()
    for _ in range(rng.randrange(3)):
        if other:
            other[rng.randrange(len(other))] = 9
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    known = KnownPrefixes(Limits())
    known.add(beginnings("", one))
    assert known.num_tokens(beginnings("", other)) == same // PIECE_TOKENS * PIECE_TOKENS


def test_no_more_is_known_than_the_cache_holds_and_the_oldest_goes_first() -> None:
    known = KnownPrefixes(Limits(block_size=16, num_blocks=8 * PIECE_TOKENS // 16))  # 8 pieces
    first, second, third = ([i] * (4 * PIECE_TOKENS) for i in range(3))

    def tokens(prompt: list[int]) -> int:
        return known.num_tokens(beginnings("", prompt))

    known.add(beginnings("", first))
    known.add(beginnings("", second))
    known.add(beginnings("", first[:PIECE_TOKENS]))
    known.add(beginnings("", third))
    assert tokens(first) == PIECE_TOKENS, "which was used since"
    assert tokens(second) == 3 * PIECE_TOKENS, "its end goes before its start"
    known.add(beginnings("", [5] * (50 * PIECE_TOKENS)))
    assert tokens([5] * (50 * PIECE_TOKENS)) == 8 * PIECE_TOKENS, (
        "of one that is too long its start"
    )
    assert tokens(first) == tokens(second) == tokens(third) == 0
