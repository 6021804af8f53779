"""A model over several GPUs of one host: one JSON line for each figure.

    python3 -m tests.bench.tp_gpu [--ranks 2] [--only ring sums parity kill idle replicas ...]
                                  [--models qwen3-14b qwen3-32b] [--budget-s 520]

ring: what sending a plan costs (tests/bench/ring.py). sums: microseconds of an all-reduce inside a
CUDA graph, as the engine does it, by NCCL, and by symmetric memory in one shot and in two; and of a
sum with the norm behind it. parity: tokens of a random model of real shape (8 layers) on one GPU
and on all: float32 token for token, bfloat16 up to ties (docs/performance.md). speed: random
weights, on one GPU and on all: ms per token of one sequence, and the flagship workload. replicas:
one client of as many engines as GPUs (tests/bench/replicas.py). kill: a rank is killed with
SIGKILL while streams run: seconds until they end with UNAVAILABLE and every process is gone.
idle: requests to a service that has just started, and again when it was idle and recorded graphs.

Each part is a process of its own that is killed when its time is up; what does not fit in the
budget is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("ring", "sums", "parity", "kill", "idle", "replicas", "speed")
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
SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
NORM_HIDDEN = 5120
TIE = 0.25  # of the logits' standard deviation
PARITY_TOKENS = 64


def report(name: str, /, **figures: Any) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"bench": f"tp_{name}", **rounded}), flush=True)


# ---- the parent: one process a part


class Budget:
    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def run(self, part: str, *arguments: str, devices: str | None = None) -> None:
        """Runs a part in time, or says that it did not."""
        left_s = min(self._deadline - time.monotonic(), LIMITS[part])
        label = " ".join((part, *arguments))
        if left_s < 5:
            report("left_out", part=label)
            return
        environment = dict(os.environ)
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        command = [sys.executable, "-m", "tests.bench.tp_gpu", "--part", part, *arguments]
        if part in ("ring", "replicas"):
            command = [sys.executable, "-m", f"tests.bench.{part}", *arguments]
        started = time.monotonic()
        # A group of its own: what it has started is killed with it.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code: int | str = process.wait(left_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = "timeout"
        report("part", part=label, exit=code, seconds=time.monotonic() - started)


def run_all(arguments: argparse.Namespace) -> None:
    budget = Budget(arguments.budget_s)
    ranks = str(arguments.ranks)
    if "ring" in arguments.only:
        budget.run("ring", "--readers", str(arguments.ranks - 1))
    if "sums" in arguments.only:
        budget.run("sums", "--ranks", ranks)
    if "parity" in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            budget.run("parity", "--ranks", ranks, "--folder", folder)
    for part in ("kill", "idle"):
        if part in arguments.only:
            budget.run(part, "--ranks", ranks)
    if "replicas" in arguments.only:
        budget.run("replicas", "--runner", "model", "--engines", ranks)
    if "speed" in arguments.only:
        for model in arguments.models:
            for size in ("1", ranks):
                budget.run("speed", "--ranks", size, "--model", model)


# ---- sums


def sums(ranks: int) -> None:
    """Starts the ranks and is rank 0."""
    import socket

    from millstream.engine.ranks.collectives import open_store

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = open_store(listener, ranks)
    others = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.bench.tp_gpu", "--part", "sums_rank"),
                *("--ranks", str(ranks), "--rank", str(rank), "--port", str(port)),
            ]
        )
        for rank in range(1, ranks)
    ]
    sums_rank(ranks, 0, store)
    for other in others:
        other.wait(20)
    os._exit(0)  # NCCL's own end may wait for those that are gone


def sums_rank(ranks: int, rank: int, store: Any) -> None:
    import torch
    import torch.distributed as dist

    from millstream.engine.ranks.collectives import make_group

    group: Any = make_group("cuda", rank, ranks, lambda: store)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(stream):
        group.join(NORM_HIDDEN)
        symm, name = torch.ops.symm_mem, group._name
        for num_bytes in SIZES:
            x = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
            buffer = group._sums[torch.bfloat16][: x.numel()]
            ways: dict[str, Any] = {
                "engine": lambda x=x: group.all_reduce(x),
                "nccl": lambda x=x: dist.all_reduce(x),
            }
            if buffer.numel() == x.numel():
                ways["one_shot"] = lambda b=buffer: symm.one_shot_all_reduce(b, "sum", name)
                ways["two_shot"] = lambda b=buffer: symm.two_shot_all_reduce_(b, "sum", name)
                ways["one_shot_copy"] = lambda b=buffer, x=x: symm.one_shot_all_reduce_copy(
                    b, x, "sum", name
                )
            times = {way: time_in_graph(call) for way, call in ways.items()}
            x.fill_(rank + 1)
            if num_bytes <= 16 << 20:
                expected = ranks * (ranks + 1) / 2
                assert bool((group.all_reduce(x) == expected).all()), num_bytes
            if rank == 0:
                report("sums", ranks=ranks, bytes=num_bytes, **times)
        times = {}
        for rows in (1, 256):
            best = torch.ones(3, rows, device="cuda")
            ids = torch.ones(rows, dtype=torch.int64, device="cuda")
            logits = torch.ones(rows, 75_968, dtype=torch.bfloat16, device="cuda")
            times[f"gather_3x{rows}"] = time_in_graph(lambda x=best: group.all_gather(x))
            times[f"first_{rows}"] = time_in_graph(lambda x=ids: group.from_first(x))
            times[f"gather_logits_{rows}"] = time_in_graph(lambda x=logits: group.all_gather(x))
        if rank == 0:
            report("gathers", ranks=ranks, **times)
        for rows in (1, 8, 32, 64, 128, 192, 256, 400):
            times = norm_times(group, rows)
            if rank == 0:
                report("norms", ranks=ranks, rows=rows, hidden=NORM_HIDDEN, **times)
        torch.cuda.synchronize()


def norm_times(group: Any, rows: int) -> dict[str, float]:
    """Of a sum, the residual's addition and the norm: in one kernel, and one after the other."""
    import torch

    from millstream.kernels.add_rms_norm import add_rms_norm
    from millstream.kernels.sum_add_rms_norm import sum_add_rms_norm

    part, residual = torch.zeros(2, rows, NORM_HIDDEN, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(NORM_HIDDEN, dtype=torch.bfloat16, device="cuda")
    mailboxes = group._mailboxes
    ways = {
        "one_kernel": lambda: sum_add_rms_norm(part, residual, weight, 1e-6, mailboxes),
        "apart": lambda: add_rms_norm(group.all_reduce(part), residual, weight, 1e-6),
    }
    return {way: time_in_graph(call) for way, call in ways.items()}


def time_in_graph(call: Any, repeats: int = 20, replays: int = 10) -> float:
    """Microseconds of a call, of which a CUDA graph holds some; the median of its replays."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(repeats):
        call()
    graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(1e3 * before.elapsed_time(after) / repeats)
    return statistics.median(times)


# ---- parity


def parity(ranks: int, folder: Path) -> None:
    import torch
    from tests.tiny_models import make_tiny_model

    make_tiny_model(
        folder / "model",
        "qwen3",
        dtype=torch.bfloat16,
        vocab_size=151_931,  # not a multiple of anything
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    runs = [("float32", size) for size in (1, ranks)] + [("bfloat16", size) for size in (1, ranks)]
    outputs: dict[tuple[str, int], Any] = {}
    for dtype, size in runs:
        result = folder / f"{dtype}_{size}.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.bench.tp_gpu", "--part", "parity_run"),
                *("--ranks", str(size), "--folder", str(folder / "model")),
                *("--dtype", dtype, "--result", str(result)),
            ],
            check=True,
        )
        outputs[dtype, size] = json.loads(result.read_text())
    for kind in ("greedy", "sampled", "filtered"):
        one, many = (outputs["float32", size][kind] for size in (1, ranks))
        report("parity_float32", ranks=ranks, kind=kind, equal=one == many, **differing(one, many))
    for size in (1, ranks):
        told = ties(folder / "model", outputs["bfloat16", size]["greedy"])
        report("parity_bfloat16", ranks=size, **told)


def differing(one: list[list[int]], many: list[list[int]]) -> dict[str, int]:
    pairs = list(zip(one, many, strict=True))
    return {"requests": len(pairs), "differing": sum(a != b for a, b in pairs)}


def parity_prompts() -> list[list[int]]:
    """Mixed lengths, every third with a prefix of 200 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 150_000) for _ in range(200)]
    return [
        (shared if i % 3 == 0 else [])
        + [rng.randrange(3, 150_000) for _ in range(rng.randint(1, 300))]
        for i in range(24)
    ]


