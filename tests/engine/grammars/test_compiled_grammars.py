"""The engine's grammars: compiled beside the loop, there while they are held, bounded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.compiling_threads import watch_compiling
from tests.tiny_tokenizers import BYTE_VOCAB_SIZE, ENDOFTEXT_ID, byte_ids, make_byte_tokenizer

from millstream.engine.grammars import compiled
from millstream.engine.grammars.checker import GrammarChecker
from millstream.engine.grammars.compiled import CompiledGrammars
from millstream.engine.grammars.errors import GrammarError, GrammarsFullError
from millstream.engine.grammars.grammar import CompiledGrammar
from millstream.engine.grammars.token_masks import Grammar, num_words
from millstream.engine.request import GrammarKind, GrammarSpec

VOCAB_SIZE = BYTE_VOCAB_SIZE
EOS = (ENDOFTEXT_ID,)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes")) / "tokenizer.json"


@pytest.fixture
def grammars(tokenizer_file: Path) -> Iterator[CompiledGrammars]:
    grammars = CompiledGrammars(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    yield grammars
    grammars.close()


def spec(kind: str, value: object) -> GrammarSpec:
    text = value if isinstance(value, str) else json.dumps(value)
    return GrammarSpec(kind=GrammarKind[kind.upper()], text=text)


def allowed(grammar: Grammar) -> set[int]:
    row = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    grammar.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def crowd_out(grammars: CompiledGrammars, *in_use: GrammarSpec) -> None:
    """Prepares more other grammars than are kept for nobody, and these again and again."""
    for i in range(1, 140):
        grammars.prepare(spec("regex", f"a{{{i}}}b")).result(30)
        for each in in_use:
            grammars.prepare(each)


def test_equal_grammars_are_compiled_once(grammars: CompiledGrammars) -> None:
    first = grammars.prepare(spec("regex", "a+"))
    assert grammars.prepare(spec("regex", "a+")) is first
    first.result(30)
    assert allowed(grammars.start(spec("regex", "a+"))) == set(byte_ids("a"))


def test_errors_are_told_and_not_kept(grammars: CompiledGrammars) -> None:
    bad = grammars.prepare(spec("regex", "("))
    with pytest.raises(GrammarError, match="unclosed"):
        bad.result(30)
    for _ in range(100):
        if grammars.prepare(spec("regex", "(")) is not bad:
            return
        time.sleep(0.01)
    pytest.fail("the error was kept")


def test_one_that_is_held_is_never_compiled_again(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever came since; on the engine's thread least of all, where everybody would wait."""
    threads = watch_compiling(monkeypatch)
    held = grammars.prepare(spec("regex", "a+"))
    held.result(30)
    crowd_out(grammars)
    assert allowed(grammars.start(spec("regex", "a+"))) == set(byte_ids("a"))
    assert grammars.prepare(spec("regex", "a+")) is held
    assert threads == {"grammars"}


def test_few_are_kept_that_nobody_holds(grammars: CompiledGrammars) -> None:
    popular = spec("regex", "x")
    for each in (spec("regex", "a+"), popular):
        grammars.prepare(each).result(30)
    crowd_out(grammars, popular)
    assert allowed(grammars.start(popular)) == set(byte_ids("x"))
    assert 128 <= len(grammars._outcomes) <= 130  # a worker may have its last one in its hands
    assert allowed(grammars.start(spec("regex", "a{139}b"))) == set(byte_ids("a"))


def test_those_that_nobody_waits_for_any_more_are_not_compiled(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or clients that come and go would keep everybody from having a grammar."""
    slow, begun, checked = threading.Event(), threading.Semaphore(0), list[str]()

    def check(checker: GrammarChecker, spec: GrammarSpec) -> int:
        checked.append(spec.text)
        begun.release()
        assert slow.wait(30)
        return 0

    monkeypatch.setattr(GrammarChecker, "check", check)
    both = [grammars.prepare(spec("regex", text)) for text in "ab"]
    assert all(begun.acquire(timeout=30) for _ in both)
    for i in range(20):
        grammars.prepare(spec("regex", f"a{{{i + 2}}}"))
    wanted = [grammars.prepare(spec("regex", text)) for text in ("c", "a{7}")]  # again, that one
    slow.set()
    for outcome in (*both, *wanted):
        outcome.result(30)
    assert sorted(checked) == ["a", "a{7}", "b", "c"]


def test_a_grammar_in_use_has_a_spare_lexer(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the workers compile, after what requests wait for; one for all who ask."""
    threads = set[str]()
    held = grammars.prepare(spec("regex", "a+")).result(30)
    once = held.kept_bytes
    make_spare = type(held).make_spare

    def watched(compiled: CompiledGrammar) -> None:
        threads.add(threading.current_thread().name)
        make_spare(compiled)

    monkeypatch.setattr(type(held), "make_spare", watched)
    assert allowed(grammars.start(spec("regex", "a+"))) == set(byte_ids("a"))
    grammars.prepare(spec("regex", "b")).result(30)
    assert not threads and held.kept_bytes == once, "one request needs none"
    for _ in range(5):
        grammars.start(spec("regex", "a+"))
        held._on_wear(held)
    for _ in range(1000):
        if held.kept_bytes > once:
            break
        time.sleep(0.01)
    assert threads == {"grammars"} and held.kept_bytes == 2 * once


def test_what_was_not_prepared_does_not_start(grammars: CompiledGrammars) -> None:
    """Its request ends; nobody waits until it is compiled."""
    with pytest.raises(GrammarError, match="not compiled before"):
        allowed(grammars.start(spec("regex", "a+")))


def test_all_together_have_a_limit(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody holds gives way; then the next one is refused, until there is room again."""
    size = max(grammars.prepare(spec("regex", f"[ab]{{{i}}}")).result(30).kept_bytes
               for i in range(2000, 2004))  # fmt: skip
    monkeypatch.setattr(compiled, "_MAX_BYTES", 6 * size)
    for i in range(2010, 2030):
        grammars.prepare(spec("regex", f"[ab]{{{i}}}")).result(30)
    held = [grammars.prepare(spec("regex", f"[ab]{{{i}}}")) for i in range(2030, 2050)]
    problems = [outcome.exception(30) for outcome in held]
    assert 3 <= problems.count(None) < 20  # the measure is a coarse one
    refused = [problem for problem in problems if problem is not None]
    assert all(isinstance(each, GrammarsFullError) for each in refused)
    assert "together already" in str(refused[0])
    held.clear()
    grammars.prepare(spec("regex", "[ab]{2050}")).result(30)


def test_a_slow_grammar_holds_up_no_other(grammars: CompiledGrammars) -> None:
    many = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(3, 20)]
    for warm in [grammars.prepare(spec("regex", f"a{{{i}}}")) for i in range(6)]:
        warm.result(30)  # by both workers
    slow = grammars.prepare(spec("json_schema", {"allOf": many}))
    grammars.prepare(spec("regex", "b")).result(30)
    assert not slow.done()
    with pytest.raises(GrammarError):
        slow.result(60)


def test_children_end_with_the_threads(tokenizer_file: Path) -> None:
    grammars = CompiledGrammars(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    grammars.prepare(spec("regex", "a")).result(30)
    grammars.close()
    for worker in grammars._workers:
        worker.join(10)
        assert not worker.is_alive()
