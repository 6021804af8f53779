"""Admission: which submissions the front end takes, as which requests; and why not the others.

The queue is bounded, in requests and in the token ids that they hold. A client that has nothing in
the engine gets in a little beyond the bound, so that one that fills the queue does not turn all
others away.
"""

from __future__ import annotations

import secrets

from millstream.engine.frontend.backpressure import PlacesComeFree
from millstream.engine.frontend.streams import Stream
from millstream.engine.plan import RunnerInfo
from millstream.engine.records import make_key
from millstream.engine.request import Request
from millstream.engine.validation.submissions import check_samples, to_requests
from millstream.rpc.errors import DuplicateHandle, NeverFits, QueueFull
from millstream.v1 import engine_pb2

_RESERVE = 8  # one place for newcomers for so many in the queue
# That all requests hold together; in the core 47 bytes each, so 3 GB.
MAX_LIVE_IDS = 1 << 26


class Admission:
    """Belongs to one loaded engine. Times are seconds of one monotonic clock."""

    def __init__(
        self, info: RunnerInfo, max_queued_requests: int, defaults: engine_pb2.SamplingParams
    ) -> None:
        self._info = info
        self._max_queued = max_queued_requests
        self._num_places = info.max_num_seqs + max_queued_requests
        self._defaults = defaults
        self._places = PlacesComeFree(self._num_places)

    def admit(
        self, stream: Stream, submission: engine_pb2.Submission, num_live: int, num_ids: int
    ) -> list[Request]:
        """The samples that a submission asks for, on consecutive handles. `num_live`: requests in
        the engine, which hold `num_ids` token ids. Raises the MillstreamError that refuses all of
        it."""
        num_samples = check_samples(submission)
        first = submission.handle
        for handle in range(first, first + num_samples):
            if stream.in_use(handle):
                raise DuplicateHandle(f"handle: {handle} is in use", field="handle")
        self._check_room(stream, num_samples, num_live)
        if not submission.request_id:
            submission.request_id = f"{stream.number}-{first}"
        samples = to_requests(
            submission,
            key=make_key(stream.number, first),
            info=self._info,
            random_seed=secrets.randbits(64),
            defaults=self._defaults,
            client=stream.client.number,
        )
        self._check_ids(stream, samples, num_ids)
        return samples

    def note_step(self, num_ended: int, num_live: int, now: float) -> None:
        """A step is done: so many requests ended, and so many are left."""
        busy = num_live + num_ended >= self._info.max_num_seqs
        self._places.note(num_ended, busy=busy, now=now)

    def _check_room(self, stream: Stream, num_samples: int, num_live: int) -> None:
        most = self._num_places
        if num_samples > most:
            raise NeverFits(
                f"sampling.n: {num_samples} samples are more than run and wait at once ({most})",
                field="sampling.n",
            )
        if stream.client.num_live == 0:
            most += -(-self._max_queued // _RESERVE)
        if num_live + num_samples > most:
            raise QueueFull(
                f"{self._max_queued} requests wait already",
                retry_after_s=self._places.retry_after_s(num_samples),
            )

    def _check_ids(self, stream: Stream, samples: list[Request], num_ids: int) -> None:
        """What is alone is never too large."""
        most = MAX_LIVE_IDS
        if stream.client.num_live == 0:
            most += -(-MAX_LIVE_IDS // _RESERVE)
        if num_ids and num_ids + samples[0].num_ids_of_all > most:
            raise QueueFull(
                f"requests with {num_ids} token ids run and wait already",
                retry_after_s=self._places.retry_after_s(len(samples)),
            )
