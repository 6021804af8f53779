"""Runs jobs: encodes them in bounded batches, submits them, waits for their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

from millstream.client.engine_stream import EngineStream
from millstream.client.jobs import Job
from millstream.client.retries import delay_s
from millstream.client.samples import Samples
from millstream.client.services import Services
from millstream.client.submission import submit
from millstream.client.text import TextStream
from millstream.client.token_texts import TokenTexts
from millstream.client.types import Output
from millstream.rpc.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    MillstreamError,
    QueueFull,
)
from millstream.v1 import engine_pb2, tokenizer_pb2

_CALL_ITEMS = 128  # in one Encode or Decode call
_CALL_SIZE = 1024 * 1024  # characters or ids in one
_CALLS = 4  # at once

_NO_INPUTS_FAULT = (EngineUnavailable, DeadlineExceeded, EngineFault)

T = TypeVar("T")
Outcome = Output | BaseException


class Executor:
    """Belongs to the event loop of its services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._calls = asyncio.Semaphore(_CALLS)
        self._rng = random.Random()
        self._texts = TokenTexts(services)

    async def run(
        self,
        batch: Sequence[Job | MillstreamError],
        *,
        one: bool,
        return_exceptions: bool,
        use_tqdm: bool | None,
    ) -> Any:
        """The outputs in order, or just the one. An exception in the batch keeps its place."""
        if one and isinstance(batch[0], MillstreamError):
            raise batch[0]  # before any call
        self._services.check_open()
        shows = (len(batch) > 1 and sys.stderr.isatty()) if use_tqdm is None else use_tqdm
        outcomes: list[Outcome] = []
        with _progress(len(batch), shows) as tick:
            chunks = [
                self._run_chunk(batch[chunk], tick)
                for chunk in _chunks([_encode_size(item) for item in batch])
            ]
            for chunk_outcomes in await asyncio.gather(*chunks):
                outcomes += chunk_outcomes
        for number, outcome in enumerate(outcomes):
            in_place = return_exceptions and isinstance(outcome, MillstreamError)
            if isinstance(outcome, BaseException) and not in_place:
                if not one:
                    outcome.add_note(f"prompt number {number}")
                raise outcome
        return outcomes[0] if one else outcomes

    async def start(self, job: Job) -> Samples:
        """Submits one job, to be followed piece by piece; to another engine if one went away or
        has a full queue; again, as often as it allows, if all have."""
        self._services.check_open()
        deadline = _deadline(job)
        (encoded,) = await self._encode_all([job])
        if isinstance(encoded, MillstreamError):
            raise encoded
        tried: list[EngineStream] = []
        attempt = 0
        while True:
            engine, text = await self._streams(job, tried)
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

    async def encode(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], *, add_special_tokens: bool
    ) -> list[engine_pb2.TokenSequence]:
        """The token ids of any number of inputs."""
        self._services.check_open()
        call = functools.partial(self._services.encode, add_special_tokens=add_special_tokens)
        return await self._in_calls(call, inputs, [len(one.text) for one in inputs])

    async def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """The texts of any number of sequences."""
        self._services.check_open()
        call = functools.partial(self._services.decode, skip_special_tokens=skip_special_tokens)
        return await self._in_calls(call, sequences, [len(one) for one in sequences])

    # ----

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
        encoded = await self._encode_all(chunk)
        runs = map(run, encoded, deadlines)
        return await asyncio.gather(*runs, return_exceptions=True)

    async def _run_job(self, job: Job, deadline: float | None) -> Output:
        """Submits an encoded job, to another engine if one goes away before it has accepted it or
        has a full queue, and waits for its output."""
        tried: list[EngineStream] = []
        while True:
            engine, text = await self._streams(job, tried)
            tried.append(engine)
            may_move = len(tried) < len(self._services.engines)
            samples = await self._run_on(engine, text, job, deadline, may_move=may_move)
            moves = samples.never_taken or samples.found_queue_full is not None
            if not (may_move and moves):
                output = samples.output()
                return await self._texts.add_to(output) if job.detokenize else output

    async def _run_on(
        self,
        engine: EngineStream,
        text: TextStream | None,
        job: Job,
        deadline: float | None,
        *,
        may_move: bool,
    ) -> Samples:
        """Submits a job, again while the queue is full unless it may move to another engine;
        returns what has ended."""
        places = await _until(deadline, engine.places.take(job.num_samples))
        try:
            for attempt in itertools.count():
                samples = submit(engine, text, job, deadline, follow=bool(job.stop))
                try:
                    await samples.wait_done()
                finally:
                    samples.cancel()  # if this task was
                full = samples.found_queue_full
                if full is None or may_move or attempt == job.max_retries:
                    return samples
                await self._wait_for_room(full, attempt, deadline)
            raise AssertionError("there is no last attempt")
        finally:
            engine.places.give_back(places)

    async def _wait_for_room(self, full: QueueFull, attempt: int, deadline: float | None) -> None:
        seconds = delay_s(full.retry_after_s, attempt, self._rng)
        await _until(deadline, asyncio.sleep(seconds))

    async def _streams(
        self, job: Job, tried: Sequence[EngineStream]
    ) -> tuple[EngineStream, TextStream | None]:
        if job.source is None and not job.detokenize:
            return await self._services.engine_stream(tried), None
        return await self._services.both(tried)

    async def _encode_all(
        self, chunk: Sequence[Job | MillstreamError]
    ) -> Sequence[Job | MillstreamError]:
        """Fills in what is text in a chunk's jobs; a job that has what cannot be encoded becomes
        its error."""
        encoded = await self._encode_jobs(chunk)
        words_of: dict[tuple[str, ...], Sequence[engine_pb2.TokenSequence] | MillstreamError] = {}
        for texts in {job.bad_words for job in encoded if isinstance(job, Job) and job.bad_words}:
            inputs = [tokenizer_pb2.EncodeInput(text=text) for text in texts]
            try:
                words_of[texts] = await self.encode(inputs, add_special_tokens=False)
            except MillstreamError as error:
                words_of[texts] = error
        return [_with_bad_words(job, words_of) for job in encoded] if words_of else encoded

    async def _encode_jobs(
        self, chunk: Sequence[Job | MillstreamError]
    ) -> Sequence[Job | MillstreamError]:
        """Fills in the ids of a chunk's jobs; a job that cannot be encoded becomes its error."""
        jobs = [job for job in chunk if isinstance(job, Job) and job.source is not None]
        if not jobs:
            return chunk
        sources = [job.source for job in jobs if job.source is not None]
        try:
            async with self._calls:
                sequences = await self._services.encode(sources, timeout_s=jobs[0].timeout_s)
        except MillstreamError as error:
            if len(jobs) == 1 or isinstance(error, _NO_INPUTS_FAULT):
                return [copy(error) if job in jobs else job for job in chunk]
            # One of them is bad: find out which.
            return [(await self._encode_jobs([job]))[0] for job in chunk]
        for job, sequence in zip(jobs, sequences, strict=True):
            job.submission.token_ids.extend(sequence.token_ids)
        return chunk

    async def _in_calls(
        self,
        call: Callable[[Sequence[Any]], Awaitable[Sequence[T]]],
        items: Sequence[Any],
        sizes: Sequence[int],
    ) -> list[T]:
        async def one(chunk: slice) -> Sequence[T]:
            async with self._calls:
                return await call(items[chunk])

        parts = await asyncio.gather(*map(one, _chunks(sizes)))
        return [item for part in parts for item in part]