def parity_run(ranks: int, folder: Path, dtype: str, result: Path) -> None:
    """Small chunks, and a pool so small that requests are preempted."""
    from tests.bench.engine_gpu import record_graphs

    from millstream.engine import LLM, SamplingParams

    prompts = parity_prompts()
    common: dict[str, Any] = {"max_tokens": PARITY_TOKENS, "ignore_eos": True}
    kinds = {
        "greedy": [SamplingParams(temperature=0, **common)] * len(prompts),
        "sampled": [SamplingParams(seed=i, **common) for i in range(len(prompts))],
        "filtered": [SamplingParams(seed=i, top_p=0.9, **common) for i in range(len(prompts))],
    }
    block_tokens = 64
    bytes_per_block = 8 * 2 * block_tokens * (8 // ranks) * 128 * (4 if dtype == "float32" else 2)
    llm = LLM(
        folder,
        device="cuda",
        dtype=dtype,
        tensor_parallel_size=ranks,
        max_num_seqs=16,
        max_num_batched_tokens=500,
        kv_cache_bytes=40 * bytes_per_block,
    )
    record_graphs(llm)
    outputs = {
        kind: [each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)]
        for kind, params in kinds.items()
    }
    report("parity_run", ranks=ranks, dtype=dtype, preemptions=llm.stats().num_preemptions)
    result.write_text(json.dumps(outputs))
    llm.close()
    os._exit(0)


