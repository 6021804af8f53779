"""One client of several engines: tokens per second of N against N times one engine's.

    python -m tests.bench.replicas [--engines 4 8] [--slower 4] [--runner model]

The flagship workload through gRPC on one engine, and N times of it on N. Without a GPU engines have
a runner that takes as long as one, --slower times over (paced_runner.py), so that the machine's
cores are not what is measured; with --runner model each has a GPU of its own. One JSON line each.
client_cpu_s: what the client's process took for the N times; on GPUs, too, it must be done within
the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator

from tests.bench.json_lines import report
from tests.bench.paced_runner import PACED
from tests.engine_processes import EngineProcess

from millstream.client import Client
from millstream.client.workload import Requests, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--slower", type=float, default=4)
    parser.add_argument("--runner", choices=["paced", "model"], default="paced")
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["MILLSTREAM_PACE"] = str(arguments.slower)
    runner = PACED if arguments.runner == "paced" else "model"
    with started(max(arguments.engines), runner) as targets:
        for target in targets:  # what is compiled, recorded or imported once
            tokens_per_s([target], Workload(num_requests=16), 1000)
        one = median(targets[:1], arguments.runs)
        for count in arguments.engines:
            before_s = time.process_time()
            all_of_them = median(targets[:count], arguments.runs)
            report(
                "replicas",
                engines=count,
                one_tokens_per_s=round(one),
                all_tokens_per_s=round(all_of_them),
                ratio=all_of_them / one,
                client_cpu_s=(time.process_time() - before_s) / arguments.runs,
            )


@contextlib.contextmanager
def started(count: int, runner: str) -> Iterator[list[str]]:
    flags = ("--model", "qwen3-0.6b", "--load-format", "dummy", "--max-num-seqs", "256")
    engines = []
    for index in range(count):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
        engines.append(EngineProcess(*flags, runner=runner))
    try:
        for engine in engines:
            engine.wait_until_serving(120)
        yield [engine.target for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


def median(targets: list[str], runs: int) -> float:
    return statistics.median(tokens_per_s(targets, Workload(), 100 * run) for run in range(runs))


def tokens_per_s(targets: list[str], workload: Workload, shift: int) -> float:
    """Of as many times the workload as there are engines."""
    drawn = workload.draw()
    parts = [drawn.shifted(shift + 7 * i, 32_000) for i in range(len(targets))]
    requests = Requests(
        prompts=[prompt for part in parts for prompt in part.prompts],
        params=[each for part in parts for each in part.params],
    )
    with Client(targets if len(targets) > 1 else targets[0], None) as client:
        client.info()  # opens its streams, as earlier requests would have
        started_s = time.perf_counter()
        outputs = client.generate(
            requests.prompts, requests.params, detokenize=False, use_tqdm=False
        )
        seconds = time.perf_counter() - started_s
    return sum(len(output.token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    main()
