"""The two services as child processes: started on free ports, watched, stopped.

Each child has one end of a socket pair. It writes {"port": N} there once it serves, and stops when
the other end is closed; so children never outlive their parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

_STOP_GRACE_S = 8.0  # then SIGKILL


class LaunchError(RuntimeError):
    """A service did not start, or stopped by itself; the message has the service's own reason."""


class ServiceProcess:
    """One child. `port` is None until it serves."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        quiet: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts `python -m millstream.NAME`. `quiet`: its log is kept for the error message
        instead of being shown. `environment`: beside this process's."""
        self.name = name
        self.port: int | None = None
        self._log: IO[bytes] | None = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115
        self._received = b""
        self.control, theirs = socket.socketpair()
        with theirs:
            control = ["--control-fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"millstream.{name}", *arguments, *control],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the parent, which stops its children
            )

    def read_control(self) -> bool:
        """Call it when `control` is readable; False when the child has closed its end."""
        data = self.control.recv(4096)
        self._received += data
        if b"\n" in self._received:
            self.port = json.loads(self._received)["port"]
        return bool(data)

    def failure(self) -> LaunchError:
        """Why it ended, in one line."""
        code = self.process.wait(_STOP_GRACE_S)
        shown = " (its log says why)" if self._log is None else ""
        ended = f"signal {-code}" if code < 0 else f"exit code {code}{shown}"
        verb = "did not start" if self.port is None else "stopped"
        reason = ended if self._log is None else self._last_error() or ended
        return LaunchError(f"the {self.name} {verb}: {reason}")

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait_stopped(self, deadline: float) -> None:
        """Waits until time.monotonic() is `deadline`, then kills it and its own children."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        finally:
            self.control.close()
            if self._log is not None:
                self._log.close()

    def _last_error(self) -> str:
        """The service's own error line, or the last line that it wrote."""
        assert self._log is not None
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        marker = f"millstream-{self.name}: error: "
        errors = [line.removeprefix(marker) for line in lines if line.startswith(marker)]
        return (errors or lines or [""])[-1]


class ServiceProcesses:
    """The children of one launch. A context manager: leaving it stops them."""

    def __init__(self) -> None:
        self._children: list[ServiceProcess] = []

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        quiet: bool,
        environment: Mapping[str, str] | None = None,
    ) -> ServiceProcess:
        child = ServiceProcess(name, arguments, quiet=quiet, environment=environment)
        self._children.append(child)
        return child

    def wait_serving(self, timeout_s: float | None = None) -> None:
        """Returns when all serve. Raises LaunchError when one ends, or is not ready in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while starting := [child.name for child in self._children if child.port is None]:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise LaunchError(f"the {starting[0]} did not start within {timeout_s:g} s")
            self._watch(left_s)

    def wait_failure(self) -> None:
        """Blocks for as long as all serve, then raises LaunchError."""
        while True:
            self._watch(None)

    def stop(self) -> None:
        """Asks all to stop, waits, kills what is left. A second Ctrl-C kills at once."""
        deadline = time.monotonic() + _STOP_GRACE_S
        for child in self._children:
            child.terminate()
        try:
            for child in self._children:
                child.wait_stopped(deadline)
        except BaseException:
            for child in self._children:
                child.wait_stopped(0)
            raise
        finally:
            self._children.clear()

    def __enter__(self) -> ServiceProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self, timeout_s: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.control, selectors.EVENT_READ, child)
            for key, _ in selector.select(timeout_s):
                if not key.data.read_control():
                    raise key.data.failure()
