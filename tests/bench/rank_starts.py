"""Engines over two ranks, started in pairs, and killed while they start: everything comes up, and
nothing is left. Prints a JSON line for each part; exits with 1 if something is left.

    python3 -m tests.bench.rank_starts [--pairs 20] [--kills 40] [--ranks 2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engine_processes import EngineProcess
from tests.rank_processes import all_end, descendants, shared_memory
from tests.tiny_models import make_tiny_model

START_S = 120  # on a busy machine


def start(folder: Path, ranks: int) -> EngineProcess:
    return EngineProcess(
        *("--model", str(folder), "--device", "cpu", "--threads", "1"),
        *("--tensor-parallel-size", str(ranks)),
        runner="model",
    )


def show_stacks(server: EngineProcess) -> None:
    """What the processes of an engine that does not come up are doing."""
    for pid in reversed(descendants(server.process.pid)):
        print(pid, Path(f"/proc/{pid}/cmdline").read_bytes()[-80:], flush=True)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER's
        time.sleep(0.5)
    print(server.finish())


def pair(folder: Path, ranks: int) -> bool:
    """Two engines in the same second: whether both serve, and both are gone afterwards."""
    servers = [start(folder, ranks) for _ in range(2)]
    everyone: list[int] = []
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(EngineProcess.wait_until_serving, servers, [START_S] * 2))
    except Exception:
        for server in servers:
            if not server.port:
                show_stacks(server)
        raise
    else:
        for server in servers:
            everyone += [server.process.pid, *descendants(server.process.pid)]
    finally:
        for server in servers:
            server.stop()
    whole = len(everyone) >= 2 * (2 + ranks - 1)
    return whole and all_end(everyone, 5)


def kill(folder: Path, ranks: int, rng: random.Random, longest_s: float) -> tuple[bool, str]:
    """An engine of which one process is killed at some moment of its start: whether all end."""
    server = start(folder, ranks)
    pid = server.process.pid
    deadline = time.monotonic() + rng.uniform(0, longest_s)
    everyone = {pid}
    while time.monotonic() < deadline:
        everyone.update(descendants(pid))
        time.sleep(0.005)
    alive = [pid, *descendants(pid)]
    everyone.update(alive)
    victim = rng.choice(alive)
    os.kill(victim, signal.SIGKILL)
    what = ["front end", "core", "rank"][min(alive.index(victim), 2)]
    ended = all_end(list(everyone), 5)
    server.stop()
    return ended, what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--longest-s", type=float, default=6, help="of a start, for kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    before = shared_memory()
    rng = random.Random(arguments.seed)
    good = True
    with tempfile.TemporaryDirectory() as directory:
        heads = 4 if arguments.ranks <= 4 else arguments.ranks
        folder = make_tiny_model(Path(directory), num_attention_heads=heads)
        started = time.monotonic()
        pairs = [pair(folder, arguments.ranks) for _ in range(arguments.pairs)]
        seconds = round(time.monotonic() - started, 1)
        report = {"part": "pairs", "started": len(pairs), "good": sum(pairs), "seconds": seconds}
        print(json.dumps(report), flush=True)
        kills = [
            kill(folder, arguments.ranks, rng, arguments.longest_s) for _ in range(arguments.kills)
        ]
        left = [what for ended, what in kills if not ended]
        victims = {what: sum(w == what for _, w in kills) for _, what in kills}
        print(json.dumps({"part": "kills", "victims": victims, "left_by": left}), flush=True)
        good = all(pairs) and not left
    left_names = sorted(shared_memory() - before)
    print(json.dumps({"part": "/dev/shm", "left": left_names}))
    sys.exit(0 if good and not left_names else 1)


if __name__ == "__main__":
    main()
