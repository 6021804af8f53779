"""A service over ranks from its start to its end: one JSON line for each figure.

    python3 -m tests.bench.tp_service [--ranks 2] [--only kill idle] [--device cpu]

kill: a rank is killed with SIGKILL while streams run: seconds until they end with UNAVAILABLE and
every process is gone. idle: requests to a service that has just started, and again when it was idle
and recorded graphs. On a GPU random weights of Qwen3-0.6B, on a CPU a tiny model over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.json_lines import report
from tests.engine_health import NOT_SERVING, SERVING, HealthWatch
from tests.engine_processes import EngineProcess, Stream, connect, engine, submission
from tests.rank_processes import all_end, descendants, rank_pids

from millstream.client import Client, SamplingParams

PARTS = ("kill", "idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = [*model_flags(arguments.device, Path(folder))]
        flags += ["--tensor-parallel-size", str(arguments.ranks)]
        if "kill" in arguments.only:
            asyncio.run(kill(arguments.ranks, flags))
        if "idle" in arguments.only:
            idle(arguments.ranks, flags)


def model_flags(device: str, folder: Path) -> tuple[str, ...]:
    if device == "cuda":
        return ("--model", "qwen3-0.6b", "--load-format", "dummy")
    from tests.tiny_models import make_tiny_model

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    make_tiny_model(folder, max_position_embeddings=1 << 15, **heads)
    return ("--model", str(folder), "--device", "cpu", "--threads", "1")


async def kill(ranks: int, flags: list[str]) -> None:
    server = EngineProcess(*flags, "--max-num-seqs", "16", runner="model")
    try:
        server.wait_until_serving(80)
        everyone = [server.process.pid, *descendants(server.process.pid)]
        watch = HealthWatch(server.target, "millstream.v1.Engine")
        assert await watch.next() == SERVING
        async with connect(server.target) as stub:
            streams = [Stream(stub) for _ in range(4)]
            for stream in streams:
                await stream.submit(submission(1, [10], max_tokens=30_000, ignore_eos=True))
                await stream.until_token(1)
            started = time.monotonic()
            os.kill(rank_pids(server.process.pid)[-1], signal.SIGKILL)
            health = await watch.next()
            not_serving_s = time.monotonic() - started
            statuses = [await stream.status() for stream in streams]
            ended_s = time.monotonic() - started
        gone = await asyncio.to_thread(all_end, everyone, 10)
        report(
            "tp_kill",
            ranks=ranks,
            not_serving_s=not_serving_s if health == NOT_SERVING else None,
            streams_ended_s=ended_s,
            statuses=sorted({code.name for code, _ in statuses}),
            details=statuses[0][1],
            all_gone_s=time.monotonic() - started if gone else None,
        )
        await watch.close()
    finally:
        server.stop()


def idle(ranks: int, flags: list[str]) -> None:
    prompts = [[5 + i, *range(6, 30)] for i in range(100)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    first_token = SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"detokenize": False, "use_tqdm": False}
    with (
        engine(*flags, "--max-num-seqs", "128", runner="model") as server,
        Client(server.target, None) as client,
    ):
        for idle_s in (0, 12, 0):
            time.sleep(idle_s)
            started = time.perf_counter()
            outputs = client.generate(prompts, params, **options)
            seconds = time.perf_counter() - started
            started = time.perf_counter()
            client.generate([prompts[0]], first_token, **options)
            report(
                "tp_idle",
                ranks=ranks,
                idle_s=idle_s,
                tokens_per_s=sum(len(output.token_ids) for output in outputs) / seconds,
                one_token_ms=1e3 * (time.perf_counter() - started),
            )


if __name__ == "__main__":
    main()
