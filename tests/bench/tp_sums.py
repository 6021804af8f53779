"""Sums over GPUs inside a CUDA graph, in microseconds: one JSON line for each size.

    python3 -m tests.bench.tp_sums [--ranks 2]

An all-reduce as the engine does it, by NCCL, and by symmetric memory in one shot and in two; small
gathers; a sum with the residual's addition and the norm behind it, in one kernel and apart.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.graph_timing import replay_time
from tests.bench.json_lines import report

from millstream.engine.ranks.collectives import enter_store, make_group, open_store
from millstream.kernels.add_rms_norm import add_rms_norm
from millstream.kernels.sum_add_rms_norm import sum_add_rms_norm

SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
NORM_HIDDEN = 5120
NORM_ROWS = (1, 8, 32, 64, 128, 192, 256, 400)
LOGITS = 75_968  # a rank's of two, of Qwen3's vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank == 0:
        lead(arguments.ranks)
    else:
        measure(arguments.ranks, arguments.rank, enter_store(arguments.port, arguments.ranks))
    os._exit(0)  # NCCL's own end may wait for those that are gone


def lead(ranks: int) -> None:
    """Starts the other ranks and is rank 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = open_store(listener, ranks)
    command = [sys.executable, "-m", "tests.bench.tp_sums", "--ranks", str(ranks)]
    others = [
        subprocess.Popen([*command, "--rank", str(rank), "--port", str(port)])
        for rank in range(1, ranks)
    ]
    measure(ranks, 0, store)
    for other in others:
        other.wait(20)


def measure(ranks: int, rank: int, store: Any) -> None:
    """All ranks measure together; rank 0 tells."""
    group: Any = make_group("cuda", rank, ranks, lambda: store)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def told(name: str, **figures: Any) -> None:
        if rank == 0:
            report(f"tp_{name}", ranks=ranks, **figures)

    with torch.inference_mode(), torch.cuda.stream(stream):
        group.join(NORM_HIDDEN)
        for num_bytes in SIZES:
            told("sums", bytes=num_bytes, **sum_times(group, num_bytes))
            if num_bytes <= 16 << 20:
                check_sum(group, num_bytes, rank, ranks)
        told("gathers", **gather_times(group))
        for rows in NORM_ROWS:
            told("norms", rows=rows, hidden=NORM_HIDDEN, **norm_times(group, rows))
        torch.cuda.synchronize()


def sum_times(group: Any, num_bytes: int) -> dict[str, float]:
    symm, name = torch.ops.symm_mem, group._name
    x = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
    buffer = group._sums[torch.bfloat16][: x.numel()]
    ways: dict[str, Any] = {
        "engine": lambda: group.all_reduce(x),
        "nccl": lambda: dist.all_reduce(x),
    }
    if buffer.numel() == x.numel():
        ways["one_shot"] = lambda: symm.one_shot_all_reduce(buffer, "sum", name)
        ways["two_shot"] = lambda: symm.two_shot_all_reduce_(buffer, "sum", name)
        ways["one_shot_copy"] = lambda: symm.one_shot_all_reduce_copy(buffer, x, "sum", name)
    return {way: time_in_graph(call) for way, call in ways.items()}


def check_sum(group: Any, num_bytes: int, rank: int, ranks: int) -> None:
    x = torch.full((num_bytes // 2,), rank + 1, dtype=torch.bfloat16, device="cuda")
    assert bool((group.all_reduce(x) == ranks * (ranks + 1) / 2).all()), num_bytes


def gather_times(group: Any) -> dict[str, float]:
    times = {}
    for rows in (1, 256):
        best = torch.ones(3, rows, device="cuda")
        ids = torch.ones(rows, dtype=torch.int64, device="cuda")
        logits = torch.ones(rows, LOGITS, dtype=torch.bfloat16, device="cuda")
        times[f"gather_3x{rows}"] = time_in_graph(lambda x=best: group.all_gather(x))
        times[f"first_{rows}"] = time_in_graph(lambda x=ids: group.from_first(x))
        times[f"gather_logits_{rows}"] = time_in_graph(lambda x=logits: group.all_gather(x))
    return times


def norm_times(group: Any, rows: int) -> dict[str, float]:
    """Of a sum, the residual's addition and the norm: in one kernel, and one after the other."""
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
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(repeats):
        call()
    graph.capture_end()
    return 1e6 * replay_time(graph, replays) / repeats


if __name__ == "__main__":
    main()
