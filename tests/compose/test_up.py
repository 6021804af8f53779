"""`docker compose up` for real, from images to answers; run by `make compose-test`, in this order.

The project is one of its own, on free ports, and goes away with its volume. Images stay.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.gguf_files import tiny_llama, write_gguf
from tests.hub.loopback_hub import serve

from millstream.client import Client, SamplingParams
from millstream.hub.gguf_import import import_gguf

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

_ROOT = Path(__file__).parent.parent.parent
_BIN = Path(sys.executable).parent
_QUESTION = "What is the capital of France?"
_STOP_S = 30
_UP = ["up", "--detach", "--wait", "--wait-timeout", "120"]


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Stack:
    """One Compose project, and how to talk with it."""

    def __init__(self) -> None:
        self.project = f"millstream-test-{os.getpid()}"
        self.ports = {name: _free_port() for name in ("engine", "tokenizer", "gateway")}
        self.environment = os.environ | {
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_PARALLEL_LIMIT": "1",  # the classic builder would build what they share twice
            "ENGINE_PORT": self.ports["engine"],
            "TOKENIZER_PORT": self.ports["tokenizer"],
            "ENGINE_ARGS": "--kv-cache-bytes 500000000",
        }

    def target(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def compose(self, *arguments: str, **environment: str) -> str:
        """Its standard output; an error shows both."""
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=_ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def inspect(self, service: str) -> dict[str, object]:
        (container,) = self.compose("ps", "--all", "--quiet", service).split()
        return dict(json.loads(_run("docker", "inspect", container))[0])

    def state(self, service: str) -> tuple[str, int, str]:
        """Health, restarts, and when it was started."""
        found = self.inspect(service)
        state = found["State"]
        assert isinstance(state, dict)
        restarts = found["RestartCount"]
        assert isinstance(restarts, int)
        return state.get("Health", {}).get("Status", ""), restarts, state["StartedAt"]

    def wait_healthy(self, service: str, restarts: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while self.state(service)[:2] != ("healthy", restarts):
            assert time.monotonic() < deadline, self.compose("logs", service)
            time.sleep(0.5)

    def client(self) -> Client:
        return Client(self.target("engine"), self.target("tokenizer"))

    def model(self) -> str:
        """What the engine says that it serves."""
        with self.client() as client:
            engine = client.info().engine
            assert engine is not None
            return engine.model


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    started = time.monotonic()
    stack.compose("--profile", "client", "build")
    print(f"\nimages built in {time.monotonic() - started:.0f} s")
    try:
        yield stack
    finally:
        stack.compose("--profile", "client", "down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="module")
def attached(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """`docker compose up` in the foreground, as a user has it; healthy."""
    log = tmp_path_factory.mktemp("up") / "log"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["docker", "compose", "up"],
            cwd=_ROOT,
            env=stack.environment,
            stdout=output,
            stderr=output,
        )
        try:
            while b"Attaching" not in log.read_bytes() or "engine" not in stack.compose("ps"):
                assert process.poll() is None and time.monotonic() - started < 240, log.read_text()
                time.sleep(0.5)
            for service in ("tokenizer", "engine"):
                stack.wait_healthy(service, restarts=0)
            print(f"\nup, model fetched and healthy after {time.monotonic() - started:.0f} s")
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("attached")
class TestUp:
    def test_the_model_is_fetched_with_progress(self, stack: Stack) -> None:
        log = stack.compose("logs", "--no-log-prefix", "model")
        assert "downloading: 0 of 93 MB" in log
        assert "converting: 269 of 269 MB" in log
        assert log.splitlines()[-1] == "/models/SmolLM2-135M-Instruct"

    def test_both_ports_answer_the_host(self, stack: Stack) -> None:
        for service, name in (("engine", "Engine"), ("tokenizer", "Tokenizer")):
            shown = _run(_BIN / "grpcurl", "-plaintext", stack.target(service), "list")
            assert f"millstream.v1.{name}" in shown.splitlines()
        flags = ["--engine", stack.target("engine"), "--tokenizer", stack.target("tokenizer")]
        assert _run(_BIN / "millstream", "health", *flags).count(": serving\n") == 2
        ask = [_BIN / "millstream", "generate", "--temperature", "0", *flags]
        assert "Paris" in _run(*ask, _QUESTION)
        assert _run(*ask, "--raw", "--max-tokens", "4", "The capital of France is").startswith(
            " Paris"
        )

    def test_ports_are_open_to_this_machine_alone(self, stack: Stack) -> None:
        assert stack.compose("port", "engine", "50051").strip() == stack.target("engine")

    def test_client_service(self, stack: Stack) -> None:
        ask = ("run", "--rm", "client", "generate", _QUESTION)
        assert "Paris" in stack.compose(*ask, "--temperature", "0")
        assert stack.compose(*ask, "--max-tokens", "16").strip()
        assert "engine engine:50051: serving" in stack.compose("run", "--rm", "client", "health")

    def test_containers_are_confined(self, stack: Stack) -> None:
        for service in ("tokenizer", "engine"):

            def ask(command: str, service: str = service) -> str:
                return stack.compose("exec", "-T", service, "sh", "-c", command)

            assert ask("id -u").strip() == "10001"
            status = ask("cat /proc/1/status")
            assert re.search(r"^Uid:\s+10001\s", status, re.M)
            assert re.search(r"^CapEff:\s+0+$", status, re.M)
            assert re.search(r"^CapBnd:\s+0+$", status, re.M)
            assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
            ask("touch /tmp/x && ! touch /x && ! touch /opt/millstream/x && ! touch /models/x")

    def test_a_service_that_dies_is_restarted_and_the_other_survives(self, stack: Stack) -> None:
        find = "read service rest < /proc/1/task/1/children"
        before = stack.state("tokenizer")
        kill_core = f"{find}; kill -9 $(cat /proc/$service/task/*/children)"
        stack.compose("exec", "-T", "engine", "sh", "-c", kill_core)
        stack.wait_healthy("engine", restarts=1)
        assert stack.state("tokenizer") == before
        before = stack.state("engine")
        stack.compose("exec", "-T", "tokenizer", "sh", "-c", f"{find}; kill -9 $service")
        stack.wait_healthy("tokenizer", restarts=1)
        assert stack.state("engine") == before
        with stack.client() as client:
            assert client.generate("1 2 3", SamplingParams(max_tokens=2)).token_ids

    def test_ctrl_c_ends_it(self, stack: Stack, attached: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        attached.send_signal(signal.SIGINT)
        attached.wait(_STOP_S)
        print(f"\nCtrl-C took {time.monotonic() - started:.1f} s")
        assert stack.compose("ps", "--quiet") == ""
        for service in ("tokenizer", "engine"):
            assert stack.inspect(service)["State"]["ExitCode"] == 0  # type: ignore[index]


def test_a_second_up_fetches_nothing(stack: Stack) -> None:
    stack.compose("down")
    stack.compose(*_UP)
    assert stack.compose("logs", "--no-log-prefix", "model").splitlines() == [
        "/models/SmolLM2-135M-Instruct"
    ]


def test_the_gateway_is_an_openai_endpoint(stack: Stack) -> None:
    stack.compose("--profile", "gateway", "build", "gateway")
    stack.compose("--profile", "gateway", *_UP, GATEWAY_PORT=stack.ports["gateway"])
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 16,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://{stack.target('gateway')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    stack.compose("--profile", "gateway", "rm", "--stop", "--force", "gateway")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that the containers' user can read."""
    root = tmp_path_factory.mktemp("a model")
    root.chmod(0o755)
    import_gguf(write_gguf(root / "tiny.gguf", tiny_llama()), root / "my-tiny")
    return root / "my-tiny"


