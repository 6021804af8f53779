"""The same loads on an engine in this process: what gRPC, the front end and its IPC cost is the
difference. Steps are seen here, not requests, so a batch's TPOT is not told."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millstream.client.bench.metrics import Latencies, run_figures
from millstream.client.bench.progress import Progress
from millstream.client.bench.runs import Load, Run
from millstream.client.launch import check_installed, import_service, prefetch
from millstream.client.processes import LaunchError
from millstream.rpc.errors import MillstreamError

Step = tuple[float, int, int]  # when it ended, tokens sampled, requests ended


@contextlib.contextmanager
def open_llm(model: str | None, options: Mapping[str, Any]) -> Iterator[Any]:
    """An engine.LLM. Raises LaunchError."""
    check_installed("engine")
    prefetch(model, options)
    engine, hub = import_service("millstream.engine"), import_service("millstream.hub")
    with _quiet_ranks():
        try:
            llm = engine.LLM(model, **options)
        except (ValueError, OSError, hub.HubError) as error:
            raise LaunchError(str(error)) from error
        except Exception as error:
            raise LaunchError(_one_line(error)) from error
    with llm:
        yield llm


@contextlib.contextmanager
def _quiet_ranks() -> Iterator[None]:
    """Ranks that start meanwhile log nothing: what they fail with is in what the engine raises."""
    logger = logging.getLogger("millstream.engine.ranks")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def measure_in_process(llm: Any, loads: Sequence[Load], progress: Progress) -> Iterator[Run]:
    """Runs loads whose requests are due all at once, or one after the other; yields each when it
    has ended. When the engine fails, what had not ended of a load has failed, and the loads after
    it are left out. Raises what LLM.add_request does."""
    for load in loads:
        measuring = _Measuring(llm, load, progress)
        with progress.of(load.name, len(load.requests.prompts)):
            started = time.perf_counter()
            fault = measuring.run()
            elapsed_s = time.perf_counter() - started
        yield measuring.told(elapsed_s, fault)
        if fault is not None:
            return


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


class _Measuring:
    """A load that runs, and what was seen of it."""

    def __init__(self, llm: Any, load: Load, progress: Progress) -> None:
        self._llm = llm
        self._load = load
        self._progress = progress
        self._prompt_tokens = self._output_tokens = 0  # of the requests that have ended
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []
        self._tpot_s: list[float] = []
        self._e2e_s: list[float] = []

    def run(self) -> Exception | None:
        """What the engine failed with, if it did."""
        for start, stop in _groups(self._load):
            requests = self._load.requests.part(start, stop)
            started = time.perf_counter()
            prompt_tokens = {
                self._llm.add_request(prompt, params): len(prompt)
                for prompt, params in zip(requests.prompts, requests.params, strict=True)
            }
            try:
                self._run_group(started, prompt_tokens)
            except Exception as fault:
                return fault
        return None

    def told(self, elapsed_s: float, fault: Exception | None) -> Run:
        num_requests = len(self._load.requests.prompts)
        failed = num_requests - len(self._e2e_s)
        why = None if fault is None else _one_line(fault)
        measured = Latencies(
            ttft_s=self._ttft_s, itl_s=self._itl_s, tpot_s=self._tpot_s, e2e_s=self._e2e_s
        )
        figures = run_figures(
            measured,
            elapsed_s=elapsed_s,
            requests=num_requests,
            failed=failed,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )
        return Run(
            name=self._load.name,
            figures=figures,
            latencies=measured,
            errors=[why] * failed if why is not None else [],
            ended_early=why,
            measured=self._load.measured,
        )

    def _run_group(self, started: float, prompt_tokens: Mapping[int, int]) -> None:
        """Runs what was submitted together; `prompt_tokens`: by key. Raises what step() does."""
        steps: list[Step] = []
        try:
            while not self._llm.is_finished():
                ended, num_tokens = self._llm.step()
                now = time.perf_counter()
                steps.append((now, num_tokens, len(ended)))
                self._e2e_s += [now - started] * len(ended)
                self._prompt_tokens += sum(prompt_tokens[key] for key, _ in ended)
                self._output_tokens += sum(len(token_ids) for _, token_ids in ended)
                self._progress.note(num_tokens=num_tokens, num_ended=len(ended))
        finally:
            self._note(started, steps, is_alone=len(prompt_tokens) == 1)

    def _note(self, started: float, steps: Sequence[Step], *, is_alone: bool) -> None:
        """The latencies of a group, if something of it was answered."""
        if not any(num_ended for _, _, num_ended in steps):
            return
        ttft_s, itl_s = step_latencies(started, steps)
        self._ttft_s += ttft_s
        self._itl_s += itl_s
        if is_alone and itl_s:
            self._tpot_s.append(sum(itl_s) / len(itl_s))


def _groups(load: Load) -> list[tuple[int, int]]:
    """Which requests run together, as ranges."""
    count = len(load.requests.prompts)
    return [(i, i + 1) for i in range(count)] if load.due_s is None else [(0, count)]


def _one_line(error: Exception) -> str:
    """With its type, unless its message is made for people."""
    name = "" if isinstance(error, MillstreamError) else type(error).__name__
    return ": ".join(filter(None, (name, " ".join(str(error).split()))))
