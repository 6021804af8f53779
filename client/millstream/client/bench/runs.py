"""Which requests a benchmark sends when, and the runs that come of it."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from millstream.client.bench.metrics import Figures, Goals, Latencies, latencies, summary
from millstream.client.bench.progress import Progress
from millstream.client.bench.senders import Sender
from millstream.client.bench.traces import Trace
from millstream.client.workload import Requests, Workload, poisson_arrivals
from millstream.rpc.errors import EngineUnavailable

_WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and when each is due: in seconds from the run's start, or None for one after the
    other."""

    name: str
    requests: Requests
    due_s: Sequence[float] | None
    measured: bool = True
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a load. A request that ended without an answer is one of the errors."""

    name: str
    figures: Figures
    latencies: Latencies
    errors: Sequence[str] = ()
    ended_early: str | None = None  # the error after which nothing was sent any more
    measured: bool = True


# ---- loads: no run's prompts are another's, or the prefix cache would answer


def throughput_loads(workload: Workload, vocab_size: int, runs: int) -> list[Load]:
    """The same requests all at once, so many times; the first run warms the engine up."""
    requests = workload.draw()
    at_once = [0.0] * workload.num_requests
    return [
        Load(name=f"run {run + 1}", requests=requests.shifted(run, vocab_size), due_s=at_once)
        for run in range(runs)
    ]


def latency_loads(workload: Workload, vocab_size: int) -> list[Load]:
    """One request at a time, after one that warms up."""
    requests = workload.draw()
    warm_up = requests.part(0, 1).shifted(1, vocab_size)
    return [
        Load(name="warm-up", requests=warm_up, due_s=None, measured=False),
        Load(name="one at a time", requests=requests.shifted(0, vocab_size), due_s=None),
    ]


def serve_loads(workload: Workload, vocab_size: int, rates_per_s: Sequence[float]) -> list[Load]:
    """Poisson arrivals at each rate, after a few requests at once that warm up."""
    requests = workload.draw()
    first = requests.part(0, _WARM_UP_REQUESTS).shifted(0, vocab_size)
    at_once = [0.0] * len(first.prompts)
    loads = [Load(name="warm-up", requests=first, due_s=at_once, measured=False)]
    for number, rate in enumerate(rates_per_s, 1):
        due_s = poisson_arrivals(rate, workload.num_requests, workload.seed)
        loads.append(
            Load(
                name="all at once" if math.isinf(rate) else f"{rate:g} requests/s",
                requests=requests.shifted(number, vocab_size),
                due_s=due_s,
                rate_per_s=rate,
            )
        )
    return loads


# ---- runs


async def measure(
    sender: Sender, loads: Sequence[Load], progress: Progress, goals: Goals | None = None
) -> AsyncIterator[Run]:
    """Runs one load after the other; yields each when it has ended. Once no engine lives, the
    requests that are left of a load have failed, and the loads after it are left out."""
    for number, load in enumerate(loads):
        requests = await sender.prepare(load.requests)
        sending = _Sending(sender, requests, f"bench-{number}")
        with progress.of(load.name, len(requests.prompts)):
            started = time.perf_counter()
            loss = await sending.run(load.due_s)
            elapsed_s = time.perf_counter() - started
        left_out = sending.fail_rest(loss) if loss is not None else 0
        is_last = number == len(loads) - 1
        ended_early = None if loss is None or (is_last and not left_out) else str(loss)
        yield _run(load, sending.traces, elapsed_s, goals, ended_early)
        if loss is not None:
            return


def _run(
    load: Load,
    traces: Sequence[Trace],
    elapsed_s: float,
    goals: Goals | None,
    ended_early: str | None,
) -> Run:
    figures = summary(traces, elapsed_s, goals)
    if load.rate_per_s is not None:
        rate = load.rate_per_s
        figures["request_rate_per_s"] = None if math.isinf(rate) else rate
    return Run(
        name=load.name,
        figures=figures,
        latencies=latencies(traces),
        errors=[failure for trace in traces if (failure := trace.failure) is not None],
        ended_early=ended_early,
        measured=load.measured,
    )


class _NoneLives(Exception):
    """No engine does."""


class _Sending:
    """A load's requests on their way; the run is over when no engine lives."""

    def __init__(self, sender: Sender, requests: Requests, name: str) -> None:
        self.traces: list[Trace] = []  # of the requests that have ended
        self._loss: EngineUnavailable | None = None
        self._sender = sender
        self._requests = requests
        self._ids = [f"{name}-{index}" for index in range(len(requests.prompts))]

    async def run(self, due_s: Sequence[float] | None) -> EngineUnavailable | None:
        """When each is due, as Load's. The error after which no engine was left, if it came to
        that."""
        try:
            await (self._one_by_one() if due_s is None else self._when_due(due_s))
        except* _NoneLives:
            pass  # _loss says so
        return self._loss

    def fail_rest(self, loss: EngineUnavailable) -> int:
        """What was not sent, or had not ended: how many there are."""
        left = len(self._ids) - len(self.traces)
        self.traces += [Trace(sent_s=time.perf_counter(), error=loss) for _ in range(left)]
        return left

    async def _one_by_one(self) -> None:
        for index in range(len(self._ids)):
            await self._send(index, index + 1, time.perf_counter())

    async def _when_due(self, due_s: Sequence[float]) -> None:
        """What is due at one moment is sent as one batch. Latencies count from when a request was
        due: a client that falls behind does not hide it."""
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:  # which ends with the first one that raises
            for due, group in itertools.groupby(range(len(due_s)), key=lambda index: due_s[index]):
                indices = list(group)
                await asyncio.sleep(started + due - time.perf_counter())
                tasks.create_task(self._send(indices[0], indices[-1] + 1, started + due))

    async def _send(self, start: int, stop: int, sent_s: float) -> None:
        """Raises _NoneLives."""
        requests = self._requests.part(start, stop)
        ended = await self._sender.send(requests, self._ids[start:stop], sent_s)
        self.traces += ended
        errors = [trace.error for trace in ended if isinstance(trace.error, EngineUnavailable)]
        if errors and await self._sender.none_lives():
            self._loss = errors[-1]
            raise _NoneLives
