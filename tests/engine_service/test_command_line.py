"""millstream-engine's command line: what it says, and one clear line when it cannot start."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.engine_processes import ROOT, EngineProcess

from millstream.engine.config import EngineConfig


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.engine", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def test_help_tells_every_flag() -> None:
    done = run_engine("--help")
    assert done.returncode == 0
    names = [field.name.replace("_", "-") for field in dataclasses.fields(EngineConfig)]
    service = ["host", "port", "drain-timeout-s", "max-message-bytes", "log-level"]
    for name in (*names, *service):
        assert f"--{name}" in done.stdout
    assert "control-fd" not in done.stdout
    assert "default: None" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--dtype", "int3"], "--dtype"),
        (["--port", "70000"], "--port"),
        (["--port", "http"], "--port"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["--step-timeout-s", "0"], "--step-timeout-s"),
        (["--max-message-bytes", "65536"], "--max-message-bytes"),  # less than what it sends
        (["--max-queued-requests", "-1"], "--max-queued-requests"),
    ],
)
def test_bad_flags(flags: list[str], says: str) -> None:
    done = run_engine("--runner", "instant", *flags)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("millstream-engine: error:")
    assert says in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/no/such/folder"], "no such folder"),
        (["--runner", "nonsense"], "runner: model, instant or module:function"),
        (["--runner", "no.such.module:create"], "no.such.module"),
        (["--runner", "tests.fake_runners:refuses_to_load"], "dtype float16 is not supported"),
        (["--runner", "instant", "--host", "192.0.2.1"], "192.0.2.1"),
        (["--model", "{tmp}"], "config.json"),
        (["--model", "{unknown}"], "no_such_architecture"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(
    tmp_path: Path, flags: list[str], says: str
) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    config = {"model_type": "no_such_architecture", "architectures": ["NoSuch"]}
    (unknown / "config.json").write_text(json.dumps(config))
    places = {"tmp": tmp_path, "unknown": unknown}
    done = run_engine("--port", "0", "--log-level", "error", *(f.format(**places) for f in flags))
    assert done.returncode == 1
    assert done.stderr.startswith("millstream-engine: error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_start_tells_where_its_time_went() -> None:
    """From the process's start: the phases add up to the whole."""
    begun = time.monotonic()
    started = EngineProcess(runner="instant")
    started.wait_until_serving()
    elapsed_s = time.monotonic() - begun
    started.process.send_signal(signal.SIGTERM)
    log = started.finish()
    told = re.search(r"start: ([\d.]+) s \((front end .*)\)", log)
    assert told is not None, log
    seconds = [float(part.rsplit(" ", 1)[1]) for part in told.group(2).split(", ")]
    total_s = float(told.group(1))
    assert abs(sum(seconds) - total_s) < 0.05
    assert 0.5 * elapsed_s < total_s <= elapsed_s + 0.02
    assert "interpreter" in told.group(2)


def test_ctrl_c_in_a_start_is_a_quiet_exit() -> None:
    """At any time since the core is there, for the whole process group, as a terminal does."""
    code = "from millstream.rpc.start import engine; engine()"
    for delay_s in (0, 0.05, 0.1, 0.15, 0.2):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--port", "0", "--runner", "tests.fake_runners:slow_load"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text():
            time.sleep(0.001)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=15)
        assert process.returncode in (0, 130)
        assert "Traceback" not in stderr
