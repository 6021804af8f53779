"""`millstream bench` when engines go away: it goes on with those that live, and no longer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.client.measured_loads import load_of, measure_load, measure_loads
from tests.fake_services import FakeServices, fake_services, until

from millstream.client.__main__ import run
from millstream.client.bench.runs import Run
from millstream.client.bench.turns import open_turns

ALL_WAYS: list[dict[str, Any]] = [{}, {"streams": "per-request"}, {"text": True}]
IDS = ["one stream", "a stream each", "text"]


def submissions(services: FakeServices) -> int:
    return sum(len(message.submit) for message in services.engine.messages)


@pytest.mark.parametrize("target", ALL_WAYS, ids=IDS)
async def test_an_engine_that_breaks_is_what_failed(
    services: FakeServices, target: dict[str, Any]
) -> None:
    services.engine.step_s = 0.05  # all are submitted by then
    services.engine.break_after_tokens = 8
    measured = await measure_load(services, load_of([0.0] * 6), **target)
    assert measured.figures["failed"] == len(measured.errors) > 0
    assert all("the engine broke" in error for error in measured.errors)


# ---- one at a time


@pytest.mark.parametrize("target", [{}, {"text": True}])
async def test_one_at_a_time_ends_with_the_engine(
    services: FakeServices, target: dict[str, Any]
) -> None:
    """Each further request would wait 10 s for an engine that is gone."""
    services.engine.break_after_tokens = 8
    measured = await measure_load(services, load_of(None), **target)
    sent = submissions(services)
    assert 2 <= sent <= 3
    assert measured.figures["requests"] == 6
    assert measured.figures["failed"] == len(measured.errors) == 6 - (sent - 1)
    assert all("the engine broke" in error for error in measured.errors)


@pytest.mark.parametrize("target", ALL_WAYS, ids=IDS)
async def test_one_at_a_time_goes_on_with_the_engine_that_lives(
    services: FakeServices, target: dict[str, Any]
) -> None:
    """Idle engines are equal, so the first one gets all requests while it lives; or the first
    turn."""
    async with fake_services() as dying:
        running = _start_one_at_a_time(dying, services, **target)
        await _stop_in_a_request(dying)
        measured = await running
    assert submissions(dying) == 1
    assert submissions(services) == 5
    assert measured.figures["failed"] == 1
    (error,) = measured.errors
    assert f"the engine at {dying.target} is unavailable" in error


async def test_one_at_a_time_ends_with_the_last_engine(services: FakeServices) -> None:
    async with fake_services() as dying:
        running = _start_one_at_a_time(dying, services)
        await _stop_in_a_request(dying)
        await _stop_in_a_request(services)
        started = time.perf_counter()
        measured = await running
    assert time.perf_counter() - started < 5  # no request waits until nobody is there
    assert measured.figures["requests"] == measured.figures["failed"] == 6
    assert f"the engine at {dying.target} is unavailable" in measured.errors[0]
    assert all(services.target in error for error in measured.errors[1:])


# ---- at their times

SLOWLY = [5.0 * index for index in range(6)]  # nobody waits through this


@pytest.mark.parametrize("target", ALL_WAYS, ids=IDS)
async def test_arrivals_end_with_the_engine(services: FakeServices, target: dict[str, Any]) -> None:
    services.engine.step_s = 0.05
    running = asyncio.create_task(
        measure_load(services, load_of([0.0, 0.3, *SLOWLY[1:5]]), **target)
    )
    await until(lambda: submissions(services) == 2)
    await _stop_in_a_request(services)
    started = time.perf_counter()
    measured = await running
    assert time.perf_counter() - started < 3
    assert (measured.figures["requests"], measured.figures["failed"]) == (6, 5)
    assert len(measured.errors) == 5
    assert all(services.target in error for error in measured.errors), measured.errors
    assert measured.ended_early == measured.errors[0]
    assert len(measured.latencies.ttft_s) == 1


@pytest.mark.parametrize("target", ALL_WAYS, ids=IDS)
async def test_arrivals_go_on_with_the_engine_that_lives(
    services: FakeServices, target: dict[str, Any]
) -> None:
    async with fake_services() as dying:
        dying.engine.step_s = services.engine.step_s = 0.05
        due_s = [0.0, 0.0, 0.5, 0.6, 0.7, 0.8]
        engines = [dying.target, services.target]
        running = asyncio.create_task(
            measure_load(services, load_of(due_s), engine=engines, **target)
        )
        await until(lambda: services.engine.live > 0)
        await _stop_in_a_request(dying)
        measured = await running
    assert (measured.figures["requests"], measured.figures["failed"]) == (6, 1)
    assert all(dying.target in error for error in measured.errors), measured.errors
    assert submissions(services) == 5
    assert measured.ended_early is None


# ---- turns


async def test_an_engine_that_is_away_has_no_turn(services: FakeServices) -> None:
    """From the first request on, however soon it is due."""
    engines = ["127.0.0.1:1", services.target]
    measured = await measure_load(
        services, load_of([0.0] * 6), engine=engines, streams="per-request"
    )
    assert measured.errors == []
    assert submissions(services) == 6


async def test_an_engine_that_comes_back_has_turns_again(services: FakeServices) -> None:
    async with fake_services() as other, open_turns([services.target, other.target]) as turns:
        assert {turns.next()[0] for _ in range(4)} == {services.target, other.target}
        other.health.set_serving(False)
        await until(lambda: {turns.next()[0] for _ in range(4)} == {services.target})
        other.health.set_serving(True)
        await until(lambda: {turns.next()[0] for _ in range(4)} == {services.target, other.target})


async def test_turns_of_engines_that_are_all_away(services: FakeServices) -> None:
    """Whoever asks hears what is wrong with one of them."""
    services.health.set_serving(False)
    async with open_turns([services.target, "127.0.0.1:1"]) as turns:
        assert {turns.next()[0] for _ in range(4)} == {services.target, "127.0.0.1:1"}


@pytest.mark.parametrize("target", ALL_WAYS, ids=IDS)
async def test_nothing_is_run_after_the_last_engine(
    services: FakeServices, target: dict[str, Any]
) -> None:
    """Not the other rates either."""
    services.engine.step_s = 0.05
    loads = [dataclasses.replace(load_of([0.0] * 6), name=name) for name in ("1", "2")]
    running = asyncio.create_task(measure_loads(services, loads, **target))
    await until(lambda: submissions(services) == 6)  # else one waits 10 s for the engine
    await _stop_in_a_request(services)
    started = time.perf_counter()
    (measured,) = await running
    assert time.perf_counter() - started < 3
    assert (measured.name, measured.figures["failed"]) == ("1", 6)
    assert measured.ended_early is not None
    assert services.target in measured.ended_early


# ---- on the command line


def test_serve_tells_what_was_measured_until_the_engine_went_away(
    threaded_services: FakeServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    stop_after(threaded_services, 8 + 4)  # the warm-up, and some of the first rate
    started = time.perf_counter()
    assert run([*_serve(threaded_services), "--json", str(file)]) == 1
    assert time.perf_counter() - started < 15  # the arrivals take longer
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert line.startswith("2 requests/s: ")
    (error,) = shown.err.splitlines()
    assert f"the engine at {threaded_services.target} is unavailable" in error
    assert "ended early" in error
    (figures,) = json.loads(file.read_text())["runs"]
    assert figures["requests"] == 60
    assert 0 < figures["failed"] < 60
    assert figures["ended_early"] in error
    assert figures["ttft_ms"]


def test_an_engine_that_goes_away_in_the_warm_up(
    threaded_services: FakeServices, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(threaded_services, 1)
    assert run(_serve(threaded_services)) == 1
    shown = capsys.readouterr()
    (error,) = shown.err.splitlines()
    assert shown.out == ""
    assert "of the warm-up" in error
    assert threaded_services.target in error


def test_a_warm_up_that_fails_makes_the_command_fail(
    threaded_services: FakeServices, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where all that is measured is well."""
    threaded_services.engine.step_s = 0.05
    threaded_services.engine.break_after_tokens = 1  # of a stream of its own, in the warm-up
    command = [*_serve(threaded_services)[:-2], "inf", "--streams", "per-request"]
    assert run(command) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("all at once: ")
    assert "failed" not in shown.out
    assert "1 of 68 requests failed, the first one (of the warm-up) with: " in shown.err


def stop_after(services: FakeServices, num_submissions: int) -> None:
    """The services stop in the step after so many requests were submitted."""
    stopping: list[asyncio.Task[None]] = []

    def tokens_per_step() -> int:
        if submissions(services) >= num_submissions and not stopping:
            stopping.append(asyncio.get_running_loop().create_task(services.stop()))
        return 1

    services.engine.step_s = 0.01
    services.engine.tokens_per_step = tokens_per_step


def _serve(services: FakeServices) -> list[str]:
    small = ["--engine", services.target, "--num-requests", "60", "--input-len", "4"]
    return ["bench", "serve", *small, "--output-len", "4", "--request-rate", "2", "3"]


def _start_one_at_a_time(
    first: FakeServices, second: FakeServices, **target: Any
) -> asyncio.Task[Run]:
    first.engine.step_s = second.engine.step_s = 0.05
    engines = [first.target, second.target]
    return asyncio.create_task(measure_load(second, load_of(None), engine=engines, **target))


async def _stop_in_a_request(services: FakeServices) -> None:
    await until(lambda: services.engine.live > 0)
    await services.stop()
