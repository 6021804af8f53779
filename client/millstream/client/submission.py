"""Submits an encoded job: its generations and text sessions, then the request itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from millstream.client.engine_stream import EngineStream
from millstream.client.generation import Generation
from millstream.client.jobs import Job
from millstream.client.samples import Samples
from millstream.client.text import TextSession, TextStream
from millstream.rpc.errors import DeadlineExceeded, MillstreamError


def submit(
    engine: EngineStream, text: TextStream | None, job: Job, deadline: float | None, *, follow: bool
) -> Samples:
    """`deadline` in seconds of the loop's clock; `follow` as Generation's. Raises DeadlineExceeded
    when it has passed, and what the streams raise."""
    submission = job.submission
    if deadline is not None:
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded(f"timeout_s: {job.timeout_s:g} s passed before it could start")
        submission.timeout_ms = max(1, round(left_s * 1000))
    changed = asyncio.Event()
    generations = [
        Generation(
            prompt_token_ids=submission.token_ids,
            changed=changed,
            sampling=job.sampling,
            sample=sample,
            follow=follow,
            # A match inside a longer stop string waits for that one: it may end before tokens that
            # have been answered for.
            hold_ids=_nested(job.stop),
            load=job.load,
        )
        for sample in range(job.num_samples)
    ]
    sessions = [_open_text(text, generation, job) for generation in generations]
    try:
        first = engine.submit(submission, generations)
    except MillstreamError:
        for session in sessions:
            if session is not None:
                session.discard()
        raise
    for handle, (generation, session) in enumerate(zip(generations, sessions, strict=True), first):
        generation.bind(cancel=functools.partial(engine.cancel, handle), text=session)
    return Samples(generations, changed, deadline)


def _open_text(text: TextStream | None, generation: Generation, job: Job) -> TextSession | None:
    if text is None or not job.detokenize:
        return None
    return text.open(
        generation,
        stop=job.stop,
        min_tokens=job.submission.sampling.min_tokens,
        include_stop=job.sampling.include_stop,
        skip_special_tokens=job.sampling.skip_special_tokens,
    )


def _nested(stop: Sequence[str]) -> bool:
    """Whether a stop string lies inside another one, apart from its ends."""
    texts = set(stop)
    return any(inner in outer[1:-1] for outer in texts if len(outer) > 2 for inner in texts)
