"""What a benchmark makes of its measurements: pure functions."""

from __future__ import annotations

import random

import pytest

from millstream.client.bench.in_process import step_latencies
from millstream.client.bench.metrics import Goals, latencies, percentiles_ms, summary
from millstream.client.bench.traces import StreamTraces, Trace
from millstream.rpc.errors import Cancelled, EngineUnavailable, QueueFull, to_status
from millstream.v1 import engine_pb2

STOP = engine_pb2.FINISH_REASON_STOP


def message(**fields: object) -> engine_pb2.GenerateResponse:
    return engine_pb2.GenerateResponse(**fields)  # type: ignore[arg-type]


def accepted(handle: int, request_id: str) -> engine_pb2.Accepted:
    return engine_pb2.Accepted(handle=handle, request_id=request_id)


def finished(handle: int, prompt: int = 0, cached: int = 0) -> engine_pb2.Finished:
    usage = engine_pb2.Usage(prompt_tokens=prompt, cached_tokens=cached)
    return engine_pb2.Finished(handle=handle, reason=STOP, usage=usage)


def step(handles: list[int], counts: list[int] | None = None) -> engine_pb2.StepOutput:
    total = sum(counts or [1] * len(handles))
    return engine_pb2.StepOutput(handles=handles, token_ids=[5] * total, counts=counts or [])


Arrival = tuple[float, engine_pb2.GenerateResponse]  # when, and the message


def traces_of(streams: list[list[Arrival]], sent_s: dict[str, float]) -> dict[str, Trace]:
    traces = {request_id: Trace(sent_s=when) for request_id, when in sent_s.items()}
    for arrivals in streams:
        stream = StreamTraces(traces)
        for when, message in arrivals:
            stream.note(when, message)
    return traces


def test_traces_of_a_stream() -> None:
    arrivals = [
        (10.5, message(accepted=[accepted(1, "a"), accepted(2, "b")])),
        (11.0, message(output=step([1, 2]))),
        (11.5, message(output=step([1]), finished=[finished(1, prompt=7, cached=4)])),
        # The handle is free again, and "a" and "b" are not its next request.
        (11.6, message(accepted=[accepted(1, "not ours")], output=step([1]))),
        (12.5, message(output=step([1, 2], [2, 3]), finished=[finished(2, prompt=3)])),
    ]
    traces = traces_of([arrivals], {"a": 10.0, "b": 9.0})
    assert set(traces) == {"a", "b"}
    a, b = traces["a"], traces["b"]
    assert (a.pieces, a.prompt_tokens, a.cached_tokens) == ([(11.0, 1), (11.5, 1)], 7, 4)
    assert (a.ttft_s, a.e2e_s, a.tpot_s, a.itl_s()) == (1.0, 1.5, 0.5, [0.5])
    # A merged message of three tokens is three tokens, which share the time.
    assert (b.pieces, b.output_tokens) == ([(11.0, 1), (12.5, 3)], 4)
    assert (b.ttft_s, b.e2e_s, b.tpot_s, b.itl_s()) == (2.0, 3.5, 0.5, [0.5, 0.5, 0.5])


def test_two_streams_with_the_same_handles() -> None:
    """Of two engines; "a" found the first one's queue full."""
    refusal = engine_pb2.Rejected(handle=1, status=to_status(QueueFull("full")))
    first = [
        (1.0, message(rejected=[refusal], accepted=[accepted(2, "b")])),
        (5.0, message(output=step([2]), finished=[finished(2, prompt=3)])),
    ]
    second = [
        (2.0, message(accepted=[accepted(2, "a")])),
        (3.0, message(output=step([2]), finished=[finished(2, prompt=7)])),
    ]
    traces = traces_of([first, second], {"a": 0.0, "b": 0.0})
    assert (traces["a"].pieces, traces["a"].prompt_tokens) == ([(3.0, 1)], 7)
    assert (traces["b"].pieces, traces["b"].prompt_tokens) == ([(5.0, 1)], 3)


def test_tokens_of_the_first_piece_have_no_itl() -> None:
    trace = Trace(sent_s=0.0, pieces=[(1.0, 3), (2.0, 1)])
    assert (trace.ttft_s, trace.itl_s(), trace.output_tokens) == (1.0, [1.0], 4)


