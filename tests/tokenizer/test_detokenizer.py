"""The detokenizer alone: characters, stop strings, chunking, against naive oracles."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.tiny_tokenizers import (
    ADDED_ID,
    IM_END_ID,
    byte_ids,
    byte_tokenizer,
    spm_ids,
    spm_tokenizer,
)

from millstream.tokenizer.detokenizer import (
    Detokenizer,
    PieceDecoder,
    Pieces,
    TextDecoder,
    UnknownTokenId,
    WindowDecoder,
)
from millstream.tokenizer.pieces import build_pieces, without
from millstream.tokenizer.stop_matcher import StopMatch

BYTE = byte_tokenizer()
BYTE_PIECES = build_pieces(BYTE, id_limit=264)
assert BYTE_PIECES is not None
SPM = spm_tokenizer()
SPM_PIECES = build_pieces(SPM, id_limit=SPM.get_vocab_size())
assert SPM_PIECES is not None

STRINGS = (
    "🙂",
    "é",
    "👨‍👩‍👧",
    "a🙂b",
    "世界",
    "a\ufffdb",
    "ÿ\u0000\u07ff\u0800\uffff\U00010000\U0010ffff",
    "",
)


def byte_decoder() -> TextDecoder:
    return PieceDecoder(BYTE_PIECES)


def byte_window() -> TextDecoder:
    return WindowDecoder(
        lambda ids: BYTE.decode(list(ids), skip_special_tokens=False), id_limit=264
    )


def spm_decoder() -> TextDecoder:
    return PieceDecoder(SPM_PIECES)


def spm_window() -> TextDecoder:
    return WindowDecoder(
        lambda ids: SPM.decode(list(ids), skip_special_tokens=False),
        id_limit=SPM.get_vocab_size(),
    )


def run(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[list[str], StopMatch | None]:
    """The delta of each token, and of the flush at the end."""
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.append(token_id))
        if detokenizer.stopped:
            return deltas, detokenizer.stopped
    deltas.append(detokenizer.flush())
    return deltas, detokenizer.stopped


def text_of(token_ids: Sequence[int], **options: object) -> str:
    return "".join(run(Detokenizer(byte_decoder(), **options), token_ids)[0])  # type: ignore[arg-type]


# ---- characters


@pytest.mark.parametrize("decoder", [byte_decoder, byte_window])
def test_row_28_deltas_of_multi_byte_text_on_bytes(decoder: Callable[[], TextDecoder]) -> None:
    assert run(Detokenizer(decoder()), byte_ids("🙂"))[0] == ["", "", "", "🙂", ""]
    assert run(Detokenizer(decoder()), byte_ids("a🙂b"))[0] == ["a", "", "", "", "🙂", "b", ""]
    family = [d for d in run(Detokenizer(decoder()), byte_ids("👨‍👩‍👧"))[0] if d]
    assert family == ["👨", "\u200d", "👩", "\u200d", "👧"]


@pytest.mark.parametrize("decoder", [spm_decoder, spm_window])
def test_row_28_deltas_of_multi_byte_text_on_spm(decoder: Callable[[], TextDecoder]) -> None:
    hello = SPM.token_to_id("▁Hello")
    deltas, _ = run(Detokenizer(decoder()), [hello, *spm_ids("🙂"), hello])
    assert deltas == ["Hello", "", "", "", "🙂", " Hello", ""]
    family = [d for d in run(Detokenizer(decoder()), spm_ids("👨‍👩‍👧"))[0] if d]
    assert family == ["👨", "\u200d", "👩", "\u200d", "👧"]


def test_row_28_a_genuine_replacement_character_passes_at_once() -> None:
    assert run(Detokenizer(byte_decoder()), byte_ids("a\ufffdb"))[0] == [
        "a", "", "", "\ufffd", "b", "",
    ]  # fmt: skip


@pytest.mark.parametrize("text", STRINGS)
def test_row_28_every_split_of_every_character(text: str) -> None:
    data = text.encode()
    for chunks in compositions(data[:12]):
        pieces: list[str | bytes] = [as_piece(chunk) for chunk in chunks]
        whole = b"".join(chunks)
        for count in range(len(chunks) + 1):  # every prefix, too
            expected = b"".join(chunks[:count]).decode("utf-8", "replace")
            deltas, _ = run(Detokenizer(PieceDecoder(Pieces(by_id=pieces))), list(range(count)))
            assert "".join(deltas) == expected
            shown = "".join(deltas[:-1])
            assert whole.decode("utf-8", "ignore").startswith(shown)  # no broken character


def test_row_28_every_split_of_every_kind_of_character() -> None:
    """Each lead byte with the least and the greatest bytes that may follow, between neighbours."""
    characters = (chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    edges: list[str] = []
    for _, same_lead in itertools.groupby(characters, key=lambda text: text.encode()[0]):
        first, *rest = same_lead
        edges += (first, *rest[-1:])
    for text in edges:
        for chunks in compositions(text.encode()):
            pieces: list[str | bytes] = ["a", *map(as_piece, chunks), "b"]
            deltas, _ = run(
                Detokenizer(PieceDecoder(Pieces(by_id=pieces))), list(range(len(pieces)))
            )
            assert deltas == ["a", *[""] * (len(chunks) - 1), text, "b", ""]


def compositions(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut `data` into non-empty chunks."""
    for cuts in itertools.product((False, True), repeat=max(0, len(data) - 1)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(data)]
        yield [data[a:b] for a, b in itertools.pairwise(edges) if b > a]


