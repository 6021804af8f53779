"""A model over several GPUs of one host: one JSON line for each figure.

    python3 -m tests.bench.tp_gpu [--ranks 2] [--only ring sums parity kill idle replicas ...]
                                  [--models qwen3-14b qwen3-32b] [--budget-s 520]
    python3 -m tests.bench.tp_gpu --device cpu --ranks 8

ring: what sending a plan costs (tests/bench/ring.py). sums: all-reduces (tp_sums.py). parity:
tokens on one GPU and on all (tp_parity.py). kill, idle: a service that loses a rank, that was idle
(tp_service.py). replicas: one client of as many engines as GPUs (replicas.py). speed: random
weights, on one GPU and on all: ms per token of one sequence, and the flagship workload.

Each part is a process of its own that is killed when its time is up; what does not fit in the
budget is left out, and a line says so. On a CPU: ranks over gloo, tiny models, engines with a
runner that takes as long as a GPU; sums and speed are a GPU's matter.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from tests.bench.engine_gpu import flagship, latency, record_graphs
from tests.bench.json_lines import report

from millstream.engine import LLM

# The longest that a part may take, in seconds.
LIMITS = {
    "ring": 40,
    "sums": 90,
    "parity": 200,
    "kill": 90,
    "idle": 90,
    "replicas": 150,
    "speed": 200,
}
ON_CPU = ("ring", "parity", "kill", "idle", "replicas")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--models", nargs="+", default=["qwen3-14b", "qwen3-32b"])
    parser.add_argument("--budget-s", type=float, default=520)
    parser.add_argument("--speed-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.speed_of is not None:
        speed(arguments.ranks, arguments.speed_of)
        return
    deadline = time.monotonic() + arguments.budget_s
    for part in arguments.only:
        if arguments.device == "cuda" or part in ON_CPU:
            for command in commands(part, arguments):
                run(part, command, deadline)


def commands(part: str, arguments: argparse.Namespace) -> list[list[str]]:
    """The modules of a part, with their flags."""
    ranks, device = str(arguments.ranks), arguments.device
    over = ["--ranks", ranks, "--device", device]
    match part:
        case "ring":
            return [["ring", "--readers", str(arguments.ranks - 1)]]
        case "sums":
            return [["tp_sums", "--ranks", ranks]]
        case "parity":
            return [["tp_parity", *over]]
        case "kill" | "idle":
            return [["tp_service", *over, "--only", part]]
        case "replicas":
            runner = "model" if device == "cuda" else "paced"
            return [["replicas", "--runner", runner, "--engines", ranks]]
    return [
        ["tp_gpu", "--speed-of", model, "--ranks", size]
        for model in arguments.models
        for size in ("1", ranks)
    ]


def run(part: str, command: list[str], deadline: float) -> None:
    """Runs a part in time, or says that it did not."""
    left_s = min(deadline - time.monotonic(), LIMITS[part])
    label = " ".join(command)
    if left_s < 5:
        report("tp_left_out", part=label)
        return
    started = time.monotonic()
    # A group of its own: what it has started is killed with it.
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.bench.{command[0]}", *command[1:]], start_new_session=True
    )
    try:
        code: int | str = process.wait(left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = "timeout"
    report("tp_part", part=label, exit=code, seconds=time.monotonic() - started)


def speed(ranks: int, model: str) -> None:
    started = time.perf_counter()
    llm = LLM(model, load_format="dummy", tensor_parallel_size=ranks, max_num_seqs=256)
    report("tp_start", model=model, ranks=ranks, seconds=time.perf_counter() - started)
    latency(llm, tokens=256)
    record_graphs(llm)
    report("tp_recorded", model=model, ranks=ranks, seconds=time.perf_counter() - started)
    flagship(llm, 1)
    llm.close()
    os._exit(0)


if __name__ == "__main__":
    main()
