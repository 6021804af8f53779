"""The same loads on an engine in this process: what gRPC, the front end and its IPC cost is the
difference. Steps are seen here, not requests, so a batch's TPOT is not told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millstream.client.bench.metrics import Latencies, run_figures
from millstream.client.bench.progress import Progress
from millstream.client.bench.runs import Load, Run
from millstream.client.launch import import_service, prefetch
from millstream.client.processes import LaunchError

Step = tuple[float, int, int]  # when it ended, tokens sampled, requests ended


@contextlib.contextmanager
def open_llm(model: str | None, options: Mapping[str, Any]) -> Iterator[Any]:
    """An engine.LLM. Raises LaunchError."""
    prefetch(model, options)
    engine, hub = import_service("millstream.engine"), import_service("millstream.hub")
    try:
        llm = engine.LLM(model, **options)
    except (ValueError, OSError, hub.HubError) as error:
        raise LaunchError(str(error)) from error
    with llm:
        yield llm


def measure_in_process(llm: Any, loads: Sequence[Load], progress: Progress) -> Iterator[Run]:
    """Runs loads whose requests are due all at once, or one after the other."""
    for load in loads:
        with progress.of(load.name, len(load.requests.prompts)):
            started = time.perf_counter()
            groups = _groups(load)
            parts = [_run(llm, load, start, stop, progress) for start, stop in groups]
            elapsed_s = time.perf_counter() - started
        if load.measured:
            measured = Latencies(
                ttft_s=[value for part in parts for value in part[1].ttft_s],
                itl_s=[value for part in parts for value in part[1].itl_s],
                tpot_s=[value for part in parts for value in part[1].tpot_s],
                e2e_s=[value for part in parts for value in part[1].e2e_s],
            )
            figures = run_figures(
                measured,
                elapsed_s=elapsed_s,
                requests=len(load.requests.prompts),
                failed=0,
                prompt_tokens=load.requests.prompt_tokens,
                output_tokens=sum(tokens for tokens, _ in parts),
            )
            yield Run(name=load.name, figures=figures, latencies=measured)


def step_latencies(started: float, steps: Iterable[Step]) -> tuple[list[float], list[float]]:
    """TTFTs and ITLs from steps in which every running request samples: what a step samples beyond
    those is first tokens. (A preempted request's pause is missed.)"""
    ttft_s: list[float] = []
    itl_s: list[float] = []
    running, before = 0, started
    for when, num_tokens, num_ended in steps:
        continued = min(running, num_tokens)
        itl_s += [when - before] * continued
        ttft_s += [when - started] * (num_tokens - continued)
        running = max(running, num_tokens) - num_ended
        before = when
    return ttft_s, itl_s


def _groups(load: Load) -> list[tuple[int, int]]:
    """Which requests run together, as ranges."""
    count = len(load.requests.prompts)
    return [(i, i + 1) for i in range(count)] if load.due_s is None else [(0, count)]


def _run(llm: Any, load: Load, start: int, stop: int, progress: Progress) -> tuple[int, Latencies]:
    """Output tokens and latencies of requests that are submitted together."""
    started = time.perf_counter()
    requests = load.requests.part(start, stop)
    for prompt, params in zip(requests.prompts, requests.params, strict=True):
        llm.add_request(prompt, params)
    steps: list[Step] = []
    e2e_s: list[float] = []
    while not llm.is_finished():
        ended, num_tokens = llm.step()
        now = time.perf_counter()
        steps.append((now, num_tokens, len(ended)))
        e2e_s += [now - started] * len(ended)
        progress.note(num_tokens=num_tokens, num_ended=len(ended))
    ttft_s, itl_s = step_latencies(started, steps)
    alone = stop - start == 1 and itl_s
    tpot_s = [sum(itl_s) / len(itl_s)] if alone else []
    tokens = sum(num_tokens for _, num_tokens, _ in steps)
    return tokens, Latencies(ttft_s=ttft_s, itl_s=itl_s, tpot_s=tpot_s, e2e_s=e2e_s)