def as_piece(chunk: bytes) -> str | bytes:
    try:
        return chunk.decode()
    except UnicodeDecodeError:
        return chunk


def test_row_9_an_unfinished_character_comes_with_the_flush() -> None:
    cut = byte_ids("ok" + "🙂")[:4]
    assert run(Detokenizer(byte_decoder()), cut)[0] == ["o", "k", "", "", "\ufffd"]
    cut = [*spm_ids("ok"), *spm_ids("🙂")[:2]]
    assert run(Detokenizer(spm_decoder()), cut)[0] == ["o", "k", "", "", "\ufffd\ufffd"]


def test_row_9_a_held_stop_prefix_comes_with_the_flush() -> None:
    deltas, stopped = run(Detokenizer(byte_decoder(), stops=["<end>"]), byte_ids("a<en"))
    assert (deltas, stopped) == (["a", "", "", "", "<en"], None)


def test_row_28_random_bytes_equal_the_library_at_every_prefix() -> None:
    rng = random.Random(28)
    for _ in range(400):
        token_ids = random_byte_ids(rng, rng.randrange(14))
        for decoder in (byte_decoder, byte_window):
            if decoder is byte_window and "\ufffd" in BYTE.decode(token_ids):
                continue  # the window holds broken text back, by another rule
            for count in range(len(token_ids) + 1):
                expected = BYTE.decode(token_ids[:count], skip_special_tokens=False)
                assert "".join(run(Detokenizer(decoder()), token_ids[:count])[0]) == expected


def random_byte_ids(rng: random.Random, count: int) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < count:
        token_ids += rng.choice(
            [[rng.randrange(260)], byte_ids(rng.choice(["é", "🙂", "世", "ab", " "]))]
        )
    return token_ids[:count]


def test_row_28_random_spm_ids_equal_the_library() -> None:
    rng = random.Random(29)
    others = [i for i in range(SPM.get_vocab_size()) if not 3 <= i < 259]
    for _ in range(2000):
        token_ids: list[int] = []
        for _ in range(rng.randrange(8)):
            token_ids += rng.choice([[rng.choice(others)], spm_ids(rng.choice("aé🙂世 "))])
        expected = SPM.decode(token_ids, skip_special_tokens=False)
        for decoder in (spm_decoder, spm_window):
            assert "".join(run(Detokenizer(decoder()), token_ids)[0]) == expected


def test_broken_spm_bytes_do_not_take_back_what_was_shown() -> None:
    # The library shows five U+FFFD for this run; the first character has been shown by then.
    deltas, _ = run(Detokenizer(spm_decoder()), spm_ids("🙂".encode() + b"\xff"))
    assert deltas == ["", "", "", "🙂", "\ufffd", ""]


# ---- context


@pytest.mark.parametrize("decoder", [spm_decoder, spm_window])
def test_row_29_the_space_after_the_context_survives(decoder: Callable[[], TextDecoder]) -> None:
    bos, hello, world, dot = (SPM.token_to_id(t) for t in ("<s>", "▁Hello", "▁world", "."))
    deltas, _ = run(Detokenizer(decoder(), context=[bos, hello]), [world, dot])
    assert deltas == [" world", ".", ""]
    # What is streamed after the context and the whole list decoded at once agree.
    assert SPM.decode([bos, hello, world, dot]) == SPM.decode([bos, hello]) + " world."
    deltas, _ = run(Detokenizer(decoder()), [world, dot])
    assert deltas == ["world", ".", ""]


@pytest.mark.parametrize("tail", [b"", b"\xf0\x9f", b"\xc3", b"a\xf0\x9f\x99"])
@pytest.mark.parametrize(
    "output", [b"", b"a", b"\x99", b"\x99\x82", b"\xa9", b"\x82x", b"\xff", "�".encode()]
)
def test_deltas_are_what_the_output_adds_to_the_context(tail: bytes, output: bytes) -> None:
    context, token_ids = byte_ids(b"x" + tail), byte_ids(output)
    before, whole = BYTE.decode(context), BYTE.decode(context + token_ids)
    if not whole.startswith(before):  # the output completed the context's last character
        before = before.removesuffix("\ufffd")
    deltas, _ = run(Detokenizer(byte_decoder(), context=context), token_ids)
    assert "".join(deltas) == whole.removeprefix(before)


