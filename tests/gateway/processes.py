"""Shepherd Model Gateway (PyPI smg) as a subprocess in front of engines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

START_TIMEOUT_S = 60.0


class Gateway:
    """One gateway; `client` is OpenAI's own."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        # The key is not looked at; retries are the gateway's business, not this client's.
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120
        )

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return json.load(answer)

    def healthy_workers(self) -> set[str]:
        workers = self.get("/workers")["workers"]
        return {worker["url"] for worker in workers if worker["is_healthy"]}

    def wait_until_ready(self, num_workers: int, model: str) -> None:
        """Until it knows so many engines and has the model's tokenizer."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, openai.APIError):
                if len(self.healthy_workers()) == num_workers:
                    self.client.completions.create(model=model, prompt="a", max_tokens=1)
                    return
            time.sleep(0.1)
        raise AssertionError(f"the gateway is not ready: {self.log.read_text()}")


@contextlib.contextmanager
def gateway(
    targets: Sequence[str], model: str, log: Path, *flags: str, wrapper: Sequence[str] = ()
) -> Iterator[Gateway]:
    """A gateway on free ports in front of engines at these targets (host:port). `wrapper`: a
    command that runs the rest of its arguments."""
    port, metrics_port = _free_ports(2)
    command = [
        *wrapper,
        *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", *(f"grpc://{target}" for target in targets), *flags),
    ]
    # It draws a picture and colours; a proxy is nothing for loopback.
    environment = os.environ | {"NO_COLOR": "1", "NO_PROXY": "*"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        started = Gateway(port, log)
        started.wait_until_ready(len(targets), model)
        yield started
    finally:
        process.kill()  # it would wait 5 s for connections that are idle
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
