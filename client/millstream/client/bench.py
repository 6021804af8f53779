"""Runs a workload, through gRPC or in process, and measures it: tokens/s, TTFT and ITL.

TTFT: from the start of the run, when all requests are submitted, until a request's first token is
here. ITL: the time between tokens of a request; tokens that arrive together share it evenly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millstream.client.launch import import_service, launch, prefetch
from millstream.client.processes import LaunchError
from millstream.client.workload import Requests, Workload
from millstream.v1 import engine_pb2

Result = dict[str, Any]
_PERCENTILES = (50, 90, 99)


def run_through_grpc(
    model: str | None, options: Mapping[str, Any], workload: Workload, runs: int
) -> list[Result]:
    """Token ids in and out of an engine service that is launched for it, on one stream."""
    arrivals: list[tuple[float, engine_pb2.StepOutput]] = []

    def observe(message: engine_pb2.GenerateResponse) -> None:
        arrivals.append((time.perf_counter(), message.output))

    requests = workload.draw()
    results = []
    with launch(model, tokenizer=False, observer=observe, **options) as client:
        info = client.info().engine
        assert info is not None
        for run in range(runs):
            batch = requests.shifted(run, info.vocab_size)
            arrivals.clear()
            started = time.perf_counter()
            outputs = client.generate(batch.prompts, batch.params, detokenize=False, use_tqdm=False)
            ended = time.perf_counter()
            tokens = sum(output.usage.output_tokens for output in outputs)
            ttft_s, itl_s = latencies(started, arrivals)
            results.append(_result(batch, tokens, ended - started, ttft_s, itl_s))
    return results


def run_in_process(
    model: str | None, options: Mapping[str, Any], workload: Workload, runs: int
) -> list[Result]:
    """The same core in this process."""
    requests = workload.draw()
    results = []
    prefetch(model, options)
    engine, hub = import_service("millstream.engine"), import_service("millstream.hub")
    try:
        llm = engine.LLM(model, **options)
    except (ValueError, OSError, hub.HubError) as error:
        raise LaunchError(str(error)) from error
    with llm:
        for run in range(runs):
            batch = requests.shifted(run, llm.info.vocab_size)
            started = time.perf_counter()
            for prompt, params in zip(batch.prompts, batch.params, strict=True):
                llm.add_request(prompt, params)
            steps: list[tuple[float, int, int]] = []  # when, tokens sampled, requests ended
            while not llm.is_finished():
                ended, num_tokens = llm.step()
                steps.append((time.perf_counter(), num_tokens, len(ended)))
            elapsed_s = time.perf_counter() - started
            tokens = sum(num_tokens for _, num_tokens, _ in steps)
            ttft_s, itl_s = step_latencies(started, steps)
            results.append(_result(batch, tokens, elapsed_s, ttft_s, itl_s))
    return results


def latencies(
    started: float, arrivals: Iterable[tuple[float, engine_pb2.StepOutput]]
) -> tuple[list[float], list[float]]:
    """TTFTs and ITLs in seconds, from the messages of a stream and when they came."""
    last: dict[int, float] = {}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    for when, output in arrivals:
        counts = output.counts or itertools.repeat(1, len(output.handles))
        for handle, count in zip(output.handles, counts, strict=True):
            if handle in last:
                itl_s += [(when - last[handle]) / count] * count
            else:
                ttft_s.append(when - started)
                itl_s += [0.0] * (count - 1)
            last[handle] = when
    return ttft_s, itl_s


def step_latencies(
    started: float, steps: Iterable[tuple[float, int, int]]
) -> tuple[list[float], list[float]]:
    """The same from steps in which every running request samples: what a step samples beyond those
    is first tokens. (A preempted request's pause is missed.)"""
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


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles, in milliseconds."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    last = len(ordered) - 1
    return {f"p{p}": 1000 * ordered[round(p / 100 * last)] for p in _PERCENTILES}


def _result(
    batch: Requests,
    output_tokens: int,
    elapsed_s: float,
    ttft_s: Sequence[float],
    itl_s: Sequence[float],
) -> Result:
    return {
        "elapsed_s": elapsed_s,
        "requests": len(batch.prompts),
        "prompt_tokens": batch.prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / elapsed_s,
        "ttft_ms": percentiles_ms(ttft_s),
        "itl_ms": percentiles_ms(itl_s),
    }
