"""Masks of token ids against a naive reading of what may be sampled."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from millstream.engine.grammars.token_masks import SlotMask, Words, everything, num_words, pack
from millstream.engine.plan import SlotStart
from millstream.engine.request import GrammarKind, GrammarSpec, Sampling

VOCAB_SIZE = 70  # the third word is not full
PROMPT = (9, 9, 1)


def ids_of(row: Words) -> set[int]:
    assert row.dtype == np.int32 and row.shape == (num_words(VOCAB_SIZE),)
    return {i for i in range(32 * len(row)) if row[i // 32] >> (i % 32) & 1}


def make(
    *,
    output: tuple[int, ...] = (),
    ends: tuple[int, ...] = (),
    grammar: ToyGrammar | None = None,
    **fields: object,
) -> SlotMask:
    spec = GrammarSpec(kind=GrammarKind.REGEX, text="toy") if grammar else None
    sampling = Sampling(max_tokens=50, grammar=spec, **fields)  # type: ignore[arg-type]
    start = SlotStart(
        slot=0,
        sampling=sampling,
        min_position=len(PROMPT) + sampling.min_tokens,
        banned_token_ids=ends if sampling.min_tokens else (),
        num_computed_tokens=0,
        block_ids=(1,),
        token_ids=(*PROMPT, *output) if sampling.needs_token_ids else (),
    )
    return SlotMask(start, VOCAB_SIZE, grammar)


class ToyGrammar:
    """An id is 8, or one higher than the last one that was not; 5 ends it."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill(self, row: Words) -> None:
        assert not self.is_done
        following = 1 + max([-1, *(token_id for token_id in self.accepted if token_id != 8)])
        row[:] = (1 << following | 1 << 8, 0, -1)  # ids that do not exist are none of its business

    def accept(self, token_id: int) -> None:
        assert not self.is_done
        self.accepted.append(token_id)

    @property
    def is_done(self) -> bool:
        return 5 in self.accepted


def test_packing() -> None:
    assert ids_of(pack((0, 31, 32, 69), VOCAB_SIZE)) == {0, 31, 32, 69}
    for vocab_size in (1, 31, 32, 33, 64, 70):
        row = everything(vocab_size)
        assert row.dtype == np.int32 and (row == pack(range(vocab_size), vocab_size)).all()
    assert pack((31,), VOCAB_SIZE)[0] == -(2**31)


@pytest.mark.parametrize("seed", range(300))
def test_against_a_naive_reading(seed: int) -> None:
    """Allowed ids, min_tokens and bad words, token by token, and resumed in the middle; each gives
    way where it would leave nothing."""
    rng = random.Random(seed)
    few = rng.sample(range(VOCAB_SIZE), rng.choice([2, 3, 5]))
    bad_words = tuple(
        tuple(rng.choice(few) for _ in range(rng.choice([1, 2, 2, 3])))
        for _ in range(rng.choice([0, 1, 4, 9]))
    )
    allowed = tuple(sorted(rng.sample(few, rng.randint(1, len(few))))) if rng.random() < 0.5 else ()
    ends = tuple(rng.sample(few, rng.choice([0, 1, 2])))
    fields = {
        "bad_words": bad_words,
        "allowed_token_ids": allowed,
        "min_tokens": rng.choice([0, 3]),
        "ends": ends,
    }
    mask = make(**fields)  # type: ignore[arg-type]
    output: tuple[int, ...] = ()
    for position in range(len(PROMPT), len(PROMPT) + 8):
        wanted = set(range(VOCAB_SIZE))
        early = len(output) < fields["min_tokens"]  # type: ignore[operator]
        bad = {
            word[-1]
            for word in bad_words
            if len(word) == 1 or output[-len(word[:-1]) :] == word[:-1]
        }
        for keep in (set(allowed or wanted), wanted - set(ends if early else ()), wanted - bad):
            wanted = wanted & keep or wanted
        narrowed = bool(allowed or bad_words or (early and ends))
        assert mask.narrows(position) == narrowed
        assert ids_of(mask.row(position)) == wanted
        resumed = make(output=output, **fields)  # type: ignore[arg-type]
        assert ids_of(resumed.row(position)) == wanted, "after preemption"
        token_id = rng.choice([*(wanted & set(few)), *wanted])
        output = (*output, token_id)
        mask.accept(token_id)


def test_a_row_stays_the_same_object_while_it_says_the_same() -> None:
    """So that only what changed is uploaded."""
    mask = make(bad_words=((1, 2), (3,)), min_tokens=2, ends=(7,))
    first = mask.row(3)
    mask.accept(9)
    assert mask.row(4) is first
    mask.accept(1)
    changed = mask.row(5)
    assert changed is not first and ids_of(changed) == set(range(VOCAB_SIZE)) - {2, 3}


def test_many_bad_words_that_nearly_match_cost_little() -> None:
    """1024 of 128 ids that differ near their end took a row 0.2 ms of each step, which all clients
    waited for: 50 ms with 256 such rows."""

    def seconds(count: int) -> float:
        words = tuple((*[1] * 124, i % 60 + 2, i // 60, 1, 2) for i in range(count))
        mask = make(bad_words=words, output=(1,) * 130)
        started = time.perf_counter()
        for position in range(133, 333):
            mask.accept(1)
            mask.row(position)
        return time.perf_counter() - started

    one_s, many_s = (min(seconds(count) for _ in range(3)) for count in (1, 1024))
    assert many_s < 10 * one_s


def test_bad_words_are_of_the_output_alone() -> None:
    """The prompt ends with 1."""
    mask = make(bad_words=((1, 2),))
    assert 2 in ids_of(mask.row(3))
    mask.accept(1)
    assert 2 not in ids_of(mask.row(4))


def test_a_grammar_comes_first_and_ends() -> None:
    grammar = ToyGrammar()
    mask = make(
        grammar=grammar,
        output=(0, 8),
        ends=(2, 5),
        min_tokens=9,
        bad_words=((0, 1), (8, 1)),
        allowed_token_ids=(1, 2, 3, 4, 8, 60),
    )
    existing = set(range(64, VOCAB_SIZE))
    assert grammar.accepted == [0, 8], "told the output so far, not the prompt"
    assert mask.narrows(5)
    # The grammar says 1, 8 or the last ids; of these 1 and 8 are allowed, and 8, 1 is a bad word.
    assert ids_of(mask.row(5)) == {8}
    mask.accept(8)
    mask.accept(1)
    # 2, 8: min_tokens leaves 8.
    assert ids_of(mask.row(7)) == {8}
    for token_id in (2, 3, 4):
        mask.accept(token_id)
    # 5 or 8, of which only 8 is allowed; then 5 comes all the same, and the grammar is no more.
    assert ids_of(mask.row(10)) == {8}
    mask.accept(5)
    mask.accept(33)
    assert ids_of(mask.row(11)) == {1, 3, 4, 8, 60}
    alone = make(grammar=ToyGrammar())
    assert ids_of(alone.row(3)) == {0, 8} | existing
