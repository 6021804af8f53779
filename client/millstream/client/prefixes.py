"""What beginnings of prompts an engine has had of late: it may have their KV blocks still, so a
prompt that begins alike is less work there than elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# A beginning is known by its tokens in pieces of so many; shorter prompts are not worth it.
PIECE_TOKENS = 64
# Of one engine: beginnings, 2 MB of them at most.
_MOST = 1 << 14


class _Limits(Protocol):
    """engine_pb2.EngineLimits."""

    block_size: int
    num_blocks: int


def beginnings(cache_salt: str, token_ids: Sequence[int]) -> list[int]:
    """A number for each beginning of a prompt that ends with a whole piece, the shortest first. The
    numbers of two prompts are equal as far as their pieces are (but for chance: a prompt that goes
    elsewhere is right there, too)."""
    ids = tuple(token_ids)
    numbers = []
    last = hash(cache_salt)
    for end in range(PIECE_TOKENS, len(ids) + 1, PIECE_TOKENS):
        last = hash((last, ids[end - PIECE_TOKENS : end]))
        numbers.append(last)
    return numbers


class KnownPrefixes:
    """The latest beginnings that one engine has had, as many as its KV cache can hold."""

    def __init__(self, limits: _Limits) -> None:
        self._most = min(_MOST, limits.block_size * limits.num_blocks // PIECE_TOKENS)
        self._known: dict[int, None] = {}  # the latest last

    def num_tokens(self, numbers: Sequence[int]) -> int:
        """Of a prompt with these beginnings(), those that the engine has had."""
        for count, number in enumerate(numbers):
            if number not in self._known:
                return count * PIECE_TOKENS
        return len(numbers) * PIECE_TOKENS

    def add(self, numbers: Sequence[int]) -> None:
        """The engine gets a prompt with these. A long one's end is forgotten before its start."""
        for number in reversed(numbers[: self._most]):
            self._known.pop(number, None)
            self._known[number] = None
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
