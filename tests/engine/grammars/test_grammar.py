"""Grammars alone: masks, walks, refusals, and what hostile ones may cost."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.tiny_tokenizers import (
    BYTE_VOCAB_SIZE,
    ENDOFTEXT_ID,
    IM_END_ID,
    byte_ids,
    byte_tokenizer,
    make_byte_tokenizer,
    make_spm_tokenizer,
    spm_ids,
    spm_tokenizer,
)

from millstream.engine.grammars import grammar
from millstream.engine.grammars.checker import CPU_LIMIT_S, KEPT_LIMIT_BYTES, GrammarChecker
from millstream.engine.grammars.errors import GrammarError, VocabularyError
from millstream.engine.grammars.grammar import (
    CompiledGrammar,
    GrammarState,
    MaskRow,
    ParallelFill,
    compile_grammar,
    load_vocabulary,
)
from millstream.engine.request import GrammarKind, GrammarSpec

VOCAB_SIZE = BYTE_VOCAB_SIZE + 60  # a model's rows: padded past its tokenizer, not to a whole word
EOS = (ENDOFTEXT_ID, IM_END_ID)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "日本"]}, "maxItems": 3},
        "kind": {"anyOf": [{"const": None}, {"type": "boolean"}]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "age", "tags", "kind", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes")) / "tokenizer.json"


@pytest.fixture(scope="module")
def vocabulary(tokenizer_file: Path) -> Any:
    return load_vocabulary(tokenizer_file, VOCAB_SIZE, EOS)


def spec(kind: str, value: object) -> GrammarSpec:
    text = value if isinstance(value, str) else json.dumps(value)
    return GrammarSpec(kind=GrammarKind[kind.upper()], text=text)


def allowed(state: GrammarState) -> set[int]:
    row = np.full(-(-VOCAB_SIZE // 32), -1, dtype=np.int32)  # what was there does not matter
    state.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accept_text(state: GrammarState, text: str) -> None:
    for token_id in byte_ids(text):
        assert token_id in allowed(state), text
        state.accept(token_id)


def start(vocabulary: Any, kind: str, value: object) -> GrammarState:
    return compile_grammar(vocabulary, spec(kind, value)).start()


# ---- what may come next


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("regex", "a|bc", {"a", "bc"}),
        ("regex", "", {""}),
        ("regex", "a{0,2}", {"", "a", "aa"}),
        ("regex", "[é日]", {"é", "日"}),
        ("choice", ["ab", "a", "abc"], {"a", "ab", "abc"}),
        ("choice", ["", "x"], {"", "x"}),
        ("choice", [".*", "\\", '"q"\n\t', "\x7f\u2028", "😀"], None),
        ("choice", ["twice", "twice"], {"twice"}),
        ("json_schema", {"enum": ["é", 1, None, {"a": [1]}]}, {'"é"', "1", "null", '{"a":[1]}'}),
        ("json_schema", {"items": {"const": 1}, "type": "array", "maxItems": 1}, {"[]", "[1]"}),
        ("grammar", 'start: "a" b\nb: "x" | "y"', {"ax", "ay"}),
        ("grammar", 'root ::= "a" b\nb ::= "x" | [yz]', {"ax", "ay", "az"}),
    ],
)  # fmt: skip
def test_just_these_texts(vocabulary: Any, kind: str, value: Any, texts: set[str] | None) -> None:
    compiled = compile_grammar(vocabulary, spec(kind, value))
    found: set[bytes] = set()
    byte_of = {token_id: byte for byte, token_id in enumerate(byte_ids(bytes(range(256))))}

    def walk(state_of: list[int]) -> None:
        state = compiled.start()
        for token_id in state_of:
            state.accept(token_id)
        assert not state.is_done
        for token_id in allowed(state):
            if token_id in EOS:
                found.add(bytes(byte_of[i] for i in state_of))
            else:
                walk([*state_of, token_id])

    walk([])
    assert found == {text.encode() for text in (texts if texts is not None else value)}


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_validate(vocabulary: Any, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_tokenizer()
    state = start(vocabulary, "json_schema", SCHEMA)
    token_ids: list[int] = []
    while not state.is_done:
        token_ids.append(rng.choice(sorted(allowed(state))))
        state.accept(token_ids[-1])
    assert token_ids[-1] in EOS
    text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or (
        "\\" in text  # an escape has several spellings
    )


def test_ids_past_the_tokenizer_and_special_ones_are_never_allowed(vocabulary: Any) -> None:
    state = start(vocabulary, "regex", r"(?s:.*)")
    assert allowed(state) <= {*byte_ids(bytes(range(256))), *EOS, BYTE_VOCAB_SIZE - 1}
    assert not allowed(state) & {257, *range(BYTE_VOCAB_SIZE, VOCAB_SIZE + 32)}


def test_end_ids_come_only_where_the_text_may_end(vocabulary: Any) -> None:
    state = start(vocabulary, "regex", "ab?")
    assert allowed(state) == set(byte_ids("a"))
    state.accept(byte_ids("a")[0])
    assert allowed(state) == {*byte_ids("b"), *EOS}
    state.accept(byte_ids("b")[0])
    assert allowed(state) == set(EOS)
    assert not state.is_done
    state.accept(EOS[1])
    assert state.is_done


@pytest.mark.parametrize(
    ("lark", "ends"),
    [
        (f'start: "a" <[{IM_END_ID}]>', {IM_END_ID}),
        ('start: "a" <|im_end|>', {IM_END_ID}),
        ('start: "a" (<|im_end|> "b")?', set(EOS)),
        (f'start: "a" <[{byte_ids("a")[0]},{EOS[0]}-{EOS[1]}]> "b"', set()),
        (f'start: "a" <[^{EOS[0]}]> "b"', set()),
    ],
)
def test_an_end_id_that_a_grammar_names_ends_the_text(
    vocabulary: Any, lark: str, ends: set[int]
) -> None:
    """So it may come only where nothing more must."""
    state = start(vocabulary, "grammar", lark)
    accept_text(state, "a")
    assert allowed(state) & set(EOS) == ends


def test_a_grammar_that_needs_an_end_id_in_its_midst_cannot_be_followed(vocabulary: Any) -> None:
    message = f"needs the end-of-sequence id {IM_END_ID} in the midst"
    state = start(vocabulary, "grammar", 'start: "ab" <|im_end|> "c"')
    accept_text(state, "ab")
    with pytest.raises(GrammarError, match=message):
        allowed(state)
    with pytest.raises(GrammarError, match=message):  # one that the first token shows
        start(vocabulary, "grammar", 'start: <|im_end|> "c"')


@pytest.mark.parametrize(
    "lark",
    [
        'start: "x" part\npart[temperature=0.5]: /[ab]+/',
        'start: part\npart[stop="]", temperature = 1]: /[ab]+/',
    ],
)
def test_a_temperature_of_a_part_is_refused(vocabulary: Any, lark: str) -> None:
    with pytest.raises(GrammarError, match="temperature="):
        compile_grammar(vocabulary, spec("grammar", lark))


@pytest.mark.parametrize(
    ("lark", "text"),
    [
        (r'start: "a\"[temperature=1]"', 'a"[temperature=1]'),
        (r"start: /\/temperature=[0-9]/", "/temperature=1"),
        ('start: "a" // [temperature=1]\n# [temperature=1]', "a"),
        ('start: temperature\ntemperature: "a"', "a"),
        ('start: %json {"const": "temperature="}', '"temperature="'),
    ],
)
def test_a_temperature_that_is_text_is_no_attribute(vocabulary: Any, lark: str, text: str) -> None:
    accept_text(start(vocabulary, "grammar", lark), text)


def test_walks_are_independent(vocabulary: Any) -> None:
    compiled = compile_grammar(vocabulary, spec("regex", "a+b"))
    first, second = compiled.start(), compiled.start()
    accept_text(first, "aab")
    assert allowed(second) == set(byte_ids("a"))
    assert allowed(first) == set(EOS)


# In a few walks, more states of a lexer than one may have.
MANY_STATES = r".{0,200}(error|warning).{0,200}"


def walk_of_many_states(state: GrammarState, seed: int) -> None:
    rng = random.Random(seed)
    words = rng.choices(["e", "r", "x", " ", "warning "], k=60)
    accept_text(state, "".join(words)[:200] + "error")


def test_walks_do_not_wear_each_others_lexer_out(vocabulary: Any) -> None:
    """The library's copies share one, and its limit. Some walks meet that in the middle."""
    asked: list[CompiledGrammar] = []
    compiled = compile_grammar(vocabulary, spec("regex", MANY_STATES), on_wear=asked.append)
    for seed in range(0, 80, 2):
        states = [compiled.start(), compiled.start()]
        for each in asked:
            each.make_spare()
        for state in states:
            walk_of_many_states(state, seed)
    assert len(asked) > 2, "no lexer was at its limit"


