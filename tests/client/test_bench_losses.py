"""`millstream bench` when engines go away: it goes on with those that live, and no longer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.client.measured_loads import load_of, measure_load
from tests.fake_services import FakeServices, fake_services, until

from millstream.client.bench.runs import Run

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


@pytest.mark.parametrize("target", [{}, {"text": True}])
async def test_one_at_a_time_goes_on_with_the_engine_that_lives(
    services: FakeServices, target: dict[str, Any]
) -> None:
    """Idle engines are equal, so the first one gets all requests while it lives."""
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


def _start_one_at_a_time(
    first: FakeServices, second: FakeServices, **target: Any
) -> asyncio.Task[Run]:
    first.engine.step_s = second.engine.step_s = 0.05
    engines = [first.target, second.target]
    return asyncio.create_task(measure_load(second, load_of(None), engine=engines, **target))


async def _stop_in_a_request(services: FakeServices) -> None:
    await until(lambda: services.engine.live > 0)
    await services.stop()