def _with_bad_words(
    job: Job | MillstreamError,
    words_of: Mapping[tuple[str, ...], Sequence[engine_pb2.TokenSequence] | MillstreamError],
) -> Job | MillstreamError:
    """The job with the ids of its bad words, or what speaks against them."""
    if isinstance(job, MillstreamError) or not job.bad_words:
        return job
    words = words_of[job.bad_words]
    if isinstance(words, MillstreamError):
        return copy(words)
    job.submission.sampling.bad_words.extend(word for word in words if word.token_ids)
    return job


def _deadline(job: Job) -> float | None:
    if job.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + job.timeout_s


async def _until(deadline: float | None, waiting: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout_at(deadline):
            return await waiting
    except TimeoutError:
        raise DeadlineExceeded("timeout_s: it passed before the engine had room") from None


def _encode_size(item: Job | MillstreamError) -> int:
    """Bytes to encode; 0 for a prompt of token ids."""
    if isinstance(item, MillstreamError) or item.source is None:
        return 0
    return item.source.ByteSize()


def _chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Cuts so that each chunk has few items of a size above 0, and little of it in all."""
    start = count = total = 0
    for i, size in enumerate(sizes):
        if count and size and (count == _CALL_ITEMS or total + size > _CALL_SIZE):
            yield slice(start, i)
            start, count, total = i, 0, 0
        count += size > 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


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