@pytest.mark.parametrize("spare", ["before", "after"])
def test_a_walk_that_is_too_complex_ends_alone(vocabulary: Any, spare: str) -> None:
    """If there is a spare lexer by the time that others go on."""
    compiled = compile_grammar(vocabulary, spec("regex", "(a{1,100}){1,100}|b{3}"))
    states = [compiled.start() for _ in range(3)]
    accept_text(states[0], "b")
    if spare == "before":
        compiled.make_spare()
    with pytest.raises(GrammarError, match="too many expressions"):
        accept_text(states[1], "a" * 10_000)
    if spare == "after":
        compiled.make_spare()
    accept_text(states[0], "bb")
    accept_text(states[2], "b")
    accept_text(compiled.start(), "bb")


def test_rows_filled_together_are_those_filled_alone(vocabulary: Any) -> None:
    compiled = [compile_grammar(vocabulary, spec("regex", f"[a-{end}]{{3}}")) for end in "bcdefg"]
    states, alone = ([each.start() for each in compiled] for _ in range(2))
    fill = ParallelFill(2)
    for step in range(3):
        fill.fill_ahead(states)
        for state, single in zip(states, alone, strict=True):
            assert allowed(state) == allowed(single)
            token_id = min(allowed(single))
            state.accept(token_id)
            single.accept(token_id)
            assert allowed(state) == allowed(single), f"what was filled ahead is old, step {step}"
    with pytest.raises(GrammarError):
        states[0].accept(byte_ids("z")[0])
    fill.fill_ahead(states)
    with pytest.raises(GrammarError):
        allowed(states[0])
    assert allowed(states[1]) == set(EOS)


