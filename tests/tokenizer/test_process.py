"""`millstream-tokenizer` as a real process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.tiny_tokenizers import byte_ids, make_byte_tokenizer

from millstream.rpc.options import channel_options
from millstream.v1.tokenizer_pb2 import (
    DetokenizeOpen,
    DetokenizeRequest,
    EncodeInput,
    EncodeRequest,
    GetTokenizerInfoRequest,
)
from millstream.v1.tokenizer_pb2_grpc import TokenizerStub

COMMAND = [sys.executable, "-m", "millstream.tokenizer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("model"))


class Process:
    """The service with a control socket, as `launch` starts it."""

    def __init__(self, *arguments: str) -> None:
        self.control, theirs = socket.socketpair()
        self.popen = subprocess.Popen(
            [*COMMAND, "--port", "0", "--control-fd", str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.control.settimeout(60)
        line = self.control.makefile().readline()
        self.target = f"127.0.0.1:{json.loads(line)['port']}"
        self.channel = grpc.insecure_channel(self.target, options=channel_options(self.target))
        self.stub = TokenizerStub(self.channel)

    def wait(self) -> tuple[int, str]:
        _, log = self.popen.communicate(timeout=20)
        return self.popen.returncode, log


@contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.channel.close()
        process.popen.kill()
        process.popen.wait()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_a_service_serves_and_stops_on_sigterm(model: Path) -> None:
    with serving("--model", str(model), "--served-model-name", "tiny") as process:
        request = EncodeRequest(inputs=[EncodeInput(text="hé")])
        assert list(process.stub.Encode(request).sequences[0].token_ids) == byte_ids("hé")
        info = process.stub.GetTokenizerInfo(GetTokenizerInfoRequest()).tokenizer
        assert info.model == "tiny" and len(info.fingerprint) == 64
        health = health_pb2_grpc.HealthStub(process.channel)
        for name in ("", "millstream.v1.Tokenizer"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
        assert "tokenizers" in maps
        assert "libtorch" not in maps
        process.popen.send_signal(signal.SIGTERM)
        code, log = process.wait()
        assert code == 0
        assert "hé" not in log and "Traceback" not in log


def test_row_81_a_second_signal_cuts_the_drain_short(model: Path) -> None:
    with serving("--model", str(model), "--drain-timeout-s", "60") as process:
        requests = [DetokenizeRequest(open=[DetokenizeOpen(handle=1)])]
        held_open = process.stub.Detokenize(keep_open(requests))
        next(held_open)
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.popen.poll() is None  # a sequence is open
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait()[0] == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(held_open)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def keep_open(requests: list[DetokenizeRequest]) -> Iterator[DetokenizeRequest]:
    yield from requests
    time.sleep(20)


def test_the_service_ends_with_its_parent(model: Path) -> None:
    with serving("--model", str(model)) as process:
        process.control.close()
        assert process.wait()[0] == 0


def test_row_81_stop_while_loading(tmp_path: Path) -> None:
    os.mkfifo(make_byte_tokenizer(tmp_path) / "config.json")  # reading it never ends
    command = [*COMMAND, "--port", "0", "--model", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        time.sleep(3)
        assert popen.poll() is None
        popen.send_signal(signal.SIGTERM)
        _, log = popen.communicate(timeout=10)
    assert popen.returncode == 0
    assert "stopped while loading" in log and "Traceback" not in log


def test_row_23_a_taken_port_and_other_bad_starts_are_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            (["--model", str(model), "--port", port], "cannot listen"),
            (["--port", "0", "--model", str(tmp_path / "missing")], "missing"),
            (["--port", "0", "--model", str(tmp_path)], "no tokenizer"),
            (["--port", "0", "--model", str(tmp_path / "broken")], "cannot load"),
        ):
            result = run(*arguments)
            assert result.returncode == 1
            assert words in result.stderr
            assert len(result.stderr.splitlines()) == 1, result.stderr


def test_bad_flags_and_help() -> None:
    result = run("--threads", "0")
    assert result.returncode == 2
    assert "--threads" in result.stderr and "Traceback" not in result.stderr
    assert "--max-text-bytes" in run("--help").stdout
