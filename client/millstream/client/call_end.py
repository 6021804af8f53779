"""How a call ended: of a write that meets its end, grpc.aio forgets what the service said, and says
INTERNAL in its place (grpc/grpc#36066)."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

T = TypeVar("T")


class CallEnd:
    """Remembers a call's first status, which is the service's where it said one."""

    def __init__(self, call: Any) -> None:
        self.error: grpc.aio.AioRpcError | None = None  # while it runs, and if it ended well
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        code = _known(call.code())
        if code is not grpc.StatusCode.OK:
            self.error = grpc.aio.AioRpcError(
                code,
                grpc.aio.Metadata(),  # of no interest
                _known(call.trailing_metadata()),
                _known(call.details()),
            )


def _known(answer: Coroutine[Any, Any, T]) -> T:
    """Of a call that has ended: nothing is waited for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    answer.close()
    raise AssertionError("it has ended")