@pytest.mark.parametrize("culprit", [True, False])
def test_rows_that_were_slow_together_are_filled_alone_once(
    vocabulary: Any, monkeypatch: pytest.MonkeyPatch, culprit: bool
) -> None:
    """Or nobody would know whose walk it is that takes so long; if it is nobody's alone, they are
    as slow as that from then on, and together."""
    alone: list[GrammarState] = []
    compute = GrammarState._compute
    slow_s = 2 * grammar._SLOW_TOGETHER_S
    wall_s = took_s = processor_s = 0.0

    def noted(state: GrammarState, row: MaskRow) -> None:
        nonlocal processor_s
        processor_s += grammar._ALLOWED_PER_TOKEN_S * (2.1 if culprit and not alone else 0.9)
        alone.append(state)
        compute(state, row)

    def later() -> float:
        nonlocal wall_s
        wall_s += took_s
        return wall_s

    states = [compile_grammar(vocabulary, spec("regex", "a*")).start() for _ in range(3)]
    clock = SimpleNamespace(perf_counter=later, thread_time=lambda: processor_s)
    monkeypatch.setattr(grammar, "time", clock)
    monkeypatch.setattr(GrammarState, "_compute", noted)
    fill, in_turn = ParallelFill(2), []
    for each_s in [slow_s] * 6 + [0.0] + [slow_s] * 2:
        took_s = each_s
        alone.clear()
        fill.fill_ahead(states)
        for state in states:
            accept_text(state, "a")
        in_turn.append(alone == states)
    assert in_turn[:6] == [False, True, False, culprit, False, culprit]
    assert in_turn[6:] == [False, False, True], "they were fast in between"