def test_a_bad_id_in_the_context_is_refused() -> None:
    with pytest.raises(UnknownTokenId):
        Detokenizer(byte_decoder(), context=[264])


# ---- special tokens and bad ids


@pytest.mark.parametrize(
    ("skip", "include_stop", "expected"),
    [
        (True, False, "a<tool>"),
        (True, True, "a<tool>"),
        (False, False, "a<tool>"),
        (False, True, "a<tool><|im_end|>"),
    ],
)
def test_row_74_special_tokens_and_stop_text(skip: bool, include_stop: bool, expected: str) -> None:
    assert BYTE_PIECES is not None
    pieces = without(BYTE_PIECES, frozenset({256, 257, 258})) if skip else BYTE_PIECES
    detokenizer = Detokenizer(PieceDecoder(pieces), stops=["<|im_end|>"], include_stop=include_stop)
    deltas, stopped = run(detokenizer, [*byte_ids("a"), ADDED_ID, IM_END_ID])
    assert "".join(deltas) == expected
    assert (stopped is None) is skip


@pytest.mark.parametrize("decoder", [byte_decoder, byte_window])
@pytest.mark.parametrize("bad", [-1, 264, 2**32 - 1])
def test_row_69_an_id_outside_the_vocabulary(decoder: Callable[[], TextDecoder], bad: int) -> None:
    detokenizer = Detokenizer(decoder())
    detokenizer.append(0)
    with pytest.raises(UnknownTokenId, match=str(bad)):
        detokenizer.append(bad)


def test_ids_of_the_embeddings_padding_show_nothing() -> None:
    assert text_of([*byte_ids("a"), 260, 263, *byte_ids("b")]) == "ab"


# ---- stop strings


def test_row_11_no_part_of_a_stop_string_is_shown() -> None:
    deltas, stopped = run(Detokenizer(byte_decoder(), stops=["DEFG"]), byte_ids("ABCDEFGH"))
    assert deltas == ["A", "B", "C", "", "", "", ""]
    assert stopped == StopMatch(stop="DEFG", token_count=7)
    deltas, stopped = run(Detokenizer(byte_decoder(), stops=["DEFG"]), byte_ids("ABCDEFX"))
    assert deltas == ["A", "B", "C", "", "", "", "DEFX", ""]
    assert stopped is None
    assert text_of(byte_ids("ABCDEFGH"), stops=["DEFG"], include_stop=True) == "ABCDEFG"


def words(*pieces: str) -> tuple[TextDecoder, list[int]]:
    """A decoder with a token for each piece, and the ids."""
    return PieceDecoder(Pieces(by_id=pieces)), list(range(len(pieces)))


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "stop", "count"),
    [
        (["Par", "is."], ["ari"], "P", "ari", 2),
        (list("aab"), ["ab"], "a", "ab", 3),
        (list("xab"), ["b", "ab"], "x", "ab", 3),
        (["xab"], ["b", "ab"], "x", "ab", 1),
        (["abcd"], ["cd", "abc"], "", "abc", 1),
        # A match waits for an earlier start; the token that completed it counts.
        (["abc", "x"], ["abcd", "bc"], "a", "bc", 1),
        (["abc", "d"], ["abcd", "bc"], "", "abcd", 2),
        (["abc"], ["abcd", "bc"], "a", "bc", 1),
        # One start: the shorter.
        (["abc"], ["abc", "ab"], "", "ab", 1),
        (["a", "", "b"], ["ab"], "", "ab", 3),
        (["ab", "", ""], ["ab"], "", "ab", 1),
    ],
)
def test_row_12_matching_is_on_text(
    pieces: list[str], stops: list[str], expected: str, stop: str, count: int
) -> None:
    for order in (stops, stops[::-1]):
        decoder, token_ids = words(*pieces)
        deltas, stopped = run(Detokenizer(decoder, stops=order), token_ids)
        assert "".join(deltas) == expected
        assert stopped == StopMatch(stop=stop, token_count=count)


def test_row_14_an_empty_stop_string_is_refused() -> None:
    for stops in ([""], ["x", ""]):
        with pytest.raises(ValueError, match="empty"):
            Detokenizer(byte_decoder(), stops=stops)
    assert text_of(byte_ids("abc"), stops=[]) == "abc"


@pytest.mark.parametrize(
    ("min_tokens", "expected", "count"), [(0, "a", 2), (2, "a", 2), (3, "ab", 3), (4, "abbb", None)]
)
def test_min_tokens_counts_the_token_that_completes_the_match(
    min_tokens: int, expected: str, count: int | None
) -> None:
    deltas, stopped = run(
        Detokenizer(byte_decoder(), stops=["b"], min_tokens=min_tokens), byte_ids("abb")
    )
    if count is None:
        assert ("".join(deltas), stopped) == ("abb", None)
    else:
        assert ("".join(deltas), stopped) == (expected, StopMatch(stop="b", token_count=count))


