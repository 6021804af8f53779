"""`millstream bench --in-process` when the engine fails: one line, and what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fake_runners import STEPS_BEFORE_FAULT
from tests.rank_processes import wait_for_ranks
from tests.tiny_models import make_tiny_model

from millstream.client.__main__ import run

_FAULTY = ["--in-process", "--runner", "tests.fake_runners:faulty"]
_TOKENS = 4


def _small(num_requests: int) -> list[str]:
    lengths = ["--input-len", "5", "--output-len", str(_TOKENS)]
    return ["--num-requests", str(num_requests), *lengths]


def _bench(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millstream.client", "bench", "--in-process", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_runner_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    command = ["bench", "latency", *_FAULTY, *_small(10), "--json", str(file)]
    assert run(command) == 1
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    (error,) = shown.err.splitlines()
    assert "RuntimeError: worn out (and a second line)" in error
    document = json.loads(file.read_text())
    (result,) = document["runs"]
    assert document["complete"] is False
    assert result["ended_early"] == "RuntimeError: worn out (and a second line)"
    answered = result["requests"] - result["failed"]
    # A step a token, one a request, and the warm-up's.
    assert 2 <= answered <= STEPS_BEFORE_FAULT // _TOKENS - 1
    assert result["errors"] == [result["ended_early"]] * result["failed"]
    assert f"{result['failed']} failed" in line
    assert f"{result['failed']} of 11 requests failed" in error
    assert result["output_tokens"] == answered * _TOKENS
    assert result["prompt_tokens"] == answered * 5
    assert 0 < result["tpot_ms"]["p50"] < result["e2e_ms"]["p50"]


def test_a_runner_that_raises_ends_a_throughput_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The requests that had ended by then are counted, and no second run is tried."""
    file = tmp_path / "figures.json"
    lengths = ["--num-requests", "8", "--input-len", "5", "--output-len", "4", "60"]
    assert run(["bench", *_FAULTY, *lengths, "--json", str(file)]) == 1
    (result,) = json.loads(file.read_text())["runs"]
    assert 0 < result["failed"] < result["requests"] == 8
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(shown.err.splitlines()) == 1


def test_a_runner_that_raises_in_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["--num-requests", "1", "--input-len", "5", "--output-len", "100"]
    file = tmp_path / "figures.json"
    assert run(["bench", "latency", *_FAULTY, *long, "--json", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (error,) = shown.err.splitlines()
    assert "(of the warm-up) with: RuntimeError: worn out" in error
    assert not file.exists()


def test_a_runner_that_raises_at_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--in-process", "--runner", "tests.fake_runners:fails_to_load"]
    assert run(["bench", *flags, *_small(1)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.endswith("error: RuntimeError: no memory (and a second line)")


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Those that fail because of it say nothing of their own."""
    folder = str(make_tiny_model(tmp_path, vocab_size=251))
    flags = ["--device", "cpu", "--tensor-parallel-size", "4", "--runs", "1000"]
    with _bench("--model", folder, *flags, *_small(2)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run 1: ")
        os.kill(wait_for_ranks(process.pid, 3)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    (error,) = err.splitlines()
    assert "RankLost: rank 3 of 4 was killed by SIGKILL" in error


def test_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    paced = ["--runner", "tests.fake_runners:paced", "--runs", "1000"]
    with _bench(*paced, *_small(2), "--json", str(file)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run 1: ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert json.loads(file.read_text())["complete"] is False