def test_a_walk_that_takes_too_long_ends(vocabulary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_ALLOWED_S", 0.0)
    monkeypatch.setattr(grammar, "_ALLOWED_PER_TOKEN_S", 1.0)
    state = start(vocabulary, "regex", "a*")  # compiling it is something else
    with pytest.raises(GrammarError, match="takes more than 0 s and 1000 ms a token"):
        allowed(state)
    state.accept(byte_ids("a")[0])
    accept_text(state, "aaa")


def test_a_token_that_is_not_allowed_is_an_error(vocabulary: Any) -> None:
    state = start(vocabulary, "regex", "ab")
    with pytest.raises(GrammarError, match="satisfy"):
        state.accept(byte_ids("b")[0])
    with pytest.raises(GrammarError):  # and not a mask of EOS ids, as if it were complete
        allowed(state)


def test_whitespace_only_where_the_schema_asks(vocabulary: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    state = start(vocabulary, "json_schema", schema)
    accept_text(state, "[1")
    assert not allowed(state) & set(byte_ids(" \n\t"))
    flexible = start(
        vocabulary, "json_schema", {**schema, "x-guidance": {"whitespace_flexible": True}}
    )
    accept_text(flexible, "[ 1 ,\n2]")


def test_json_object_is_any_object(vocabulary: Any) -> None:
    accept_text(start(vocabulary, "json_object", ""), '{"a":[1,{"b":null}],"é":"\\n"}')
    assert allowed(start(vocabulary, "json_object", "")) == set(byte_ids("{"))


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer()
    file = make_spm_tokenizer(tmp_path) / "tokenizer.json"
    vocabulary = load_vocabulary(file, tokenizer.get_vocab_size(), (2,))
    state = compile_grammar(vocabulary, spec("choice", [" Hello 世ß", "ab"])).start()
    row = np.zeros(-(-tokenizer.get_vocab_size() // 32), dtype=np.int32)
    pieces = [tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁", "世")]
    for token_id in [*pieces, *spm_ids("ß"), 2]:
        state.fill(row)
        assert row[token_id // 32] >> (token_id % 32) & 1
        state.accept(token_id)
    assert state.is_done


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", "{bad", "line 1"),
        ("json_schema", "[]", "object"),
        ("json_schema", {"type": "strng"}, "strng"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"if": {}, "then": {}}, "if"),
        ("json_schema", {"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ("json_schema", {"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ("json_schema", {"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ("json_schema", {"type": "array", "contains": {"const": 1}}, "contains"),
        ("json_schema", {"type": "string", "format": "nope"}, "nope"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ("json_schema", {"enum": []}, "Unsatisfiable"),
        ("json_schema", {"$ref": "#/$defs/a"}, "does not exist"),
        ("json_schema", {"$ref": "http://example.com/x.json"}, "not"),
        ("json_schema", {"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        # Recursion without an end, and without a step.
        ("json_schema", {"$ref": "#"}, "no text"),
        ("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "required": ["n"],
            "properties": {"n": {"$ref": "#/$defs/n"}}}}}, "Too many items"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(" * 5000 + ")" * 5000, "nest"),
        ("grammar", "", "root"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "start: start", "no text"),
        ("grammar", 'start: "a" %json {"uniqueItems": true}', "uniqueItems"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "recursion"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(vocabulary: Any, kind: str, value: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)) as caught:
        compile_grammar(vocabulary, spec(kind, value))
    assert len(str(caught.value)) <= 400 and "\n" not in str(caught.value)


def test_recursion_with_an_end_is_fine(vocabulary: Any) -> None:
    schema = {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": 1}]}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
    }
    state = start(vocabulary, "json_schema", schema)
    accept_text(state, '{"n":' * 20 + "1" + "}" * 20)
    assert allowed(state) == set(EOS)


@pytest.mark.parametrize("size", [9000])
def test_large_ones(vocabulary: Any, size: int) -> None:
    values = [f"value number {i}" for i in range(size)]
    accept_text(start(vocabulary, "choice", values), values[-1])
    accept_text(start(vocabulary, "json_schema", {"enum": values}), f'"{values[-1]}"')


def test_a_tokenizer_file_that_is_none(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(VocabularyError, match=r"tokenizer.json"):
        load_vocabulary(tmp_path / "tokenizer.json", VOCAB_SIZE, EOS)
    with pytest.raises(VocabularyError, match="too small"):
        load_vocabulary(tokenizer_file, 100, (1,))


# ---- what hostile ones may cost


@pytest.fixture
def checker(tokenizer_file: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer_file, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    yield checker
    checker.close()


def _deep_schema(depth: int) -> dict[str, Any]:
    levels: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**levels, f"a{depth}": {"type": "string"}}}


def test_what_kills_the_library_kills_the_checker_alone(checker: GrammarChecker) -> None:
    many = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(3, 20)]
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(8000))
    for kind, value, message in (
        ("grammar", f'start: r0\n{rules}\nr8000: "b"', "nested too deeply"),
        ("json_schema", _deep_schema(5000), "nested too deeply"),
        ("json_schema", {"allOf": many}, "MiB|longer than"),
        ("json_schema", {"type": "integer", "multipleOf": 199999}, "more than 16 MiB|longer than"),
    ):
        with pytest.raises(GrammarError, match=message):
            checker.check(spec(kind, value))
        checker.check(spec("regex", "a+"))  # a new child
    with pytest.raises(GrammarError, match="unclosed"):
        checker.check(spec("regex", "(a"))


def test_a_check_tells_the_size(checker: GrammarChecker) -> None:
    checker.check(spec("regex", "x"))  # what the first one of a process takes besides
    small, large = (
        checker.check(spec("choice", json.dumps([f"{i:09}" for i in range(count)])))
        for count in (9, 9000)
    )
    assert 0 < small < large / 10 < KEPT_LIMIT_BYTES / 10


def test_a_check_has_limited_processor_time(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    """SIGXCPU, as the kernel sends it, whatever the machine's speed."""
    checker.check(spec("regex", "a+"))
    assert checker._process is not None
    checker._process.send_signal(signal.SIGXCPU)
    with pytest.raises(GrammarError, match=f"longer than {CPU_LIMIT_S} s"):
        checker.check(spec("regex", "b+"))
    checker.check(spec("regex", "b+"))
