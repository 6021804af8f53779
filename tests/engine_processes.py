"""Real engine processes for tests: each on a free port, each ended with its core at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import grpc

from millstream.rpc import errors
from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, channel_options
from millstream.v1 import engine_pb2, engine_pb2_grpc

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 30


class EngineProcess:
    """`python -m millstream.engine` as a subprocess; `port` once it serves."""

    def __init__(self, *flags: str, runner: str = "tests.fake_runners:echo") -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "millstream.engine", "--port", "0"),
                    *("--runner", runner, "--control-fd", str(theirs.fileno()), *flags),
                ],
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.port = 0

    def wait_until_serving(self, timeout_s: float = START_TIMEOUT_S) -> None:
        self._control.settimeout(timeout_s)
        line = self._control.makefile().readline()
        if not line:
            raise RuntimeError(f"the engine did not start: {self.finish()}")
        self.port = json.loads(line)["port"]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def core_pid(self) -> int:
        """The core's process id, once there is one."""
        pid = self.process.pid
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                if b"core_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
            time.sleep(0.01)
        raise AssertionError("no core process")

    def finish(self, timeout_s: float = 15) -> str:
        """Waits for the end; returns stderr."""
        try:
            _, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return stderr

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.finish()
        self._control.close()


@contextlib.contextmanager
def engine(*flags: str, runner: str = "tests.fake_runners:echo") -> Iterator[EngineProcess]:
    """An engine that serves; ended at the end, whatever happened to it."""
    started = EngineProcess(*flags, runner=runner)
    try:
        started.wait_until_serving()
        yield started
    finally:
        started.stop()


@contextlib.asynccontextmanager
async def connect(
    target: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> AsyncIterator[engine_pb2_grpc.EngineStub]:
    options = channel_options(target, max_message_bytes)
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield engine_pb2_grpc.EngineStub(channel)


def listening_port(pid: int) -> int:
    """From /proc: the port on which a process listens."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        inodes = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(fd.readlink()))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    return int(fields[1].split(":")[1], 16)
        time.sleep(0.02)
    raise AssertionError("not listening")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def gone(pid: int, within_s: float) -> bool:
    """Whether a process ends in time; if not, it is ended."""

    async def ended() -> bool:
        return not alive(pid)

    if not await eventually(ended, within_s):
        os.kill(pid, signal.SIGKILL)
        return False
    return True


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def submission(
    handle: int,
    token_ids: Sequence[int] = (1, 2, 3),
    *,
    timeout_ms: int | None = None,
    priority: int | None = None,
    **sampling: object,
) -> engine_pb2.Submission:
    return engine_pb2.Submission(
        handle=handle,
        token_ids=token_ids,
        timeout_ms=timeout_ms,
        priority=priority,
        sampling=engine_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )


async def stats_of(stub: engine_pb2_grpc.EngineStub) -> engine_pb2.GetStatsResponse:
    return await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=10)


class Stream:
    """A Generate stream that sorts what comes by handle."""

    def __init__(
        self,
        stub: engine_pb2_grpc.EngineStub,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> None:
        metadata = None if api_key is None else [("x-api-key", api_key)]
        self.call = stub.Generate(timeout=timeout_s, metadata=metadata)
        self.messages: list[engine_pb2.GenerateResponse] = []
        self.ready: engine_pb2.EngineInfo | None = None
        self.accepted: dict[int, engine_pb2.Accepted] = {}
        self.rejected: dict[int, engine_pb2.Rejected] = {}
        self.finished: dict[int, engine_pb2.Finished] = {}
        self.token_ids: dict[int, list[int]] = {}

    async def submit(self, *submissions: engine_pb2.Submission) -> None:
        await self.call.write(engine_pb2.GenerateRequest(submit=submissions))

    async def cancel(self, *handles: int) -> None:
        await self.call.write(engine_pb2.GenerateRequest(cancel=handles))

    async def read(self) -> engine_pb2.GenerateResponse | None:
        """The next message, sorted and checked; None at the end of the stream."""
        message = await self.call.read()
        if not isinstance(message, engine_pb2.GenerateResponse):
            return None
        self._sort(message)
        return message

    async def until_ended(self, *handles: int, timeout_s: float = 20) -> None:
        """Reads until these handles are finished or rejected."""
        async with asyncio.timeout(timeout_s):
            while not all(h in self.finished or h in self.rejected for h in handles):
                assert await self.read() is not None, await self.status()

    async def until_token(self, *handles: int, timeout_s: float = 20) -> None:
        async with asyncio.timeout(timeout_s):
            while not all(self.token_ids.get(h) for h in handles):
                assert await self.read() is not None, await self.status()

    async def status(self, timeout_s: float = 20) -> tuple[grpc.StatusCode, str]:
        """Reads to the end; the RPC's status."""
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self.read() is not None:
                    pass
            return await self.call.code(), await self.call.details()

    def refusal(self, handle: int) -> errors.MillstreamError:
        """What a rejected request was told."""
        return errors.from_status(self.rejected[handle].status)

    def _sort(self, message: engine_pb2.GenerateResponse) -> None:
        assert message.HasField("ready") == (not self.messages), "ready is the first, and only it"
        self.messages.append(message)
        if message.HasField("ready"):
            self.ready = message.ready.engine
        for accepted in message.accepted:
            assert accepted.handle not in self.accepted
            self.accepted[accepted.handle] = accepted
            self.token_ids[accepted.handle] = []
        for rejected in message.rejected:
            self.rejected[rejected.handle] = rejected
        output = message.output
        counts = output.counts or [1] * len(output.handles)
        assert len(counts) == len(output.handles) == len(set(output.handles))
        assert sum(counts) == len(output.token_ids)
        position = 0
        for handle, count in zip(output.handles, counts, strict=True):
            assert handle not in self.finished, "tokens after the end"
            self.token_ids[handle] += output.token_ids[position : position + count]
            position += count
        for finished in message.finished:
            handle = finished.handle
            assert handle not in self.finished
            assert finished.usage.output_tokens == len(self.token_ids[handle])
            self.finished[handle] = finished

    def forget(self, handle: int) -> None:
        """Before a handle is used again."""
        for table in (self.accepted, self.rejected, self.finished, self.token_ids):
            table.pop(handle, None)  # type: ignore[attr-defined]
