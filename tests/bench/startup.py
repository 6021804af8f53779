"""Seconds from nothing to SERVING with warm caches, one JSON line.

    python -m tests.bench.startup [--runs 2] [engine flags]     the engine alone, with its phases
    python -m tests.bench.startup --both [--runs 3] [flags]     `millstream serve`, both services

The first run warms the caches (kernels, files, Python's bytecode) and is told apart; the figures
are the median of the others, the phases the last one's. On a GPU: `python3 -m tests.bench.startup
--model qwen3-0.6b --load-format dummy`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
ENGINE = [sys.executable, "-m", "millstream.engine", "--port", "0"]
BOTH = [
    *(str(Path(sys.executable).parent / "millstream"), "serve"),
    *("--engine-port", "0", "--tokenizer-port", "0"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--both", action="store_true")
    arguments, flags = parser.parse_known_args()
    command = [*(BOTH if arguments.both else ENGINE), *flags]
    with tempfile.TemporaryDirectory() as folder:
        environment = _with_bytecode(folder)
        starts = [
            _start(command, environment, num_services=2 if arguments.both else 1)
            for _ in range(arguments.runs)
        ]
    times = [seconds for seconds, _ in starts]
    figures = {
        "seconds_to_serving": round(statistics.median(times[1:] or times), 2),
        "runs": [round(seconds, 2) for seconds in times],
        "phases": starts[-1][1],
        "bytecode": "made by the first run" if environment != os.environ else "installed",
    }
    print(json.dumps(figures))


def _with_bytecode(folder: str) -> dict[str, str]:
    """An environment in which Python keeps its bytecode: some images hold none of torch's, and
    forbid to write it. Compiling it takes longer than all else of a start."""
    environment = dict(os.environ)
    torch = importlib.util.find_spec("torch")
    is_there = torch is not None and torch.cached is not None and Path(torch.cached).is_file()
    if sys.dont_write_bytecode or not is_there:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = folder
    return environment


def _start(
    command: list[str], environment: dict[str, str], *, num_services: int
) -> tuple[float, dict[str, float]]:
    """Seconds to SERVING, and the phases that the engine told."""
    started = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    addresses: list[str] = []
    lines: list[str] = []
    for line in server.stderr:
        lines.append(line)
        addresses += re.findall(r"serving on (127\.0\.0\.1:\d+)", line)
        if len(addresses) == num_services:
            break
    assert addresses, "".join(lines)
    assert all(_is_serving(address) for address in addresses)
    elapsed = time.perf_counter() - started
    server.send_signal(signal.SIGINT)
    server.communicate()
    return elapsed, _phases("".join(lines))


def _phases(log: str) -> dict[str, float]:
    told = re.search(r"start: [\d.]+ s \((.*)\)", log)
    assert told is not None, log
    pairs = (part.rsplit(" ", 1) for part in told.group(1).split(", "))
    return {name: float(seconds) for name, seconds in pairs}


def _is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return bool(stub.Check(health_pb2.HealthCheckRequest()).status == SERVING)


if __name__ == "__main__":
    main()
