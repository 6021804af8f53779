"""The outermost frame of a process: event loop, exit code, a line when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn


def open_standard_streams() -> None:
    """What the parent closed of stdin, stdout and stderr becomes /dev/null: Python has None there,
    and the next file or socket would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def run_and_exit(prog: str, serve: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Runs `serve` on an event loop and exits with its result; with 1 and one line on stderr after
    a StartError; with 130 after a Ctrl-C before the service took the signals over."""
    from millstream.rpc.server import StartError  # brings grpc

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_deaf_at_the_end(serve()))
    except StartError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    except KeyboardInterrupt:
        code = 130
    leave(code)


def leave(code: int) -> NoReturn:
    """Exits without waiting for threads. The interpreter would join those of executors, also a
    library's: an interrupted download went on to the end of its files."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def freeze_what_lives() -> None:
    """To be called once all is loaded. What lives then lives to the end: never look at it again
    when collecting garbage, which held a front end's streams up for 20 ms, again and again."""
    gc.collect()
    gc.freeze()


async def _deaf_at_the_end(serving: Coroutine[Any, Any, int]) -> int:
    """A signal in the last milliseconds, when the loop no longer handles it, would end the process
    with the exit code of a crash."""
    try:
        return await serving
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: 1.3 to 2 times as fast for a message per step."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
