"""Submissions become requests of the core: admitted, held while a grammar is compiled, accepted or
refused; and ended early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from millstream.engine.frontend.admission import Admission
from millstream.engine.frontend.preparations import HeldSubmission, Preparations
from millstream.engine.frontend.streams import Stream
from millstream.engine.frontend.supervisor import Supervisor
from millstream.engine.records import handle_of, make_key
from millstream.engine.request import FinishReason, Request, Sampling
from millstream.engine.validation.sampling import resolved_sampling
from millstream.rpc.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    MillstreamError,
    to_status,
)
from millstream.v1 import engine_pb2

logger = logging.getLogger(__name__)


class Intake:
    """The way of requests into one core. Everything runs on the event loop."""

    def __init__(self, core: Supervisor) -> None:
        self._core = core
        self.admission: Admission | None = None  # once the core is loaded
        self._preparations = Preparations(
            core.prepare_grammar,
            core.forget_grammar,
            on_ready=self._accept_held,
            on_refused=self._refuse_held,
        )

    def submit(
        self,
        stream: Stream,
        submissions: Iterable[engine_pb2.Submission],
        unavailable: str | None,
    ) -> None:
        """Accepts or refuses each, or puts it on hold; those accepted go to the core as one record.
        `unavailable`: why the engine takes none, if it does not."""
        firsts: list[Request] = []
        num_new = num_new_ids = 0
        for submission in submissions:
            try:
                samples = self._admit(stream, submission, num_new, num_new_ids, unavailable)
            except Exception as error:
                self._refuse(stream, submission.handle, error)
                continue
            timers = [self._deadline_timer(stream, submission, sample) for sample in samples]
            grammar = samples[0].sampling.grammar
            if grammar is not None and not self._preparations.is_ready(grammar):
                held = HeldSubmission(
                    stream=stream, samples=samples, grammar=grammar, timers=timers
                )
                self._preparations.hold(held)
                continue
            firsts.append(samples[0])
            num_new += len(samples)
            num_new_ids += samples[0].num_ids_of_all
            for sample, timer in zip(samples, timers, strict=True):
                self._accept(stream, sample, timer)
        self._core.submit(firsts)

    def _accept(self, stream: Stream, sample: Request, timer: asyncio.TimerHandle | None) -> None:
        logger.debug("accepted %r", sample.request_id)  # the caller's text
        handle = handle_of(sample.key)
        stream.accept(handle, timer, partial(_accepted, handle, sample.request_id, sample.sampling))

    def _refuse(self, stream: Stream, handle: int, error: Exception) -> None:
        if not isinstance(error, MillstreamError):
            logger.error("validating a submission failed", exc_info=error)
        status = to_status(error)
        stream.reject(engine_pb2.Rejected(handle=handle, status=status))
        logger.debug("stream %d: refused: %s", stream.number, status.message)

    def _accept_held(self, held: HeldSubmission) -> None:
        cancelled: list[int] = []
        for sample in held.samples:
            handle = handle_of(sample.key)
            hold = held.stream.release(handle)
            self._accept(held.stream, sample, hold.timer)
            if hold.cancelled:
                cancelled.append(handle)
        self._core.submit(held.samples[:1])
        self.finish(held.stream, cancelled, FinishReason.CANCELLED)

    def _refuse_held(self, held: HeldSubmission, error: Exception) -> None:
        for sample in held.samples:
            hold = held.stream.release(handle_of(sample.key))
            if hold.timer is not None:
                hold.timer.cancel()
        self._refuse(held.stream, handle_of(held.samples[0].key), error)

    def _admit(
        self,
        stream: Stream,
        submission: engine_pb2.Submission,
        num_new: int,
        num_new_ids: int,
        unavailable: str | None,
    ) -> list[Request]:
        """The submission's samples. Raises the MillstreamError that refuses it."""
        if unavailable is not None:
            raise EngineUnavailable(unavailable)
        assert self.admission is not None
        num_live = self._core.num_live + self._preparations.num_held + num_new
        num_ids = self._core.num_ids + self._preparations.num_ids_held + num_new_ids
        return self.admission.admit(stream, submission, num_live, num_ids)

    def _deadline_timer(
        self, stream: Stream, submission: engine_pb2.Submission, sample: Request
    ) -> asyncio.TimerHandle | None:
        if not submission.HasField("timeout_ms"):
            return None
        return asyncio.get_running_loop().call_later(
            submission.timeout_ms / 1000,
            self.finish,
            stream,
            (handle_of(sample.key),),
            FinishReason.DEADLINE,
        )

    def finish(self, stream: Stream, handles: Iterable[int], reason: FinishReason) -> None:
        """Ends requests early; unknown and finished ones are ignored. Of those on hold the
        cancelled ones end as soon as they are accepted, the others are refused, with all samples
        of their submission."""
        with_core: list[int] = []
        for handle in handles:
            hold = stream.held(handle)
            if hold is None:
                with_core.append(handle)
            elif reason is FinishReason.CANCELLED:
                hold.cancelled = True
            elif reason is FinishReason.DEADLINE:
                hold.give_up(DeadlineExceeded("timeout_ms passed before its grammar was compiled"))
            else:
                hold.give_up(EngineUnavailable("the engine is stopping"))
        self._core.finish([make_key(stream.number, handle) for handle in with_core], reason)


def _accepted(handle: int, request_id: str, sampling: Sampling) -> engine_pb2.Accepted:
    return engine_pb2.Accepted(
        handle=handle, request_id=request_id, sampling=resolved_sampling(sampling)
    )
