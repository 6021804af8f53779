"""The files of `millstream bench`: what was measured is in them, however the command ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fake_services import FakeServices

from millstream.client.__main__ import run


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "plot.svg")]


def _bench(services: FakeServices, *flags: str) -> list[str]:
    small = ["--engine", services.target, "--num-requests", "12", "--input-len", "4"]
    return ["bench", "serve", *small, "--output-len", "4", *flags]


def test_a_whole_bench_says_so(
    threaded_services: FakeServices, files: list[str], tmp_path: Path
) -> None:
    assert run(_bench(threaded_services, "--request-rate", "inf", *files)) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["complete"] is True


def test_ctrl_c_keeps_what_was_measured(
    threaded_services: FakeServices, files: list[str], tmp_path: Path
) -> None:
    command = _bench(threaded_services, "--request-rate", "inf", "0.1", *files)
    with _started(command) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("all at once: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["complete"] is False
    assert figures["engine_info"]["model"] == "fake"
    (result,) = figures["runs"]
    assert (result["requests"], result["failed"]) == (12, 0)
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_a_pipe_that_is_closed_keeps_what_was_measured(
    threaded_services: FakeServices, files: list[str], tmp_path: Path
) -> None:
    with _started(_bench(threaded_services, "--request-rate", "inf", *files)) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 141
    assert len(json.loads((tmp_path / "figures.json").read_text())["runs"]) == 1


def test_a_bench_that_measures_nothing_leaves_files_as_they_were(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process = ["bench", "latency", "--in-process", "--runner", "tests.fake_runners:echo"]
    too_long = ["--input-len", "1000000", "--num-requests", "1"]
    assert run([*in_process, *too_long, *files]) == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "figures.json").write_text("{}\n")
    assert run([*in_process, *too_long, *files]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
    assert (tmp_path / "figures.json").read_text() == "{}\n"
    assert "max_model_len" in capsys.readouterr().err


def test_an_engine_that_is_not_there_leaves_no_file(files: list[str], tmp_path: Path) -> None:
    nonsense = ["--runner", "tests.fake_runners:refuses_to_load"]
    assert run(["bench", *nonsense, *files]) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_told_before_the_work(
    threaded_services: FakeServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    for flag, file in [
        ("--json", str(folder)),
        ("--plot", str(folder)),
        ("--json", ""),
        ("--json", "/no/file"),
    ]:
        command = _bench(threaded_services, "--request-rate", "inf", flag, file)
        assert run(command) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1
    assert threaded_services.engine.messages == []


def test_one_file_cannot_be_both(
    threaded_services: FakeServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.svg"
    same = ["--json", str(file), "--plot", str(tmp_path / "." / "a.svg")]
    assert run(_bench(threaded_services, "--request-rate", "inf", *same)) == 1
    assert "--plot: " in capsys.readouterr().err


def test_a_pipe_can_take_the_json(threaded_services: FakeServices, tmp_path: Path) -> None:
    """It is not opened twice: its reader would see the end before the figures."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run(_bench(threaded_services, "--request-rate", "inf", "--json", str(pipe))) == 0
        figures, _ = reader.communicate(timeout=10)
    assert len(json.loads(figures)["runs"]) == 1


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millstream.client", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