def ties(folder: Path, outputs: list[list[int]]) -> dict[str, Any]:
    """How far tokens are behind the likeliest of a float32 model that is given those before."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    worst, count = 0.0, 0
    for prompt, output in zip(parity_prompts(), outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output], device="cuda")).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
        behind = (logits.amax(1) - chosen) / logits.std()
        worst = max(worst, float(behind.max()))
        count += int((behind > 0).sum())
    tokens = sum(map(len, outputs))
    return {"good": worst < TIE, "worst_std": worst, "not_largest": count, "tokens": tokens}


# ---- speed


def speed(ranks: int, model: str) -> None:
    from tests.bench.engine_gpu import flagship, latency, record_graphs

    from millstream.engine import LLM

    started = time.perf_counter()
    llm = LLM(model, load_format="dummy", tensor_parallel_size=ranks, max_num_seqs=256)
    report("start", model=model, ranks=ranks, seconds=time.perf_counter() - started)
    latency(llm, tokens=256)
    record_graphs(llm)
    report("recorded", model=model, ranks=ranks, seconds=time.perf_counter() - started)
    flagship(llm, 1)
    llm.close()
    os._exit(0)


# ---- idle


def idle(ranks: int) -> None:
    from tests.engine_processes import engine

    from millstream.client import Client, SamplingParams

    flags = ("--model", "qwen3-0.6b", "--load-format", "dummy", "--max-num-seqs", "128")
    prompts = [[5 + i, *range(6, 30)] for i in range(100)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    first_token = SamplingParams(max_tokens=1)
    options: dict[str, Any] = {"detokenize": False, "use_tqdm": False}
    over_ranks = ("--tensor-parallel-size", str(ranks))
    with (
        engine(*flags, *over_ranks, runner="model") as server,
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
                "idle",
                ranks=ranks,
                idle_s=idle_s,
                tokens_per_s=sum(len(output.token_ids) for output in outputs) / seconds,
                one_token_ms=1e3 * (time.perf_counter() - started),
            )


# ---- kill


async def kill(ranks: int) -> None:
    from tests.engine_health import NOT_SERVING, SERVING, HealthWatch
    from tests.engine_processes import EngineProcess, Stream, connect, submission
    from tests.rank_processes import all_end, descendants, rank_pids

    server = EngineProcess(
        *("--model", "qwen3-0.6b", "--load-format", "dummy", "--max-num-seqs", "16"),
        *("--tensor-parallel-size", str(ranks)),
        runner="model",
    )
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
            "kill",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=["qwen3-14b", "qwen3-32b"])
    parser.add_argument("--budget-s", type=float, default=520)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.part:
        case None:
            run_all(arguments)
        case "sums":
            sums(arguments.ranks)
        case "sums_rank":
            from millstream.engine.ranks.collectives import enter_store

            store = enter_store(arguments.port, arguments.ranks)
            sums_rank(arguments.ranks, arguments.rank, store)
            os._exit(0)
        case "parity":
            parity(arguments.ranks, arguments.folder)
        case "parity_run":
            parity_run(arguments.ranks, arguments.folder, arguments.dtype, arguments.result)
        case "speed":
            speed(arguments.ranks, arguments.model)
        case "kill":
            asyncio.run(kill(arguments.ranks))
        case "idle":
            idle(arguments.ranks)


if __name__ == "__main__":
    main()