def test_model_dir_serves_a_folder(stack: Stack, tiny: Path) -> None:
    stack.compose(*_UP, MODEL_DIR=str(tiny))
    assert stack.model() == "my-tiny"
    with stack.client() as client:
        assert client.generate("abc", SamplingParams(max_tokens=2)).token_ids


def test_a_folder_without_a_model_is_told_at_once(stack: Stack, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AssertionError, match="didn't complete successfully"):
        stack.compose(*_UP, MODEL_DIR=str(tmp_path))
    assert "is no model" in stack.compose("logs", "model")


def test_model_serves_a_hub_id(stack: Stack, tiny: Path) -> None:
    network = f"{stack.project}_default"
    gateway = json.loads(_run("docker", "network", "inspect", network))[0]["IPAM"]["Config"][0]
    with serve({"org/tiny": tiny}, host="0.0.0.0") as hub:
        port = hub.url.rsplit(":", 1)[1]
        setting = {"MODEL": "org/tiny", "HF_ENDPOINT": f"http://{gateway['Gateway']}:{port}"}
        stack.compose(*_UP, **setting)
    assert stack.model() == "org/tiny"
    with stack.client() as client:
        assert client.generate("abc", SamplingParams(max_tokens=2)).token_ids
    stack.compose(*_UP, **setting)  # the hub has gone, the volume has it


def test_images(stack: Stack) -> None:
    """Torch is in the engine's alone, and the tokenizer's is under 400 MB."""
    sizes = {}
    base = json.loads(_run("docker", "image", "inspect", "python:3.11-slim-bookworm"))[0]["Size"]
    for name in ("client", "tokenizer", "engine"):
        image = f"millstream-{name}"
        found = json.loads(_run("docker", "image", "inspect", image))[0]
        sizes[name] = (found["Size"] - base) / 1e6
        assert found["Config"]["User"] == "millstream"
        assert not re.search(r"TOKEN|PASSWORD|SECRET", str(found["Config"]["Env"]))
        code = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
        has_torch = _run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", code)
        assert has_torch.strip() == str(name == "engine")
    print(f"\nMB above the base image of {base / 1e6:.0f}: {sizes}")
    assert sizes["client"] < 120
    assert sizes["tokenizer"] < 265  # the base image proper has about 130


def test_on_a_gpu_triton_may_write_code_and_run_it(stack: Stack) -> None:
    """In the volume of docker-compose.gpu.yml; no GPU is needed for that."""
    confined = ["--read-only", "--cap-drop", "ALL", "--volume", "/compiled", "--entrypoint", "sh"]
    command = "cp /bin/true /compiled/kernel && /compiled/kernel && id -u"
    user = _run("docker", "run", "--rm", *confined, "millstream-engine", "-c", command)
    assert user.strip() == "10001"


def test_down_ends_it(stack: Stack) -> None:
    started = time.monotonic()
    stack.compose("down")
    elapsed_s = time.monotonic() - started
    print(f"\ndown took {elapsed_s:.1f} s")
    assert elapsed_s < _STOP_S
