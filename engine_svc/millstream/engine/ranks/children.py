"""Rank 0's side of a model spread over processes: starts the other ranks, and notices their end.

    create_runner -> ranks thread: Popen of process.py for each other rank, then watches them
                  -> runner.py: rank 0's own part, and the plans that all of them get

Each rank has one end of a socket pair. It tells there that it has loaded, that it is ready, or why
it failed, and exits at the end of file. Plans go through the ring's memfd, gloo and NCCL meet at a
store that listens on a loopback port of the system's choice: there is no name that two engines
could share, nothing in the file system, and nothing is left when the processes have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millstream.engine.config import EngineConfig
from millstream.engine.ranks.ring import RingFiles, RingWriter
from millstream.engine.startup.phases import Phases

if TYPE_CHECKING:
    from millstream.engine.ranks.runner import RanksRunner

logger = logging.getLogger(__name__)

OnLost = Callable[[str], None]

_RING_WORDS = 1 << 17  # 1 MiB: the plans of two steps of 8192 prompt tokens, and room to spare
_LOADED, _READY = "loaded", "ready"
_STOP_S = 2.0  # from the end of file to SIGKILL; a rank needs milliseconds
# From the first sign that a rank is lost: the one that was killed may show later than those that
# failed because of it.
_CAUSE_S = 0.1
# From an error in our own step until the ranks thread knows which rank is behind it.
_REASON_S = 1.0
# Multicast is off, in processes that torch and NCCL start in, whoever starts them.
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class RankLost(RuntimeError):
    """A rank failed or was killed: the model can compute no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank is told first, as a line of JSON."""

    config: EngineConfig
    model_dir: str | None
    rank: int
    store_port: int
    log_level: str


@dataclass(slots=True)
class _Rank:
    """A rank's process as rank 0 sees it."""

    number: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    stage: str = ""
    received: bytes = b""


class RankProcesses:
    """The other ranks' processes. A thread starts and watches them: they are killed when the thread
    that started them ends, which may be no thread of a caller's."""

    def __init__(self, start: RankStart, files: RingFiles, on_lost: OnLost) -> None:
        """start: its rank is set for each. files: the ring's, inherited by the ranks.

        on_lost: called on the watching thread when a rank is lost that was not to end.
        """
        self._size = start.config.tensor_parallel_size
        self._on_lost: OnLost | None = on_lost  # None once close() is called
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._ranks: list[_Rank] = []
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(start, files), name="ranks", daemon=True
        )
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()

    def wait_loaded(self) -> None:
        """Waits until all ranks have loaded their part. Raises RankLost."""
        self._wait_for(_LOADED, _READY)

    def wait_ready(self) -> None:
        """Waits until all ranks wait for plans. Raises RankLost."""
        self._wait_for(_READY)

    def _wait_for(self, *stages: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost or all(rank.stage in stages for rank in self._ranks)
            )
        self.check()

    def check(self) -> None:
        """Raises RankLost if a rank is lost."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def explain(self) -> None:
        """After an error that a lost rank may be behind: raises RankLost if so, within a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout=_REASON_S)
        self.check()

    def close(self) -> None:
        """Ends the processes and waits for their end; idempotent."""
        self._on_lost = None
        self._stop.close()
        self._thread.join()

    # ---- on the thread

    def _run(self, start: RankStart, files: RingFiles) -> None:
        try:
            for rank in range(1, self._size):
                self._ranks.append(_start(replace(start, rank=rank), files))
            self._started.set()
            if (reason := self._watch()) is not None:
                with self._changed:
                    self._lost = reason
                    self._changed.notify_all()
                if (on_lost := self._on_lost) is not None:
                    on_lost(reason)
                self._stopped.recv(1)  # end of file: close() was called
        finally:
            self._started.set()
            self._end()

    def _watch(self) -> str | None:
        """Notes what ranks tell; returns why one is lost, or None when close() is called."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            for rank in self._ranks:
                selector.register(rank.control, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return None
                    if (reason := self._hear(key.data)) is not None:
                        return self._cause() or reason

    def _hear(self, rank: _Rank) -> str | None:
        """Reads what a rank tells; why it is lost, if it is."""
        try:
            data = rank.control.recv(1 << 16)
        except ConnectionError:
            data = b""
        *lines, rank.received = (rank.received + data).split(b"\n")
        for line in lines:
            if line.startswith(b"failed "):
                return line.decode(errors="replace").removeprefix("failed ")
            with self._changed:
                rank.stage = line.decode()
                self._changed.notify_all()
        if data:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(_CAUSE_S)
        return f"rank {rank.number} of {self._size} {_how_it_ended(rank.process.returncode)}"

    def _cause(self) -> str | None:
        """Of several that fail at once: the one that was killed."""
        time.sleep(_CAUSE_S)
        for rank in self._ranks:
            code = rank.process.poll()
            if code is not None and code < 0:
                return f"rank {rank.number} of {self._size} {_how_it_ended(code)}"
        return None

    def _end(self) -> None:
        for rank in self._ranks:
            rank.control.close()
        deadline = time.monotonic() + _STOP_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._stopped.close()


def _start(start: RankStart, files: RingFiles) -> _Rank:
    ours, theirs = socket.socketpair()
    fds = (theirs.fileno(), files.memory, files.wakers[start.rank - 1])
    # A new interpreter, never a bare fork: this process may have threads and a GPU's context. -P:
    # nothing in the working directory is taken for a module of the same name.
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.engine.ranks.process", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **_NO_MULTICAST},
        )
    ours.sendall(msgspec.json.encode(start) + b"\n")
    return _Rank(start.rank, process, ours)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def create_runner(config: EngineConfig, model_dir: Path | None, on_lost: OnLost) -> RanksRunner:
    """Loads a model over config.tensor_parallel_size processes, of which this is rank 0.

    on_lost: called on a thread of ours once a rank is lost; what waits for a step (on GPUs, for
    ever), or waits idle, hears of it no other way. Raises LoadError for a model that cannot be
    spread so, or what keeps a rank from loading.
    """
    phases = Phases()
    size = config.tensor_parallel_size
    os.environ.update(_NO_MULTICAST)
    listener = socket.create_server(("127.0.0.1", 0))
    files = RingFiles.create(size - 1, _RING_WORDS)
    start = RankStart(
        config=config,
        model_dir=None if model_dir is None else str(model_dir),
        rank=0,
        store_port=listener.getsockname()[1],
        log_level=logging.getLevelName(logger.getEffectiveLevel()).lower(),
    )
    processes = RankProcesses(start, files, on_lost)
    ring = RingWriter(files, on_wait=processes.check)
    files.close()
    # Only now: importing torch takes a second or more, and all ranks do it at once.
    from millstream.engine.ranks.runner import load

    phases.end("starting ranks")
    return load(config, model_dir, listener, ring, processes, phases)
