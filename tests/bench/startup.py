"""Seconds from `millstream serve` to SERVING, both services, warm caches.

python -m tests.bench.startup [--runs 3] [engine flags]
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    times = [_serve_once(flags) for _ in range(arguments.runs)]
    print(json.dumps({"seconds_to_serving": statistics.median(times), "runs": times}))


def _serve_once(flags: list[str]) -> float:
    command = [str(Path(sys.executable).parent / "millstream"), "serve"]
    ports = ["--engine-port", "0", "--tokenizer-port", "0"]
    started = time.perf_counter()
    server = subprocess.Popen([*command, *ports, *flags], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    addresses: list[str] = []
    for line in server.stderr:
        addresses += re.findall(r"serving on (127\.0\.0\.1:\d+)", line)
        if len(addresses) == 2:
            break
    assert all(_is_serving(address) for address in addresses)
    elapsed = time.perf_counter() - started
    server.send_signal(signal.SIGINT)
    server.communicate()
    return elapsed


def _is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return bool(stub.Check(health_pb2.HealthCheckRequest()).status == SERVING)


if __name__ == "__main__":
    main()
