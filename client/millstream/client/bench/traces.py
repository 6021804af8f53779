"""What a client saw of its requests, noted as a stream's messages come. Messages are not kept: the
garbage collector would look at all of them again and again, a twentieth of the client's work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.client.naming import from_service
from millstream.rpc.errors import MillstreamError
from millstream.v1 import engine_pb2


@dataclass(slots=True, kw_only=True)
class Trace:
    """One request; times in seconds of one clock."""

    sent_s: float
    pieces: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: MillstreamError | None = None

    @property
    def failure(self) -> str | None:
        """Why there is no answer; None if there is one."""
        if self.error is not None:
            return str(self.error)
        return None if self.pieces else "it ended without a token"

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def ttft_s(self) -> float:
        """Only of a trace with pieces, as the next two."""
        return self.pieces[0][0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.pieces[-1][0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens; 0 with a single piece."""
        gaps = self.output_tokens - 1
        return (self.pieces[-1][0] - self.pieces[0][0]) / gaps if gaps else 0.0

    def itl_s(self) -> list[float]:
        """The time before each token but those of the first piece."""
        return [
            (when - before) / count
            for (before, _), (when, count) in itertools.pairwise(self.pieces)
            for _ in range(count)
        ]


class StreamTraces:
    """Notes what comes on one Generate stream of the requests in `traces`, by request id; other
    requests of the stream are left out. A request that was refused and sent again, to the same
    engine or another, is one."""

    def __init__(self, traces: Mapping[str, Trace]) -> None:
        """traces: looked at when a request is accepted."""
        self._traces = traces
        self._live: dict[int, Trace] = {}  # by handle

    def note(self, when_s: float, message: engine_pb2.GenerateResponse) -> None:
        """The stream's next message, and when it came."""
        live = self._live
        for accepted in message.accepted:
            if accepted.request_id in self._traces:
                live[accepted.handle] = self._traces[accepted.request_id]
        output = message.output
        counts = output.counts or itertools.repeat(1, len(output.handles))
        for handle, count in zip(output.handles, counts, strict=True):
            if handle in live:
                live[handle].pieces.append((when_s, count))
        for finished in message.finished:
            trace = live.pop(finished.handle, None)
            if trace is not None:
                trace.prompt_tokens = finished.usage.prompt_tokens
                trace.cached_tokens = finished.usage.cached_tokens
                if finished.HasField("status"):
                    trace.error = from_service(finished.status)
