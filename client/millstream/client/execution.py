"""Runs jobs: has them encoded in batches, submits them, waits for their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from millstream.client.deadlines import last_word, until
from millstream.client.engine_stream import EngineStream
from millstream.client.jobs import Job
from millstream.client.retries import delay_s
from millstream.client.samples import Samples
from millstream.client.services import Services
from millstream.client.submission import submit
from millstream.client.text import TextStream
from millstream.client.token_texts import TokenTexts
from millstream.client.tokenizer_calls import TokenizerCalls, job_chunks
from millstream.client.types import Output
from millstream.rpc.errors import (
    DeadlineExceeded,
    MillstreamError,
    QueueFull,
)

Outcome = Output | BaseException


class Executor:
    """Belongs to the event loop of its services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.tokenizer = TokenizerCalls(services)
        self._rng = random.Random()
        self._texts = TokenTexts(services)

    async def run(
        self,
        batch: Iterable[Job | MillstreamError],
        *,
        count: int | None,
        return_exceptions: bool,
        use_tqdm: bool | None,
    ) -> Any:
        """The outputs of so many jobs in order; None: just the output of the one. An exception in
        the batch keeps its place."""
        self._services.check_open()
        several = count is not None and count > 1
        shows = (several and sys.stderr.isatty()) if use_tqdm is None else use_tqdm
        with _progress(1 if count is None else count, shows) as tick:
            outcomes = await self._run_chunks(job_chunks(batch), tick)
        for number, outcome in enumerate(outcomes):
            in_place = return_exceptions and isinstance(outcome, MillstreamError)
            if isinstance(outcome, BaseException) and not in_place:
                if count is not None:
                    outcome.add_note(f"prompt number {number}")
                raise outcome
        return outcomes[0] if count is None else outcomes

    async def start(self, job: Job) -> Samples:
        """Submits one job, to be followed piece by piece; to another engine if one went away or
        has a full queue; again, as often as it allows, if all have."""
        self._services.check_open()
        deadline = _deadline(job)
        (encoded,) = await self._encode([job], deadline)
        if isinstance(encoded, MillstreamError):
            raise encoded
        tried: list[EngineStream] = []
        attempt = 0
        while True:
            engine, text = await self._streams(job, tried, deadline)
            samples = submit(engine, text, job, deadline, follow=True)
            may_move = len(tried) + 1 < len(self._services.engines)
            may_retry = attempt < (job.max_retries or 0)
            if not (may_move or may_retry):
                return samples
            try:
                await samples.answered()
            except BaseException:
                samples.cancel()
                raise
            full = samples.found_queue_full
            if may_move and (samples.never_taken or full is not None):
                tried.append(engine)
            elif may_retry and full is not None:
                await self._wait_for_room(full, attempt, deadline)
                tried.clear()
                attempt += 1
            else:
                return samples

    # ----

    async def _run_chunks(
        self, chunks: Iterable[Sequence[Job | MillstreamError]], tick: Callable[[], None]
    ) -> list[Outcome]:
        tasks: list[asyncio.Task[list[Outcome]]] = []
        try:
            for chunk in chunks:
                tasks.append(asyncio.create_task(self._run_chunk(chunk, tick)))
                await asyncio.sleep(0)  # it is on its way while the next is drawn
            return list(itertools.chain.from_iterable(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()

    async def _run_chunk(
        self, chunk: Sequence[Job | MillstreamError], tick: Callable[[], None]
    ) -> list[Outcome]:
        async def run(job: Job | MillstreamError, deadline: float | None) -> Output:
            try:
                if isinstance(job, MillstreamError):
                    raise job
                return await self._run_job(job, deadline)
            finally:
                tick()

        deadlines = [None if isinstance(job, MillstreamError) else _deadline(job) for job in chunk]
        encoded = await self._encode(chunk, max(filter(None, deadlines), default=None))
        runs = map(run, encoded, deadlines)
        return await asyncio.gather(*runs, return_exceptions=True)

    async def _encode(
        self, chunk: Sequence[Job | MillstreamError], deadline: float | None
    ) -> Sequence[Job | MillstreamError]:
        """The jobs with the ids of their texts, or what became of them."""
        try:
            return await until(deadline, self.tokenizer.encode_jobs(chunk), "its text was encoded")
        except DeadlineExceeded as error:
            return [job if isinstance(job, MillstreamError) else copy(error) for job in chunk]

    async def _run_job(self, job: Job, deadline: float | None) -> Output:
        """Submits an encoded job, to another engine if one goes away before it has accepted it or
        has a full queue, and waits for its output."""
        tried: list[EngineStream] = []
        while True:
            engine, text = await self._streams(job, tried, deadline)
            tried.append(engine)
            may_move = len(tried) < len(self._services.engines)
            samples = await self._run_on(engine, text, job, deadline, may_move=may_move)
            if samples is None:
                tried.clear()  # the engines that are there are others now
                continue
            moves = samples.never_taken or samples.found_queue_full is not None
            if not (may_move and moves):
                output = samples.output()
                if not job.detokenize:
                    return output
                texts = self._texts.add_to(output)
                return await until(last_word(deadline), texts, "its tokens' texts came")

    async def _run_on(
        self,
        engine: EngineStream,
        text: TextStream | None,
        job: Job,
        deadline: float | None,
        *,
        may_move: bool,
    ) -> Samples | None:
        """Submits a job, again while the queue is full unless it may move to another engine;
        returns what has ended. None: of several engines, this one went away while the job waited
        to be submitted."""
        with engine.expecting(job.load, job.num_samples):
            taking = engine.places.take(job.num_samples)
            places = await until(deadline, taking, "the engine had room")
        try:
            for attempt in itertools.count():
                if engine.broken and len(self._services.engines) > 1:
                    return None
                samples = submit(engine, text, job, deadline, follow=bool(job.stop))
                try:
                    await samples.wait_done()
                finally:
                    samples.cancel()  # if this task was
                full = samples.found_queue_full
                if full is None or may_move or attempt == job.max_retries:
                    return samples
                with engine.expecting(job.load, job.num_samples):
                    await self._wait_for_room(full, attempt, deadline)
            raise AssertionError("there is no last attempt")
        finally:
            engine.places.give_back(places)

    async def _wait_for_room(self, full: QueueFull, attempt: int, deadline: float | None) -> None:
        seconds = delay_s(full.retry_after_s, attempt, self._rng)
        await until(deadline, asyncio.sleep(seconds), "the engine had room")

    async def _streams(
        self, job: Job, tried: Sequence[EngineStream], deadline: float | None
    ) -> tuple[EngineStream, TextStream | None]:
        there = "the services were there"
        if job.source is None and not job.detokenize:
            return await until(deadline, self._services.engine_stream(job, tried), there), None
        return await until(deadline, self._services.both(job, tried), there)


def _deadline(job: Job) -> float | None:
    if job.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + job.timeout_s


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A function to call once per prompt done."""
    if not shown:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="prompts", unit="prompt", file=sys.stderr) as bar:

        def tick() -> None:
            bar.update()

        yield tick
