"""Times kernels as a decode step runs them: inside a CUDA graph, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_time(calls: Sequence[Callable[[], object]], *, replays: int = 20) -> float:
    """Seconds per call: the median over replays of a graph that holds all of them.

    Give it so many calls on buffers of their own that these do not fit in the L2 cache, or the
    cache is what it measures.
    """
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_time(graph, replays) / len(calls)


def replay_time(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds of a replay, the median."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large copy on the device: the ceiling."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time([lambda: target.copy_(source)] * 2, replays=10)
