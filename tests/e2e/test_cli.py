"""The command line with the real services and the real default model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_MILLSTREAM = [sys.executable, "-m", "millstream.client"]
_QUESTION = "What is the capital of France?"
_ANSWER = "The capital of France is Paris."


@contextlib.contextmanager
def _serve(log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """`millstream serve` on free ports, and where its services listen."""
    ports = ["--engine-port", "0", "--tokenizer-port", "0", "--max-num-seqs", "8"]
    with log.open("wb") as file:
        process = subprocess.Popen([*_MILLSTREAM, "serve", *ports, *flags], stderr=file)
    try:
        targets: dict[str, str] = {}
        deadline = time.monotonic() + 120
        while len(targets) < 2:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
            targets = dict(
                re.findall(r"serve .*: (engine|tokenizer) on (\S+:\d+)$", log.read_text(), re.M)
            )
        yield process, targets
    finally:
        process.kill()
        process.wait()


def _run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_MILLSTREAM, *argv], input=stdin, capture_output=True, text=True, timeout=120
    )


def test_serve_and_its_clients(default_model_dir: Path, tmp_path: Path) -> None:
    """One served pair for all commands: it takes seconds to start."""
    assert default_model_dir.is_dir()  # obtained before anything is timed
    with _serve(tmp_path / "log") as (process, targets):
        where = [f"--{name}={target}" for name, target in targets.items()]
        health = _run("health", *where)
        assert (health.returncode, health.stdout.count(": serving")) == (0, 2)

        shown = _run("generate", _QUESTION, "--temperature", "0", *where)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"{_ANSWER}\n", "")
        shown = _run("generate", "--raw", "--temperature=0", "The capital of France is", *where)
        assert shown.stdout.startswith(" Paris")
        shown = _run("generate", "-", "--json", "--max-tokens", "3", *where, stdin="Once upon")
        result = json.loads(shown.stdout)
        assert result["usage"]["output_tokens"] == len(result["token_ids"]) == 3
        shown = _run("chat", "--temperature", "0", *where, stdin=f"{_QUESTION}\n/exit\n")
        assert shown.stdout == f"{_ANSWER}\n"
        refused = _run("generate", "x", "--top-p", "7", *where)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
        assert "top_p" in refused.stderr

        taken = targets["engine"].rsplit(":", 1)[1]
        second = _run("serve", "--engine-port", taken, "--tokenizer-port", "0")
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{taken}" in second.stderr
        assert "Traceback" not in second.stderr

        _stops(process, signal.SIGTERM, 0)
        assert all(_closed(target) for target in targets.values())
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_serve_stops_on_ctrl_c(default_model_dir: Path, tmp_path: Path) -> None:
    with _serve(tmp_path / "log", "--model", str(default_model_dir)) as (process, targets):
        _stops(process, signal.SIGINT, 130)
        assert all(_closed(target) for target in targets.values())
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("victim", ["engine", "tokenizer"])
def test_serve_ends_when_a_service_dies(
    default_model_dir: Path, tmp_path: Path, victim: str
) -> None:
    with _serve(tmp_path / "log", "--model", str(default_model_dir)) as (process, targets):
        os.kill(_child(process.pid, f"millstream.{victim}"), signal.SIGKILL)
        assert process.wait(10) == 1
        assert all(_closed(target) for target in targets.values())
    last = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert last == f"millstream serve: error: the {victim} stopped: signal 9"


def test_serve_that_is_killed_takes_its_services_along(
    default_model_dir: Path, tmp_path: Path
) -> None:
    with _serve(tmp_path / "log", "--model", str(default_model_dir)) as (process, targets):
        process.kill()
        deadline = time.monotonic() + 10
        while not all(_closed(target) for target in targets.values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_demo(default_model_dir: Path) -> None:
    shown = _run("demo")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[:2] == [f"> {_QUESTION}", _ANSWER]
    assert re.search(r"37 prompt tokens, \d+ output tokens .* tokens/s", lines[2])
    assert _run("demo", "Say hi.", "--max-tokens", "4").stdout.startswith("> Say hi.\n")


def test_fetch_prints_the_folder(default_model_dir: Path) -> None:
    shown = _run("fetch")
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (0, str(default_model_dir))


def _stops(process: subprocess.Popen[bytes], number: int, code: int) -> None:
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) == code
    assert time.monotonic() - started < 10


def _child(parent: int, module: str) -> int:
    """The child process of `parent` that runs a module."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent and module in (folder / "cmdline").read_text():
                return int(folder.name)
    raise AssertionError(f"no {module} under {parent}")


def _closed(target: str) -> bool:
    host, port = target.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
