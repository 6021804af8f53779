"""The norm, SwiGLU and sampling kernels on a GPU: GB/s against a copy's in the same run.

    python -m tests.bench.pointwise [--json FILE]

Each kernel runs in a CUDA graph on rotating buffers, bytes counted once per input and output.
Small rows are bound by latency: there the microseconds count, not the share.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from tests.bench.graph_timing import copy_bandwidth, graph_time
from tests.sampled_rows import kernel_rows

from millstream.kernels.add_rms_norm import add_rms_norm, rms_norm
from millstream.kernels.sample import sample
from millstream.kernels.sample_filters import thresholds
from millstream.kernels.silu_mul import silu_mul

# (kernel, what it does with one buffer, bytes over the buffer's)
Kernel = tuple[str, Callable[[torch.Tensor], object], float]

_CACHE_BYTES = 150 << 20  # three times the L2
_MOST_BUFFERS = 64
_EPS = 1e-6


def buffers(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As many random tensors as overflow the cache."""
    count = min(max(_CACHE_BYTES // (rows * columns * dtype.itemsize), 2), _MOST_BUFFERS)
    return [torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(count)]


def norms(hidden: int) -> list[Kernel]:
    """A buffer's left half is x, its right half the residual."""
    weight = torch.randn(hidden, device="cuda").bfloat16()
    return [
        ("add_rms_norm", lambda t: add_rms_norm(t[:, :hidden], t[:, hidden:], weight, _EPS), 2),
        ("rms_norm", lambda t: rms_norm(t[:, :hidden], weight, _EPS), 1),
    ]


def samplers(rows: int) -> list[Kernel]:
    slots = torch.arange(rows, device="cuda")
    ones, zeros = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    no_k, k, p = torch.zeros_like(slots), torch.full_like(slots, 50), ones * 0.95

    def sampled(temperatures: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sample(kernel_rows(x, slots, slots, temperatures, slots, block_size=1024))

    return [
        ("sample, greedy", functools.partial(sampled, zeros), 1),
        ("sample, random", functools.partial(sampled, ones), 1),
        ("thresholds, off", lambda x: thresholds(x, slots, ones, no_k, ones, zeros), 0),
        ("thresholds, top-k 50", lambda x: thresholds(x, slots, ones, k, ones, zeros), 1),
        ("thresholds, top-p 0.95", lambda x: thresholds(x, slots, ones, no_k, p, zeros), 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_bandwidth()
    print(f"copy: {ceiling / 1e9:.0f} GB/s")
    results = []
    bf16 = torch.bfloat16
    cases = [(rows, 2 * h, bf16, norms(h)) for h in (1024, 5120) for rows in (1, 256, 16384)]
    swiglu: list[Kernel] = [("silu_mul", silu_mul, 1.5)]
    cases += [(rows, 2 * i, bf16, swiglu) for i in (3072, 17408) for rows in (1, 256, 8192)]
    for dtype in (bf16, torch.float32):
        cases += [(rows, 151_936, dtype, samplers(rows)) for rows in (1, 128, 256)]
    for rows, columns, dtype, kernels in cases:
        tensors = buffers(rows, columns, dtype)
        shape = f"{rows} x {columns} {str(dtype)[6:]}"
        for name, kernel, factor in kernels:
            seconds = graph_time([lambda t=t, kernel=kernel: kernel(t) for t in tensors])
            share = factor * tensors[0].nbytes / seconds / ceiling
            print(f"{name:24} {shape:22} {seconds * 1e6:8.2f} us {share:6.2f} of copy", flush=True)
            results.append({"kernel": name, "shape": shape, "us": seconds * 1e6, "share": share})
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy": ceiling, "results": results}))


if __name__ == "__main__":
    main()
