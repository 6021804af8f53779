"""One Detokenize stream's sequences, without a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from tests.tiny_tokenizers import IM_END_ID, byte_ids, make_byte_tokenizer

from millstream.rpc.errors import InvalidArgument, from_status
from millstream.tokenizer.codec import Codec
from millstream.tokenizer.session import MAX_FAILED, DetokenizeSession
from millstream.v1.engine_pb2 import StepOutput
from millstream.v1.tokenizer_pb2 import (
    DetokenizeOpen,
    DetokenizeRequest,
    DetokenizeResponse,
    DetokenizeStopped,
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.load(make_byte_tokenizer(tmp_path_factory.mktemp("byte")))


@pytest.fixture
def session(codec: Codec) -> DetokenizeSession:
    return DetokenizeSession(codec)


def opening(*handles: int, **fields: object) -> DetokenizeRequest:
    return DetokenizeRequest(open=[DetokenizeOpen(handle=h, **fields) for h in handles])  # type: ignore[arg-type]


def tokens(
    entries: Iterable[tuple[int, list[int]]], close: Iterable[int] = ()
) -> DetokenizeRequest:
    step = StepOutput()
    for handle, token_ids in entries:
        step.handles.append(handle)
        step.token_ids.extend(token_ids)
        step.counts.append(len(token_ids))
    return DetokenizeRequest(tokens=step, close=close)


def texts(response: DetokenizeResponse) -> list[tuple[int, str]]:
    return list(zip(response.handles, response.texts, strict=True))


def failures(response: DetokenizeResponse) -> list[tuple[int, str]]:
    return [(failed.handle, from_status(failed.status).reason) for failed in response.failed]


def test_one_token_each_without_counts(session: DetokenizeSession) -> None:
    assert session.answer(opening(7, 8)) == DetokenizeResponse()
    step = StepOutput(handles=[8, 7], token_ids=byte_ids("xy"))
    response = session.answer(DetokenizeRequest(tokens=step))
    assert texts(response) == [(8, "x"), (7, "y")]
    assert session.open_count == 2


def test_open_feed_and_close_in_one_message(session: DetokenizeSession) -> None:
    request = opening(1, 2)
    request.MergeFrom(
        tokens([(1, byte_ids("ok🙂")[:4]), (2, []), (1, byte_ids("x"))], close=[1, 2])
    )
    assert texts(session.answer(request)) == [(1, "ok"), (1, "\ufffdx")]
    assert session.open_count == 0


def test_a_stop_string_ends_a_sequence_once(session: DetokenizeSession) -> None:
    session.answer(opening(1, 2, stop=["b"]))
    # The rest of its tokens and its close are in the same message, and are no error.
    response = session.answer(
        tokens([(1, byte_ids("abcb")), (2, byte_ids("a")), (1, byte_ids("x"))], [1])
    )
    assert texts(response) == [(1, "a"), (2, "a")]
    assert list(response.stopped) == [DetokenizeStopped(handle=1, stop="b", token_count=2)]
    assert not response.failed
    assert failures(session.answer(tokens([(1, byte_ids("x"))], [1]))) == [(1, "UNKNOWN_HANDLE")]


def test_a_match_that_waited_is_found_at_the_close(session: DetokenizeSession) -> None:
    session.answer(opening(1, stop=["abcd", "bc"]))
    assert session.answer(tokens([(1, byte_ids("abc"))])) == DetokenizeResponse()
    response = session.answer(DetokenizeRequest(close=[1]))
    assert texts(response) == [(1, "a")]
    assert list(response.stopped) == [DetokenizeStopped(handle=1, stop="bc", token_count=3)]


def test_row_69_a_bad_id_ends_its_sequence_alone(session: DetokenizeSession) -> None:
    session.answer(opening(1, 2))
    response = session.answer(
        tokens([(1, [2**32 - 1]), (2, byte_ids("a")), (1, byte_ids("b"))], close=[1])
    )
    assert failures(response) == [(1, "INVALID_ARGUMENT")]
    assert "4294967295" in response.failed[0].status.message
    assert texts(response) == [(2, "a")]
    assert texts(session.answer(tokens([(2, byte_ids("b"))]))) == [(2, "b")]


def test_row_71_an_error_while_decoding_is_never_silent(
    session: DetokenizeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.answer(opening(1, 2))
    session.answer(tokens([(1, byte_ids("ab"))]))
    monkeypatch.setattr(session._sequences[1], "_decoder", None)
    response = session.answer(tokens([(1, byte_ids("c")), (2, byte_ids("c"))]))
    assert failures(response) == [(1, "INTERNAL")]
    assert texts(response) == [(2, "c")]


def test_row_71_so_it_is_at_the_close(
    session: DetokenizeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.answer(opening(1, 2))
    session.answer(tokens([(2, byte_ids("é")[:1])]))
    monkeypatch.setattr(session._sequences[1], "_decoder", None)
    response = session.answer(DetokenizeRequest(close=[1, 2]))
    assert failures(response) == [(1, "INTERNAL")]
    assert texts(response) == [(2, "\ufffd")]
    assert session.open_count == 0


def test_refused_opens(session: DetokenizeSession) -> None:
    session.answer(opening(1))
    assert failures(session.answer(opening(1))) == [(1, "DUPLICATE_HANDLE")]
    assert texts(session.answer(tokens([(1, byte_ids("a"))]))) == [(1, "a")]  # it lives on
    for stop in ([""], ["x", ""], ["x"] * 100_000):  # row 14; and what would take for ever to find
        response = session.answer(opening(2, stop=stop))
        assert failures(response) == [(2, "INVALID_ARGUMENT")]
        assert from_status(response.failed[0].status).field == "open.stop"
    response = session.answer(opening(3, context_token_ids=[999]))
    assert from_status(response.failed[0].status).field == "open.context_token_ids"
    session.draining = True
    assert failures(session.answer(opening(4))) == [(4, "UNAVAILABLE")]
    assert session.open_count == 1


def test_an_unknown_handle(session: DetokenizeSession) -> None:
    assert failures(session.answer(tokens([(9, byte_ids("ab")), (9, byte_ids("c"))], [9, 5]))) == [
        (9, "UNKNOWN_HANDLE"),
        (5, "UNKNOWN_HANDLE"),
    ]


@pytest.mark.parametrize(
    ("limit", "most", "stop"), [("MAX_OPEN", 3, []), ("MAX_OPEN_STOP_CHARS", 12, ["ab", "cd"])]
)
def test_what_is_open_is_bounded(
    session: DetokenizeSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: str,
    most: int,
    stop: list[str],
) -> None:
    """One message of 60 MB opened as many sequences as memory has room for, and died of it."""
    monkeypatch.setattr(f"millstream.tokenizer.session.{limit}", most)
    assert not session.answer(opening(1, 2, 3, stop=stop)).failed
    assert failures(session.answer(opening(4, stop=stop))) == [(4, "QUEUE_FULL")]
    session.answer(tokens([(1, [9999])]))  # fails
    session.answer(DetokenizeRequest(close=[2]))
    session.answer(tokens([(3, byte_ids("xab"))]))  # stops, if it has stop strings
    session.answer(DetokenizeRequest(close=[3] * (not stop)))
    assert not session.answer(opening(4, 5, 6, stop=stop)).failed
    assert failures(session.answer(opening(7, stop=stop))) == [(7, "QUEUE_FULL")]
    assert not caplog.records, "nothing is wrong here"


@pytest.mark.parametrize(
    "request_of",
    [
        lambda handles: DetokenizeRequest(close=handles),
        lambda handles: tokens([(handle, [1]) for handle in handles]),
        lambda handles: DetokenizeRequest(open=[DetokenizeOpen(handle=5)] * len(handles)),
    ],
    ids=["close", "tokens", "open"],
)
def test_failures_are_not_told_without_end(
    session: DetokenizeSession, request_of: Callable[[Sequence[int]], DetokenizeRequest]
) -> None:
    """A million handles of 3 bytes, none of them open, became an answer of 212 MB."""
    session.answer(DetokenizeRequest(open=[DetokenizeOpen(handle=5)]))
    few, many = range(10, 10 + MAX_FAILED), range(10, 11 + MAX_FAILED)
    assert len(session.answer(request_of(few)).failed) == MAX_FAILED
    with pytest.raises(InvalidArgument, match=f"more than {MAX_FAILED} sequences fail"):
        session.answer(request_of(many))


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (StepOutput(handles=[1], token_ids=[1, 2]), "tokens.token_ids"),
        (StepOutput(handles=[1, 1], token_ids=[1]), "tokens.token_ids"),
        (StepOutput(handles=[1], token_ids=[1, 2], counts=[3]), "tokens.counts"),
        (StepOutput(handles=[1], token_ids=[1, 2], counts=[1, 1]), "tokens.counts"),
    ],
)
def test_arrays_that_do_not_fit_together(
    session: DetokenizeSession, step: StepOutput, field: str
) -> None:
    session.answer(opening(1))
    with pytest.raises(InvalidArgument) as caught:
        session.answer(DetokenizeRequest(tokens=step))
    assert caught.value.field == field


def test_defaults_of_an_open(session: DetokenizeSession) -> None:
    session.answer(opening(1))
    session.answer(opening(2, skip_special_tokens=False))
    ids = [IM_END_ID, *byte_ids("a")]
    assert texts(session.answer(tokens([(1, ids), (2, ids)]))) == [(1, "a"), (2, "<|im_end|>a")]


def test_a_step_of_256_sequences_is_cheap(session: DetokenizeSession) -> None:
    session.answer(opening(*range(256), stop=["\n\nUser:", "<|end|>"]))
    step = StepOutput(handles=range(256), token_ids=(byte_ids("some text ") * 26)[:256])
    request = DetokenizeRequest(tokens=step)
    best = min(timed(session, request) for _ in range(50))
    assert best < 0.0015, f"{best * 1e6:.0f} us"


def timed(session: DetokenizeSession, request: DetokenizeRequest) -> float:
    started = time.perf_counter()
    session.answer(request).SerializeToString()
    return time.perf_counter() - started


def test_a_long_catch_up_is_linear(tmp_path: Path, session: DetokenizeSession) -> None:
    session.answer(opening(1, stop=["never"]))
    started = time.perf_counter()
    response = session.answer(tokens([(1, byte_ids("some text " * 20_000))]))
    assert response.texts[0] == "some text " * 20_000
    assert time.perf_counter() - started < 5
