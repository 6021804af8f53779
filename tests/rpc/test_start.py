"""The installed commands: Ctrl-C at any moment of their start is a quiet exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WAITS = "generate x --engine 127.0.0.1:1 --tokenizer 127.0.0.1:1 --connect-timeout-s 30"


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.1, 0.2, 0.3])
def test_ctrl_c_while_importing_is_a_quiet_exit(after_s: float) -> None:
    program = "from millstream.rpc.start import client; print('up', flush=True); client()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, *WAITS.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, "")


@pytest.mark.parametrize("name", ["client", "engine", "tokenizer"])
def test_each_starts_its_command(name: str) -> None:
    program = f"from millstream.rpc.start import {name}; {name}()"
    command = [sys.executable, "-P", "-c", program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: millstream")
