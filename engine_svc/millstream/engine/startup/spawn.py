"""Starts the core process. Imports little: the front end does this first, the rest beside it."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from millstream.engine.channel import framed, socket_pair
from millstream.engine.config import EngineConfig
from millstream.engine.records import Start
from millstream.engine.startup.child_process import deaf_from_birth


@dataclass(frozen=True, slots=True)
class SpawnedCore:
    """A core process that knows its config and waits to be told where the model lies."""

    process: subprocess.Popen[bytes]
    connection: socket.socket  # the front end's end; the core exits when it is closed
    spawned_s: float  # when, on time.monotonic()'s clock


def spawn_core(config: EngineConfig) -> SpawnedCore:
    """Takes milliseconds. The core is killed when the calling thread ends."""
    front, core = socket_pair()
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
    # -P: nothing in the working directory is taken for a module of the same name.
    command = [sys.executable, "-P", "-m", "millstream.engine.core_process"]
    spawned_s = time.monotonic()
    # A new interpreter, never a bare fork: grpc may have threads by now.
    with core, deaf_from_birth():
        process = subprocess.Popen(
            [*command, "--fd", str(core.fileno()), "--log-level", level],
            pass_fds=(core.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
    front.sendall(framed(Start(config)))
    return SpawnedCore(process, front, spawned_s)
