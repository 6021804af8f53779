"""The programs of examples/, against real services with the default model. `make examples-test`
builds and runs them."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from millstream.client import Client
from millstream.v1 import engine_pb2, engine_pb2_grpc

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION = "What is the capital of France?"
NOBODY = "127.0.0.1:1"

pytestmark = [
    pytest.mark.examples,
    pytest.mark.parametrize(
        "program",
        [["node", "node/build/generate.js"], ["cpp/build/generate"]],
        ids=["node", "cpp"],
    ),
]


@pytest.fixture
def command(program: list[str], default_client: Client) -> list[str]:
    *runtime, file = program
    built = EXAMPLES / file
    assert built.exists(), "not built: make examples"
    engine, tokenizer = default_client.engine_target, default_client.tokenizer_target
    return [*runtime, str(built), "--engine", str(engine), "--tokenizer", str(tokenizer)]


def _run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


def _idle_within(client: Client, seconds: float) -> bool:
    with grpc.insecure_channel(str(client.engine_target)) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        deadline = time.monotonic() + seconds
        while stub.GetStats(engine_pb2.GetStatsRequest()).num_requests_running:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def test_answers(command: list[str]) -> None:
    done = _run(command, QUESTION)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "The capital of France is Paris.\n",
        "",
    )
    done = _run(command, QUESTION, "--max-tokens", "3")
    assert (done.returncode, done.stdout) == (0, "The capital of\n")


def test_stops_at_a_string_and_the_engine_with_it(
    command: list[str], default_client: Client
) -> None:
    arguments = ("Tell me a very long story.", "--stop", " the", "--max-tokens", "4000")
    done = _run(command, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert " the" not in done.stdout
    assert _idle_within(default_client, 2)


def test_interrupted_while_it_streams(command: list[str], default_client: Client) -> None:
    story = [*command, "Tell me a very long story about a whale.", "--max-tokens", "4000"]
    with subprocess.Popen(story, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(8), "text comes before the end"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=20)
    assert (running.returncode, said) == (130, b"")
    assert _idle_within(default_client, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--temperature", "7"], "sampling.temperature: "),
        (["x", "--stop", ""], "stop"),
        (["x", "--engine", NOBODY], NOBODY),
        (["x", "--tokenizer", NOBODY], NOBODY),
        ([], "usage: generate"),
    ],
)
def test_errors_are_one_line(command: list[str], arguments: list[str], said: str) -> None:
    done = _run(command, *arguments)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert said in line
