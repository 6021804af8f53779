"""`millstream bench` against services: what is sent how, and what the command says of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.client.measured_loads import WORKLOAD, load_of, measure_load
from tests.fake_services import FakeServices, fake_services, until

from millstream.client.__main__ import run
from millstream.client.bench.progress import Progress
from millstream.client.bench.runs import serve_loads
from millstream.client.cli import flags
from millstream.rpc.sampling_params import SamplingParams

_INSTANT = ["--runner", "instant"]
_SMALL = ["--num-requests", "6", "--input-len", "4", "8", "--output-len", "3", "5"]


@pytest.fixture
def targets(threaded_services: FakeServices) -> list[str]:
    return ["--engine", threaded_services.target]


@pytest.mark.parametrize(
    "target",
    [{}, {"streams": "per-request", "channels": 2}, {"text": True}],
    ids=["one stream", "a stream each", "text"],
)
@pytest.mark.parametrize("due_s", [[0.0] * 6, [0.0, 0.0, 0.01, 0.02, 0.03, 0.04], None])
async def test_every_request_is_measured(
    services: FakeServices,
    target: dict[str, Any],
    due_s: list[float] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    services.engine.tokens_per_step = lambda: 2  # messages of two tokens
    load = load_of(due_s)
    measured = await measure_load(services, load, Progress(line_every_s=0), **target)
    figures = measured.figures
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and lines[0].startswith("load: 0 of 6 requests, ")
    assert lines[-1] == f"load: 6 of 6 requests, {load.requests.output_tokens:,} tokens"
    assert measured.errors == []
    assert (figures["requests"], figures["failed"]) == (6, 0)
    assert figures["prompt_tokens"] == load.requests.prompt_tokens
    assert figures["output_tokens"] == load.requests.output_tokens
    assert len(measured.latencies.ttft_s) == 6
    assert all(0 < value < 2 for value in measured.latencies.e2e_s)


@pytest.mark.parametrize("target", [{}, {"streams": "per-request"}, {"text": True}])
async def test_several_engines_share_the_requests(
    services: FakeServices, target: dict[str, Any]
) -> None:
    async with fake_services() as others:
        load = load_of([0.0] * 6)
        engines = [services.target, others.target]
        measured = await measure_load(services, load, engine=engines, **target)
        assert (measured.errors, measured.figures["requests"]) == ([], 6)
        assert measured.figures["output_tokens"] == load.requests.output_tokens
        for each in (services, others):
            sent = [one for message in each.engine.messages for one in message.submit]
            assert 2 <= len(sent) <= 4


def test_several_engines_on_the_command_line(
    targets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, first = targets
    file = tmp_path / "figures.json"
    assert run(["bench", *_SMALL, flag, f"{first},{first}"]) == 1
    assert "engine: a list of different gRPC targets" in capsys.readouterr().err
    away = "127.0.0.1:1"
    assert run(["bench", *_SMALL, flag, f"{first},{away}", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["engine"] == [first, away]


async def test_streams_of_their_own_are_closed(services: FakeServices) -> None:
    await measure_load(services, load_of([0.0] * 6), streams="per-request", channels=3)
    assert len([message for message in services.engine.messages if message.submit]) == 6
    await until(lambda: services.engine.streams == 0)


async def test_one_at_a_time(services: FakeServices) -> None:
    services.engine.step_s = 0.002
    seen: list[int] = []
    services.engine.tokens_per_step = lambda: seen.append(services.engine.live) or 1  # type: ignore[func-returns-value]
    await measure_load(services, load_of(None))
    assert max(seen) <= 1


async def test_failures_are_counted(services: FakeServices) -> None:
    load = load_of([0.0] * 6)
    load.requests.prompts[2] = [100_000]  # not in the vocabulary
    for target in ({}, {"streams": "per-request"}):
        measured = await measure_load(services, load, **target)
        assert (measured.figures["failed"], len(measured.errors)) == (1, 1)
        assert "empty or too large" in measured.errors[0]


@pytest.mark.parametrize("target", [{}, {"streams": "per-request"}, {"text": True}])
async def test_a_stream_that_ends_before_its_request_is_a_failure(
    services: FakeServices, target: dict[str, Any]
) -> None:
    services.engine.break_after_tokens, services.engine.breaks_silently = 1, True
    measured = await measure_load(services, load_of([0.0] * 6), **target)
    assert measured.figures["failed"] == len(measured.errors) > 0
    assert f"the engine at {services.target} " in measured.errors[0]


@pytest.mark.parametrize("target", [{}, {"streams": "per-request"}, {"text": True}])
async def test_what_cannot_be_sent_is_a_failure(
    services: FakeServices, target: dict[str, Any]
) -> None:
    load = load_of([0.0] * 6)
    load.requests.params[2] = SamplingParams(max_tokens=1 << 40)
    measured = await measure_load(services, load, **target)
    (error,) = measured.errors
    assert "max_tokens" in error
    assert measured.figures["failed"] == 1


def test_serve_loads_share_no_prompt() -> None:
    loads = serve_loads(WORKLOAD, 1000, [1.0, 50.0, float("inf")])
    firsts = [load.requests.prompts[0] for load in loads]
    assert len({tuple(ids) for ids in firsts}) == len(loads) == 4
    assert [load.measured for load in loads] == [False, True, True, True]
    assert loads[2].due_s != loads[3].due_s == [0.0] * 6


@pytest.mark.parametrize("where", [[], ["--in-process"], ["--streams", "per-request"]])
@pytest.mark.parametrize("word", [[], ["throughput"]])
def test_throughput(
    word: list[str], where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert run(["bench", *word, *where, *_INSTANT, *_SMALL, "--json", str(file)]) == 0
    assert capsys.readouterr().out.count("output tokens/s") == 2
    figures = json.loads(file.read_text())
    assert figures["bench"] == "throughput"
    assert figures["mode"] == ("in-process" if "--in-process" in where else "grpc")
    assert figures["options"] == {"runner": "instant"}
    assert figures["workload"]["input_len"] == [4, 8]
    assert [result["name"] for result in figures["runs"]] == ["run 1", "run 2"]
    for result in figures["runs"]:
        assert result["requests"] == 6
        assert 18 <= result["output_tokens"] <= 30
        assert set(result["ttft_ms"]) == set(result["e2e_ms"]) == {"p50", "p90", "p99"}


@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_latency(where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    shape = ["--num-requests", "2", "--input-len", "5", "--output-len", "4"]
    paced = ["--runner", "tests.fake_runners:paced"]
    assert run(["bench", "latency", *where, *paced, *shape, "--json", str(file)]) == 0
    assert "TPOT" in capsys.readouterr().out
    (result,) = json.loads(file.read_text())["runs"]
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (2, 10, 8)
    assert 0 < result["tpot_ms"]["p50"] < result["e2e_ms"]["p50"]


def test_serve_at_several_rates(
    targets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "plot.svg"
    rates = ["--request-rate", "100", "200", "inf", "--goodput", "ttft:5000", "itl:0.000001"]
    files = ["--json", str(file), "--plot", str(picture)]
    assert run(["bench", "serve", *targets, *_SMALL, *rates, *files]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == [
        "100 requests/s",
        "200 requests/s",
        "all at once",
    ]
    figures = json.loads(file.read_text())
    assert figures["goals_ms"] == {"ttft": 5000.0, "itl": 0.000001, "e2e": None}
    assert figures["engine_info"]["model"] == "fake"
    assert [result["request_rate_per_s"] for result in figures["runs"]] == [100.0, 200.0, None]
    assert {result["goodput"]["share"] for result in figures["runs"]} == {0.0}
    assert picture.read_text().startswith("<?xml")


def test_text_of_services_that_run(targets: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--text", "--tokenizer", targets[1]]
    assert run(["bench", *targets, *text, *_SMALL, "--runs", "1"]) == 0
    assert "6 requests" in capsys.readouterr().out


def test_a_png(targets: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "plot.PNG"
    assert run(["bench", *targets, *_SMALL, "--runs", "1", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_failed_requests_make_the_command_fail(
    threaded_services: FakeServices, targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    threaded_services.engine.room = 0
    one_each = ["--streams", "per-request", "--runs", "1"]
    assert run(["bench", *targets, *_SMALL, *one_each]) == 1
    shown = capsys.readouterr()
    assert "6 failed" in shown.out
    assert "6 of 6 requests failed, the first one with: full" in shown.err


def test_without_matplotlib_a_plot_says_what_to_install(
    targets: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", *targets, *_SMALL, "--plot", str(tmp_path / "a.png")]) == 1
    shown = capsys.readouterr()
    assert "millstream[bench]" in shown.err
    assert shown.out == ""
    assert run(["bench", *targets, *_SMALL, "--runs", "1"]) == 0, "without --plot it is not needed"


def test_the_bare_client_measures_an_engine_that_runs(
    targets: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "millstream.engine.config", None)
    assert run(["bench", *targets, *_SMALL, "--runs", "1"]) == 0
    capsys.readouterr()
    assert run(["bench", *_SMALL]) == 1
    assert "millstream[engine,tokenizer]" in capsys.readouterr().err
    monkeypatch.setattr(flags, "ENVIRONMENT_ENGINE", targets[1])
    monkeypatch.setattr(flags, "TOKENIZER", targets[1])
    assert run(["bench", "latency", *_SMALL, "--text"]) == 0


def test_in_process_the_bare_client_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["bench", "--in-process", *_INSTANT, *_SMALL]) == 1
    shown = capsys.readouterr()
    assert "millstream[engine,tokenizer]" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["nonsense"], 2, "nonsense"),
        (["--num-requests", "0"], 2, "--num-requests"),
        (["--input-len", "9", "3"], 2, "--input-len"),
        (["--input-len", "1", "2", "3"], 2, "--input-len"),
        (["--in-process", "--model", "./no-such-folder"], 1, "no-such-folder"),
        (["--in-process", *_INSTANT, "--json", "/no/file"], 1, "/no/file"),
        (["--in-process", "--runner", "nonsense"], 1, "runner: "),
        (["--in-process", "--load-format", "dummy", "--model", "./no"], 1, "./no"),
        (["--plot", "a.pdf"], 2, "a.pdf"),
        (["--plot", "/no/a.svg", *_INSTANT], 1, "/no/a.svg"),
        (["serve"], 2, "--request-rate"),
        (["serve", "--request-rate", "0"], 2, "--request-rate"),
        (["serve", "--request-rate", "nan"], 2, "--request-rate"),
        (["serve", "--request-rate", "soon"], 2, "--request-rate"),
        (["serve", "--request-rate", "1e-320"], 2, "--request-rate"),
        (["serve", "--request-rate", "1", "--goodput", "itl:inf"], 2, "--goodput"),
        (["serve", "--request-rate", "1", "--goodput", "itl:fast"], 2, "--goodput"),
        (["--temperature", "nan"], 2, "--temperature"),
        (["--temperature", "hot"], 2, "--temperature"),
        (["serve", "--request-rate", "1", "--goodput", "tpot:3"], 2, "ttft, itl, e2e"),
        (["serve", "--request-rate", "1", "--goodput", "itl"], 2, "--goodput"),
        (["serve", "--request-rate", "1", "--goodput", "itl:-1"], 2, "above 0"),
        (["--engine", "127.0.0.1:1", "--max-num-seqs", "4"], 1, "--max-num-seqs: an engine that"),
        (["--engine", "127.0.0.1:1", "--text"], 1, "--text: needs --tokenizer"),
        (["--engine", "127.0.0.1:1", "--in-process"], 1, "--in-process: "),
        (["--tokenizer", "127.0.0.1:1"], 1, "--tokenizer: "),
        (["--engine", "127.0.0.1:1", "--tokenizer", "127.0.0.1:1"], 1, "--tokenizer: "),
        (["--text", "--streams", "per-request"], 1, "--text: "),
        (["--in-process", "--streams", "per-request"], 1, "--in-process: "),
    ],
)
def test_errors_are_one_line(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = run(["bench", *argv])
    except SystemExit as stopped:
        got = int(stopped.code or 0)
    shown = capsys.readouterr()
    assert (got, shown.out) == (code, "")
    (line,) = shown.err.strip().splitlines()
    assert said in line
    assert "error: " in line