def naive(
    token_texts: list[str], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, StopMatch | None]:
    """By definition: of all matches in the whole text that count, the first start, the shortest."""
    text = "".join(token_texts)
    ends = list(itertools.accumulate(map(len, token_texts)))
    matches = []
    for stop in stops:
        for start in range(len(text)):
            if text.startswith(stop, start):
                count = next(n for n, end in enumerate(ends, 1) if end >= start + len(stop))
                if count >= min_tokens:
                    matches.append((start, len(stop), stop, count))
    if not matches:
        return text, None
    start, length, stop, count = min(matches)
    shown = text[: start + length] if include_stop else text[:start]
    return shown, StopMatch(stop=stop, token_count=count)


@pytest.mark.parametrize("seed", range(6))
def test_row_12_random_stops_and_chunkings_equal_the_naive_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1500):
        letters = rng.choice(["ab", "abc", "aé🙂"])
        stops = [
            "".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))
        ]
        token_texts = [
            "".join(rng.choices(letters, k=rng.choice([0, 1, 1, 2, 5]))) for _ in range(9)
        ]
        include_stop, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 1, 3, 6])
        expected, match = naive(token_texts, stops, include_stop, min_tokens)
        decoder, token_ids = words(*token_texts)
        detokenizer = Detokenizer(
            decoder, stops=stops, include_stop=include_stop, min_tokens=min_tokens
        )
        shown, settled = "", 0
        while token_ids and not detokenizer.stopped:
            take = rng.randint(1, 4)
            shown += detokenizer.extend(token_ids[:take])
            token_ids = token_ids[take:]
            assert expected.startswith(shown)  # nothing is ever shown that must be taken back
            assert settled <= detokenizer.settled_count <= (match.token_count if match else 9)
            settled = detokenizer.settled_count
        if not detokenizer.stopped:
            shown += detokenizer.flush()
        assert (shown, detokenizer.stopped) == (expected, match)


@pytest.mark.parametrize(
    "many",
    [
        ["ab" + chr(0x4E00 + i) for i in range(1365)],
        ["a" * 1500 + "b", *("a" + chr(0x4E00 + i) for i in range(1290))],
        ["a" * 2000 + "b", "a" * 1000 + "c", "b" * 1000],
    ],
    ids=["many", "many and a long one", "long"],
)
def test_a_tokens_cost_does_not_grow_with_the_stop_strings(many: list[str]) -> None:
    """4096 characters of them made a token 300 times as dear: 0.7 s for a message of 8 KB, in which
    nobody else had an answer."""
    decoder, token_ids = words(*["ab", "a", "a", "aa"] * 1000)

    def seconds(stops: list[str]) -> float:
        detokenizer = Detokenizer(decoder, stops=stops)
        started = time.perf_counter()
        detokenizer.extend(token_ids)
        return time.perf_counter() - started

    few_s, many_s = (min(seconds(stops) for _ in range(3)) for stops in (["abx", "xab"], many))
    assert many_s < 20 * few_s


def test_only_proper_prefixes_of_stop_strings_are_held() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2)]
        decoder, token_ids = words(*rng.choices("ab", k=8))
        detokenizer = Detokenizer(decoder, stops=stops)
        text = shown = ""
        for token_id in token_ids:
            piece = detokenizer.append(token_id)
            if detokenizer.stopped:
                break
            text, shown = text + str(decoder._by_id[token_id]), shown + piece  # type: ignore[attr-defined]
            held = text.removeprefix(shown)
            assert not held or any(s.startswith(held) and s != held for s in stops)


def test_only_a_match_that_waits_leaves_tokens_unsettled() -> None:
    decoder, token_ids = words("x", "a", "b", "c", "d")
    detokenizer = Detokenizer(decoder, stops=["bc", "abcde"])
    counts = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        counts.append(detokenizer.settled_count)
    assert counts == [1, 2, 3, 4, 4]  # "bc" ends with the fourth, "abcde" may yet end later
    detokenizer.flush()
    assert detokenizer.stopped == StopMatch(stop="bc", token_count=4)
    assert detokenizer.settled_count == 4


def test_work_is_linear_in_the_tokens() -> None:
    garbage = byte_ids(b"\xff\xf0") * 50_000
    started = time.perf_counter()
    assert len(text_of(garbage, stops=["\n\nUser:"])) == 100_000
    long_stop = "a" * 3000 + "b"
    text_of(byte_ids("a" * 3000 + "c") * 3, stops=[long_stop])
    assert time.perf_counter() - started < 10
