"""The engine that a benchmark measures: one that it starts, or one that runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millstream.client.aio import AsyncClient
from millstream.client.bench.progress import Progress
from millstream.client.bench.senders import OneStream, Sender, StreamPerRequest, TextStreams
from millstream.client.bench.turns import open_turns
from millstream.client.engines import engine_targets
from millstream.client.launch import alaunch
from millstream.v1 import engine_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`engine` (one or several), `tokenizer`: gRPC targets of services that run; None: started,
    with `model` and `options`, the tokenizer only for text."""

    engine: str | Sequence[str] | None
    tokenizer: str | None
    model: str | None
    options: Mapping[str, Any]
    streams: Literal["one", "per-request"] = "one"
    channels: int = 1  # for streams of their own
    text: bool = False


@contextlib.asynccontextmanager
async def open_sender(
    target: Target, progress: Progress
) -> AsyncIterator[tuple[Sender, engine_pb2.EngineInfo]]:
    """Connects, starting what is to be started. Raises LaunchError, EngineUnavailable."""
    one_stream = OneStream(progress)
    async with _client(target, None if target.text else one_stream) as client:
        info = (await client.info()).engine
        assert info is not None
        if target.text:
            yield TextStreams(client, progress), info
        elif target.streams == "per-request":
            engines = engine_targets(client.engine_target)
            async with open_turns(engines, target.channels) as turns:
                yield StreamPerRequest(client, turns, progress), info
        else:
            one_stream.client = client
            yield one_stream, info


@contextlib.asynccontextmanager
async def _client(target: Target, observed: OneStream | None) -> AsyncIterator[AsyncClient]:
    """observed: what is told of each message."""
    if engines := engine_targets(target.engine):
        tokenizer = target.tokenizer if target.text else None
        observers = (
            {engine: observed.new_observer() for engine in engines}
            if observed is not None
            else None
        )
        async with AsyncClient(engines, tokenizer, observer=observers) as client:
            yield client
    else:
        launched = alaunch(
            target.model,
            tokenizer=target.text,
            observer=None if observed is None else observed.new_observer(),
            **target.options,
        )
        async with launched as client:
            yield client
