"""Small-M GEMMs of decode on a GPU: linear.py's configurations against cuBLAS in the same run.

    python -m tests.bench.linear [--rows 1 4 16 64 128 256] [--model 0.6b|14b|all] [--json FILE]

A CUDA graph of one GEMM per layer over distinct weights; the time is per GEMM, GB/s are of weights.
Ours include the residual's addition or SwiGLU, cuBLAS's neither. Where linear_configs has no
configuration for a shape, candidates of the general kind are tried: a figure for its table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.bench.graph_timing import copy_bandwidth, graph_time

from millstream.kernels.linear import Workspace, linear
from millstream.kernels.linear_configs import Config, Tile, choose, fits

# model -> (name, out_features, in_features, epilogue, layers)
_SHAPES = {
    "0.6b": [
        ("qkv", 4096, 1024, "", 28),
        ("o", 1024, 2048, "residual", 28),
        ("gate_up", 6144, 1024, "swiglu", 28),
        ("down", 1024, 3072, "residual", 28),
        ("head", 151936, 1024, "", 1),
    ],
    "14b": [
        ("qkv", 7168, 5120, "", 40),
        ("o", 5120, 5120, "residual", 40),
        ("gate_up", 34816, 5120, "swiglu", 40),
        ("down", 5120, 17408, "residual", 40),
        ("head", 151936, 5120, "", 1),
    ],
}
_CANDIDATES: tuple[Config, ...] = (
    Tile(block_m=16, block_n=64, block_k=256, stages=4),
    Tile(block_m=16, block_n=128, block_k=128, stages=4),
    Tile(block_m=64, block_n=64, block_k=128, stages=4),
    Tile(block_m=64, block_n=128, block_k=128, stages=4),
)
_WEIGHT_BYTES = 4 << 30  # at most, per shape: 14b's layers are alike
_FEWEST_BYTES = 200 << 20  # several times the L2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--model", choices=["0.6b", "14b", "all"], default="all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"copy: {copy_bandwidth() / 1e9:.0f} GB/s")
    workspace = Workspace.create(torch.device("cuda"))
    results = []
    models = list(_SHAPES) if arguments.model == "all" else [arguments.model]
    for model in models:
        totals = {rows: [0.0, 0.0] for rows in arguments.rows}
        for name, size, depth, epilogue, layers in _SHAPES[model]:
            count = min(max(_FEWEST_BYTES // (2 * size * depth), layers), 28)
            count = max(min(count, _WEIGHT_BYTES // (2 * size * depth)), 2)
            weights = [
                torch.randn(size, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
                for _ in range(count)
            ]
            for rows in arguments.rows:
                cublas, ours, config = measure(weights, rows, epilogue, workspace)
                gb_s = 2 * size * depth / min(ours, cublas) / 1e9
                totals[rows][0] += layers * cublas
                totals[rows][1] += layers * min(ours, cublas)
                print(
                    f"{model} {name:8} M={rows:<4} cuBLAS {cublas * 1e6:7.2f} us  ours "
                    f"{ours * 1e6:7.2f} us  x{cublas / ours:4.2f}  best {gb_s:5.0f} GB/s  {config}",
                    flush=True,
                )
                results.append(
                    {"model": model, "gemm": name, "rows": rows, "cublas_us": cublas * 1e6}
                    | {"ours_us": ours * 1e6, "config": str(config)}
                )
            del weights
        for rows, (cublas, best) in totals.items():
            print(
                f"{model} whole step M={rows}: cuBLAS {cublas * 1e6:.0f} us, best {best * 1e6:.0f}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def measure(
    weights: list[torch.Tensor], rows: int, epilogue: str, workspace: Workspace
) -> tuple[float, float, str]:
    """Seconds of cuBLAS, of ours (inf: no configuration), and which that was."""
    size, depth = weights[0].shape
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    cublas = graph_time([lambda w=w: F.linear(x, w) for w in weights])
    config = choose(rows, size, depth)
    tried = [config] if config else [c for c in _CANDIDATES if fits(c, rows, size, depth)]
    tried = [c for c in tried if not isinstance(c, Tile) or rows <= 4 * c.block_m]
    best, which = float("inf"), "none"
    for one in tried:
        seconds = graph_time(
            [
                lambda w=w, one=one: linear(
                    x,
                    w,
                    one,
                    workspace,
                    residual=residual if epilogue == "residual" else None,
                    swiglu=epilogue == "swiglu",
                )
                for w in weights
            ]
        )
        if seconds < best:
            best, which = seconds, ("" if config else "candidate ") + str(one)
    return cublas, best, which


if __name__ == "__main__":
    main()
