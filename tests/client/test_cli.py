"""The command line against the fake services: what it prints, and how it fails."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fake_services import FakeServices
from tests.fake_tokens import EOS

from millstream.client.__main__ import run
from millstream.engine.config import EngineConfig

_COMMANDS = ("serve", "demo", "generate", "chat", "health", "fetch", "import-gguf", "bench")


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """What a command sets for a process of its own: `serve` ends at SIGTERM by an exception, which
    whatever test comes later would take for its own, and logs to a stream that pytest closes."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    root = logging.getLogger()
    level = root.level
    yield
    signal.signal(signal.SIGTERM, on_sigterm)
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def test_generate_prints_the_text(targets: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *targets]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert run(["generate", "hello", "--chat", *targets]) == 0
    assert capsys.readouterr().out == "user:hello\n"
    assert run(["generate", "hello", "--raw", "--max-tokens", "2", *targets]) == 0
    assert capsys.readouterr().out == "he\n"
    assert run(["generate", "a.b", "--stop", ".", "--stop", "x", *targets]) == 0
    assert capsys.readouterr().out == "a\n"


def test_generate_prints_every_sample(
    targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hello", "--n", "3", *targets]) == 0
    assert capsys.readouterr().out == "[1/3]\nhello\n[2/3]\nello\n[3/3]\nllo\n"
    assert run(["generate", "hello", "--n", "2", "--json", *targets]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["sampling"]["n"]) == ("hello", 2)
    assert [sample["text"] for sample in shown["other_samples"]] == ["ello"]
    assert run(["chat", "--n", "2", *targets]) == 1
    assert capsys.readouterr().err.startswith("millstream chat: error: n: ")


def test_request_flags_arrive(
    targets: list[str], threaded_services: FakeServices, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--priority", "-3", "--timeout-s", "9.5", "--api-key", "mine", "--max-retries", "2"]
    assert run(["generate", "hello", *flags, *targets]) == 0
    (message,) = [one for one in threaded_services.engine.messages if one.submit]
    assert message.submit[0].priority == -3
    assert 9000 < message.submit[0].timeout_ms <= 9500
    assert threaded_services.engine.api_keys == ["mine"]
    capsys.readouterr()
    threaded_services.engine.room = 0
    assert run(["generate", "hello", *flags, *targets]) == 1
    assert threaded_services.engine.refused == 3
    assert run(["generate", "hello", "--api-key", "sch\u00f6n", *targets]) == 1
    assert "api_key: " in capsys.readouterr().err


def test_generate_says_when_there_is_no_text(
    targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--stop", "x", *targets]) == 0
    shown = capsys.readouterr()
    assert shown.out == "\n"
    assert shown.err == "(the model says nothing)\n"


def test_targets_come_from_the_environment() -> None:
    command = [sys.executable, "-m", "millstream.client", "health"]
    targets = {"MILLSTREAM_ENGINE": "127.0.0.1:1", "MILLSTREAM_TOKENIZER": "127.0.0.1:2"}
    shown = subprocess.run(command, env=os.environ | targets, capture_output=True, text=True)
    assert shown.returncode == 1
    assert shown.stdout.splitlines() == [
        "engine 127.0.0.1:1: unreachable",
        "tokenizer 127.0.0.1:2: unreachable",
    ]


def test_generate_defaults_to_256_tokens(
    targets: list[str], threaded_services: FakeServices
) -> None:
    assert run(["generate", "hello", *targets]) == 0
    (message,) = (m for m in threaded_services.engine.messages if m.submit)
    sampling = message.submit[0].sampling
    assert sampling.max_tokens == 256
    assert [field.name for field, _ in sampling.ListFields()] == ["max_tokens"]


def test_generate_reads_stdin_and_prints_json(
    targets: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert run(["generate", "-", "--json", *targets]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "from stdin"
    assert result["token_ids"] == [*b"from stdin", EOS]
    assert result["finish_reason"] == "stop"
    assert result["usage"]["prompt_tokens"] == 10


def test_sampling_flags_arrive(targets: list[str], threaded_services: FakeServices) -> None:
    flags = "--temperature 0 --top-p 0.5 --top-k 7 --min-p 0.1 --seed 0 --ignore-eos"
    flags += " --max-tokens 3 --min-tokens 1 --stop-token-ids 3 4 --logit-bias 5=-1.5"
    assert run(["generate", "hello", *flags.split(), *targets]) == 0
    sampling = threaded_services.engine.messages[0].submit[0].sampling
    assert sampling.temperature == 0
    assert sampling.HasField("temperature")
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 7, 0)
    assert sampling.HasField("seed")
    assert list(sampling.stop_token_ids) == [3, 4]
    assert dict(sampling.logit_bias) == {5: -1.5}
    assert (sampling.ignore_eos, sampling.max_tokens, sampling.min_tokens) == (True, 3, 1)


def test_flags_that_edit_and_score_arrive_and_json_shows_scores(
    targets: list[str], threaded_services: FakeServices, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--presence-penalty 0.5 --frequency-penalty -0.5 --repetition-penalty 1.5 --json"
    flags += " --allowed-token-ids 97 98 --bad-words no --logprobs 1 --prompt-logprobs 0"
    assert run(["generate", "ab", *flags.split(), *targets]) == 0
    sampling = threaded_services.engine.messages[0].submit[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, list(sampling.allowed_token_ids)) == (1.5, [97, 98])
    assert [bytes(word.token_ids) for word in sampling.bad_words] == [b"no", b" no"]
    result = json.loads(capsys.readouterr().out)
    first, *_ = result["logprobs"]
    assert (first["token_id"], first["text"], first["top"][0]["text"]) == (97, "a", "a")
    assert result["prompt_logprobs"][0] is None
    assert result["prompt_logprobs"][1]["text"] == "b"


def test_a_file_that_is_not_there_is_no_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["generate", "hello", "--json-schema", "schemas/no-such.json"])
    assert "--json-schema: there is no file schemas/no-such.json" in capsys.readouterr().err


def test_structured_output_flags_arrive(
    targets: list[str], threaded_services: FakeServices, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    long_grammar = 'start: "a"  // ' + "é" * 5000  # no name of a file
    for flags in (
        ["--json-schema", str(tmp_path / "schema.json")],
        ["--json-schema", '{"const": 1}'],
        ["--json-object"],
        ["--regex", "a+"],
        ["--choice", "a", "--choice", ""],
        ["--grammar", long_grammar],
    ):
        assert run(["generate", "hello", *flags, *targets]) == 0
    submissions = [m.submit[0] for m in threaded_services.engine.messages if m.submit]
    one, two, three, four, five, six = (submission.sampling for submission in submissions)
    assert (one.json_schema, two.json_schema) == ('{"type": "object"}', '{"const": 1}')
    assert three.json_object
    assert four.regex == "a+"
    assert list(five.choice.values) == ["a", ""]
    assert six.grammar == long_grammar


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "COMMAND"),
        (["nonsense"], 2, "nonsense"),
        (["generate"], 2, "PROMPT"),
        (["generate", "x", "--nonsense"], 2, "--nonsense"),
        (["generate", "x", "--temperature", "warm"], 2, "--temperature"),
        (["generate", "x", "--regex", "a", "--json-object"], 1, "only one of"),
        (["generate", "x", "--engine", "127.0.0.1:1", "--connect-timeout-s", "0.2"], 1, "reached"),
        (["generate", "\udcff", "--engine", "127.0.0.1:1"], 1, "surrogate"),
        (["chat", "--engine", "127.0.0.1:1", "--connect-timeout-s", "0.2"], 1, "127.0.0.1:1"),
        (["serve", "--engine-port", "70000"], 2, "--engine-port"),
        (["generate", "x", "--connect-timeout-s", "nan"], 2, "--connect-timeout-s"),
        (["generate", "x", "--engine", ""], 1, "engine: a gRPC target"),
        (["health", "--engine", ""], 1, "engine: a gRPC target"),
        (["serve", "--dtype", "float8"], 2, "--dtype"),
        (["serve", "--max-num-seqs", "0"], 2, "--max-num-seqs"),
        (["serve", "--step-timeout-s", "0"], 2, "--step-timeout-s"),
        (["demo", "--threads", "1000000"], 2, "--threads"),
        (["serve", "--model", "./no-such-folder"], 1, "no-such-folder"),
        (["demo", "--model", "./no-such-folder"], 1, "no-such-folder"),
        (["import-gguf", "no-such.gguf", "out"], 1, "no-such.gguf"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        got = run(argv)
    except SystemExit as stopped:
        got = int(stopped.code or 0)
    shown = capsys.readouterr()
    assert got == code
    assert shown.out == ""
    lines = shown.err.strip().splitlines()
    assert said in lines[-1]
    assert "error: " in lines[-1]
    assert len([line for line in lines if not line.startswith("starting")]) == 1


@pytest.mark.parametrize("command", ["generate -", "chat", "health"])
def test_closed_standard_streams_are_empty_ones(targets: list[str], command: str) -> None:
    """As cron jobs and containers have them."""
    argv = " ".join([sys.executable, "-m", "millstream.client", command, *targets])
    for closed in ("<&-", ">&- <&-", "2>&- <&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"{argv} {closed}"], capture_output=True, text=True, timeout=20
        )
        assert done.returncode == (1 if command == "generate -" else 0), closed
        assert "Traceback" not in done.stderr
        if closed == "<&-":
            assert ("error: prompt: " in done.stderr) == (command == "generate -")


def test_a_refused_value_names_the_field(
    targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--top-p", "3", *targets]) == 1
    assert capsys.readouterr().err.startswith("millstream generate: error: top_p: ")


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_is_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run([command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: millstream {command}")
    # Every flag has a line of its own that says something, or names its value.
    for flag in set(re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE)):
        assert re.search(rf"^  {flag}\b.*(\n +\S|  \S|[A-Z])", shown, re.MULTILINE), flag


@pytest.mark.parametrize("command", ["serve", "demo", "bench"])
def test_help_has_the_engines_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    shown = _without_spaces(capsys.readouterr().out)  # argparse breaks lines
    for field in dataclasses.fields(EngineConfig):
        if field.default is not None:
            told = f"{field.metadata['argument']['help']} (default: {field.default})"
            assert _without_spaces(told) in shown, field.name
    assert "(default:[])" not in shown


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def test_health(targets: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["health", *targets]) == 0
    assert capsys.readouterr().out.count(": serving\n") == 2
    assert run(["health", *targets[:2]]) == 0
    assert capsys.readouterr().out == f"engine {targets[1]}: serving\n"
    assert run(["health", "--engine", "127.0.0.1:1", *targets[2:]]) == 1
    assert "engine 127.0.0.1:1: unreachable" in capsys.readouterr().out
    assert run(["health", "--engine", f"{targets[1]},127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"engine {targets[1]}: serving",
        "engine 127.0.0.1:1: unreachable",
    ]


def test_health_watch_shows_changes_until_ctrl_c(
    targets: list[str], threaded_services: FakeServices
) -> None:
    with _millstream("health", "--watch", *targets[:2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(": serving\n")
        threaded_services.health.set_serving(False)  # noticed by the watcher's own wake-up
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in out + err


def test_ctrl_c_while_generating(targets: list[str], threaded_services: FakeServices) -> None:
    threaded_services.engine.step_s = 0.01
    with _millstream("generate", "x" * 2000, "--max-tokens", "2000", *targets) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")
    deadline = time.monotonic() + 5
    while threaded_services.engine.live:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_pipe_is_no_traceback(targets: list[str], threaded_services: FakeServices) -> None:
    threaded_services.engine.step_s = 0.002
    with _millstream("generate", "x" * 2000, "--max-tokens", "2000", *targets) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(10) == 141


def test_chat_remembers_its_turns(
    targets: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nyou\n/reset\nnew\n/exit\nnot read\n"))
    assert run(["chat", "--system", "s", *targets]) == 0
    first = "system:s|user:hi"
    assert capsys.readouterr().out.splitlines() == [
        first,
        f"{first}|assistant:{first}|user:you",
        "system:s|user:new",
    ]


def test_chat_goes_on_after_a_refused_turn(
    targets: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nyou\n"))
    assert run(["chat", "--top-p", "3", *targets]) == 0
    assert capsys.readouterr().err.count("error: top_p: ") == 2


def test_ctrl_c_in_chat_stops_the_answer_and_then_the_program(
    targets: list[str], threaded_services: FakeServices
) -> None:
    threaded_services.engine.step_s = 0.02
    with _Terminal("chat", *targets) as terminal:
        terminal.read_until("> ")
        terminal.type(b"abcdefghij\n")
        terminal.read_until("user:a")
        terminal.interrupt()
        terminal.read_until("[stopped]")
        terminal.read_until("> ")
        threaded_services.engine.step_s = 0
        terminal.type(b"more\n")
        terminal.read_until("|assistant:user:a")
        terminal.read_until("|user:more")
        terminal.read_until("> ")
        assert threaded_services.engine.live == 0
        terminal.interrupt()
        assert terminal.process.wait(10) == 130


def test_ctrl_d_ends_chat(targets: list[str]) -> None:
    with _Terminal("chat", *targets) as terminal:
        terminal.read_until("> ")
        terminal.type(b"\x04")
        assert terminal.process.wait(10) == 0


def _millstream(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millstream.client", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class _Terminal:
    """The command with a pseudo-terminal as its stdin and stdout."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "millstream.client", *argv]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._seen = ""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def interrupt(self) -> None:
        time.sleep(0.1)  # readline misses a signal between its prompt and its first wait
        self.process.send_signal(signal.SIGINT)

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + 10
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, self._seen
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        self._seen = self._seen.split(text, 1)[1]

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
