"""Admission: what waits is bounded by its ids, too, not by the number of requests alone."""

from __future__ import annotations

import pytest
from tests.engine_processes import submission
from tests.toy_runner import toy_info

from millstream.engine.frontend.admission import MAX_LIVE_IDS, Admission
from millstream.engine.frontend.streams import Stream
from millstream.engine.request import GrammarKind, GrammarSpec, Request, Sampling
from millstream.rpc.errors import QueueFull
from millstream.v1 import engine_pb2


@pytest.fixture
def admission() -> Admission:
    info = toy_info(max_model_len=2000, num_blocks=1000)
    return Admission(info, 100, engine_pb2.SamplingParams())


def stream(num_live: int) -> Stream:
    """Of a client that has so many requests in the engine."""
    made = Stream(1)
    made.client.num_live = num_live
    return made


def test_row_32_what_waits_holds_so_many_ids_at_most(admission: Admission) -> None:
    """2,560 prompts of 8,000 ids took 955 MB of the core: a full default queue would take 6 GB."""
    ask = submission(1, [1] * 1000, n=4)
    room = MAX_LIVE_IDS - 4000
    (first, *_) = admission.admit(stream(1), ask, num_live=1, num_ids=room)
    assert first.num_ids == 1000
    with pytest.raises(QueueFull, match="token ids") as refusal:
        admission.admit(stream(1), ask, num_live=1, num_ids=room + 1)
    assert refusal.value.retry_after_s is not None


def test_who_has_nothing_there_gets_in_beyond(admission: Admission) -> None:
    ask = submission(1, [1] * 1000)
    reserve = MAX_LIVE_IDS // 8
    assert admission.admit(stream(0), ask, 1, MAX_LIVE_IDS + reserve - 1000)
    with pytest.raises(QueueFull):
        admission.admit(stream(0), ask, 1, MAX_LIVE_IDS + reserve - 999)


def test_what_is_alone_is_never_too_large(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.engine.frontend.admission.MAX_LIVE_IDS", 800)
    assert admission.admit(stream(0), submission(1, [1] * 1000), 0, 0)
    with pytest.raises(QueueFull):
        admission.admit(stream(0), submission(1, [1] * 1000), 1, 1)


def test_everything_that_a_request_holds_counts() -> None:
    plain = Sampling(max_tokens=1)
    request = Request(key=1, token_ids=[1, 2, 3], sampling=plain)
    assert request.num_ids == 3
    full = Sampling(
        max_tokens=1,
        stop_token_ids=(1,),
        logit_bias=((1, 0.5), (2, 0.5)),
        allowed_token_ids=(1, 2, 3),
        bad_words=((1,), (2, 3)),
        grammar=GrammarSpec(kind=GrammarKind.REGEX, text="a" * 800),
    )
    assert Request(key=1, token_ids=[1], sampling=full).num_ids == 1 + 1 + 2 * 3 + 3 + 3 + 100