def test_a_refused_request_that_is_sent_again_is_one() -> None:
    refusal = engine_pb2.Rejected(handle=1, status=to_status(QueueFull("full")))
    arrivals = [
        (1.0, message(rejected=[refusal])),
        (2.0, message(accepted=[accepted(2, "a")])),
        (3.0, message(output=step([2]), finished=[finished(2)])),
    ]
    (trace,) = traces_of([arrivals], {"a": 0.0}).values()
    assert (trace.error, trace.ttft_s, trace.output_tokens) == (None, 3.0, 1)


def test_an_answer_has_a_token() -> None:
    assert Trace(sent_s=0.0, pieces=[(0.1, 1)]).failure is None
    assert Trace(sent_s=0.0).failure == "it ended without a token"
    assert Trace(sent_s=0.0, pieces=[(0.1, 1)], error=EngineUnavailable("gone")).failure == "gone"


def test_an_end_with_a_status_is_a_failure() -> None:
    ended = engine_pb2.Finished(handle=1, status=to_status(Cancelled("gone")))
    arrivals = [(1.0, message(accepted=[accepted(1, "a")], output=step([1]), finished=[ended]))]
    (trace,) = traces_of([arrivals], {"a": 0.0}).values()
    assert str(trace.error) == "gone"


def test_summary_counts_what_was_answered() -> None:
    traces = [
        Trace(sent_s=0.0, pieces=[(0.1, 1), (0.3, 2)], prompt_tokens=10, cached_tokens=4),
        Trace(sent_s=1.0, pieces=[(1.4, 1)], prompt_tokens=5),
        Trace(
            sent_s=1.0, pieces=[(1.2, 1)], prompt_tokens=100, error=EngineUnavailable("engine gone")
        ),
        Trace(sent_s=1.0),
    ]
    figures = summary(traces, 2.0, Goals(ttft=200))
    assert (figures["requests"], figures["failed"]) == (4, 2)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (15, 4)
    assert (figures["output_tokens"], figures["output_tokens_per_s"]) == (4, 2.0)
    assert figures["requests_per_s"] == 1.0
    assert figures["goodput"] == {"requests_per_s": 0.5, "share": 0.25}
    assert figures["ttft_ms"]["p99"] == pytest.approx(400)
    assert figures["e2e_ms"]["p50"] == pytest.approx(300)
    assert len(latencies(traces).itl_s) == 2
    assert len(latencies(traces).tpot_s) == 1, "one piece tells no time between tokens"
    assert "goodput" not in summary(traces, 2.0)
    assert summary([], 1.0, Goals())["goodput"]["share"] == 0.0


@pytest.mark.parametrize(
    ("goals", "kept"),
    [
        (Goals(), True),
        (Goals(ttft=100.1, itl=200.1, e2e=500.1), True),
        (Goals(ttft=99.9), False),
        (Goals(itl=199.9), False),
        (Goals(e2e=499.9), False),
        (Goals(ttft=500, itl=500, e2e=1), False),
    ],
)
def test_goals(goals: Goals, kept: bool) -> None:
    assert goals.kept_by(Trace(sent_s=0.0, pieces=[(0.1, 1), (0.5, 2)])) is kept
    assert not goals.kept_by(Trace(sent_s=0.0))
    assert not goals.kept_by(Trace(sent_s=0.0, pieces=[(0.1, 1)], error=EngineUnavailable("lost")))


def test_itls_add_up_to_the_time_between_first_and_last_token() -> None:
    rng = random.Random(3)
    for _ in range(100):
        times = sorted(rng.uniform(0, 10) for _ in range(rng.randint(1, 20)))
        trace = Trace(sent_s=-1.0, pieces=[(when, rng.randint(1, 4)) for when in times])
        assert len(trace.itl_s()) == trace.output_tokens - trace.pieces[0][1]
        assert sum(trace.itl_s()) == pytest.approx(trace.e2e_s - trace.ttft_s)


def test_latencies_of_steps() -> None:
    steps = [(1.0, 2, 0), (1.5, 3, 1), (2.5, 2, 2)]  # when, tokens, ended
    ttft_s, itl_s = step_latencies(0.0, steps)
    assert ttft_s == [1.0, 1.0, 1.5]
    assert itl_s == [0.5, 0.5, 1.0, 1.0]
    # One ends as another begins: the third step's two tokens are of different kinds.
    ttft_s, itl_s = step_latencies(0.0, [(1.0, 2, 0), (1.5, 2, 1), (2.5, 2, 2)])
    assert (ttft_s, itl_s) == ([1.0, 1.0, 2.5], [0.5, 0.5, 1.0])


def test_percentiles() -> None:
    assert percentiles_ms([]) == {}
    assert percentiles_ms([0.001 * i for i in range(101)]) == pytest.approx(
        {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    )
