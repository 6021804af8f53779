"""Calls of the tokenizer service, for any number of inputs: bounded batches, a few at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

from millstream.client.jobs import Job
from millstream.client.services import Services
from millstream.rpc.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    MillstreamError,
)
from millstream.v1 import engine_pb2, tokenizer_pb2

_CALL_ITEMS = 128  # in one Encode or Decode call
_CALL_SIZE = 1024 * 1024  # characters or ids in one
_CALLS = 4  # at once

_NO_INPUTS_FAULT = (EngineUnavailable, DeadlineExceeded, EngineFault)

T = TypeVar("T")


class TokenizerCalls:
    """Belongs to the event loop of its services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._calls = asyncio.Semaphore(_CALLS)

    async def encode(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], *, add_special_tokens: bool
    ) -> list[engine_pb2.TokenSequence]:
        """The token ids of any number of inputs."""
        self._services.check_open()
        call = functools.partial(self._services.encode, add_special_tokens=add_special_tokens)
        return await self._in_calls(call, inputs, lambda one: len(one.text))

    async def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """The texts of any number of sequences."""
        self._services.check_open()
        call = functools.partial(self._services.decode, skip_special_tokens=skip_special_tokens)
        return await self._in_calls(call, sequences, len)

    async def encode_jobs(
        self, chunk: Sequence[Job | MillstreamError]
    ) -> Sequence[Job | MillstreamError]:
        """Fills in what is text in a chunk's jobs; a job that has what cannot be encoded becomes
        its error."""
        encoded = await self._encode_sources(chunk)
        words_of: dict[tuple[str, ...], Sequence[engine_pb2.TokenSequence] | MillstreamError] = {}
        for texts in {job.bad_words for job in encoded if isinstance(job, Job) and job.bad_words}:
            inputs = [tokenizer_pb2.EncodeInput(text=text) for text in texts]
            try:
                words_of[texts] = await self.encode(inputs, add_special_tokens=False)
            except MillstreamError as error:
                words_of[texts] = error
        return [_with_bad_words(job, words_of) for job in encoded] if words_of else encoded

    async def _encode_sources(
        self, chunk: Sequence[Job | MillstreamError]
    ) -> Sequence[Job | MillstreamError]:
        """Fills in the ids of a chunk's jobs; a job that cannot be encoded becomes its error."""
        jobs = [job for job in chunk if isinstance(job, Job) and job.source is not None]
        if not jobs:
            return chunk
        sources = [job.source for job in jobs if job.source is not None]
        try:
            async with self._calls:
                sequences = await self._services.encode(sources)
        except MillstreamError as error:
            if len(jobs) == 1 or isinstance(error, _NO_INPUTS_FAULT):
                return [copy(error) if job in jobs else job for job in chunk]
            # One of them is bad: find out which.
            return [(await self._encode_sources([job]))[0] for job in chunk]
        for job, sequence in zip(jobs, sequences, strict=True):
            job.submission.token_ids.extend(sequence.token_ids)
        return chunk

    async def _in_calls(
        self,
        call: Callable[[Sequence[Any]], Awaitable[Sequence[T]]],
        items: Sequence[Any],
        size_of: Callable[[Any], int],
    ) -> list[T]:
        async def one(chunk: Sequence[Any]) -> Sequence[T]:
            async with self._calls:
                return await call(chunk)

        parts = await asyncio.gather(*map(one, _chunks(items, size_of)))
        return [item for part in parts for item in part]


def job_chunks(batch: Iterable[Job | MillstreamError]) -> Iterator[list[Job | MillstreamError]]:
    """Cuts a batch so that what is text in each part can be one call; draws a part at a time."""
    return _chunks(batch, _encode_size)


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


def _encode_size(item: Job | MillstreamError) -> int:
    """Bytes to encode; 0 for a prompt of token ids."""
    if isinstance(item, MillstreamError) or item.source is None:
        return 0
    return item.source.ByteSize()


def _chunks(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cuts so that each chunk has few items, and little of their sizes in all."""
    chunk: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if chunk and (len(chunk) == _CALL_ITEMS or total + size > _CALL_SIZE):
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk
