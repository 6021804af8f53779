"""Abort with a long list, against a service that only notes what it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from millstream.engine.frontend.streams import Stream
from millstream.engine.vllm_dialect.servicer import VllmServicer

COUNT = 50_000


class NotingService:
    def __init__(self) -> None:
        self.cancelled: list[list[int]] = []

    def cancel(self, stream: Stream, handles: Iterable[int]) -> None:
        self.cancelled.append(list(handles))


async def test_row_88_others_have_turns_and_each_request_is_aborted_once() -> None:
    """Each time that an id came the core was told, and nobody else had a turn meanwhile."""
    noting, context = NotingService(), None
    service: Any = noting
    servicer = VllmServicer(service)
    turns = 0

    async def be_another() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(be_another())
    stream = Stream(1)
    stream.accept(0, None, lambda: None)  # type: ignore[arg-type, return-value]
    with servicer._named(vllm.GenerateRequest(request_id="mine"), stream):
        request = vllm.AbortRequest(request_ids=["another", "mine"] * (COUNT // 2))
        await servicer.Abort(request, context)  # type: ignore[arg-type]
    other.cancel()
    assert noting.cancelled == [[0]]
    assert turns >= COUNT // 10_000
