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
    """What came of a load."""

    name: str
    figures: Figures
    latencies: Latencies
    errors: Sequence[str] = ()


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
    """Runs one load after the other; yields each measured one when it has ended."""
    for number, load in enumerate(loads):
        requests = await sender.prepare(load.requests)
        ids = [f"bench-{number}-{index}" for index in range(len(requests.prompts))]
        with progress.of(load.name, len(ids)):
            started = time.perf_counter()
            if load.due_s is None:
                traces = await _one_by_one(sender, requests, ids)
            else:
                traces = await _when_due(sender, requests, ids, started, load.due_s)
            elapsed_s = time.perf_counter() - started
        if load.measured:
            figures = summary(traces, elapsed_s, goals)
            if load.rate_per_s is not None:
                rate = load.rate_per_s
                figures["request_rate_per_s"] = None if math.isinf(rate) else rate
            yield Run(
                name=load.name,
                figures=figures,
                latencies=latencies(traces),
                errors=[str(trace.error) for trace in traces if trace.error is not None],
            )


async def _one_by_one(sender: Sender, requests: Requests, ids: Sequence[str]) -> list[Trace]:
    """Once no engine lives, those that are left fail as the last one did: each would wait for one
    in vain."""
    traces: list[Trace] = []
    for index, request_id in enumerate(ids):
        sent_s = time.perf_counter()
        traces += await sender.send(requests.part(index, index + 1), [request_id], sent_s)
        error = traces[-1].error
        if isinstance(error, EngineUnavailable) and await sender.none_lives():
            left = len(ids) - len(traces)
            return traces + [Trace(sent_s=sent_s, error=error) for _ in range(left)]
    return traces


async def _when_due(
    sender: Sender, requests: Requests, ids: Sequence[str], started: float, due_s: Sequence[float]
) -> list[Trace]:
    """What is due at one moment is sent as one batch. Latencies count from when a request was due:
    a client that falls behind does not hide it."""
    sent: list[asyncio.Task[list[Trace]]] = []
    async with asyncio.TaskGroup() as tasks:
        for due, group in itertools.groupby(range(len(ids)), key=lambda index: due_s[index]):
            indices = list(group)
            start, stop = indices[0], indices[-1] + 1
            await asyncio.sleep(started + due - time.perf_counter())
            sending = sender.send(requests.part(start, stop), ids[start:stop], started + due)
            sent.append(tasks.create_task(sending))
    return [trace for task in sent for trace in task.result()]
