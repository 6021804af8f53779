"""cuBLAS's products of a layer, by rows: sizes of a batch that cost more than a larger one.

    python -m tests.bench.cublas_sizes [--shares qwen3-14b:1 qwen3-32b:2 ...]

model:ranks; the product is a rank's. One JSON line each: microseconds of a layer's products that
are cuBLAS's, by rows, and the sizes for which a batch of up to 24 rows more takes 5 % less.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from tests.bench.graph_timing import graph_time

from millstream.engine.graphs import batch_sizes
from millstream.engine.model_files.shapes import named_shape
from millstream.engine.parallel import share_of
from millstream.kernels.boxes import padded
from millstream.kernels.linear_configs import choose

SHARES = [
    *("qwen3-4b:1", "qwen3-8b:1", "qwen3-14b:1", "qwen3-14b:2"),
    *("qwen3-32b:1", "qwen3-32b:2", "qwen3-32b:4", "qwen3-32b:8"),
]
_BYTES = 150 << 20  # of distinct weights: several times the L2
_FURTHER, _WORTH = 24, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", nargs="+", default=SHARES)
    for share in parser.parse_args().shares:
        model, ranks = share.split(":")
        times = layer_times(model, int(ranks))
        rounded = {rows: round(us, 1) for rows, us in times.items()}
        print(json.dumps({"share": share, "layer_us": rounded, "odd": odd(rounded)}), flush=True)


def layer_times(model: str, ranks: int) -> dict[int, float]:
    """Microseconds by rows."""
    shape = named_shape(model)
    assert shape is not None, f"no shape is named {model}"
    times: dict[int, float] = {}
    for size, depth in share_of(shape, 0, ranks).config.layer_products.values():
        copies = max(2, math.ceil(_BYTES / (2 * size * depth)))
        weights = torch.randn(copies, size, depth, device="cuda", dtype=torch.bfloat16)
        for rows in batch_sizes(256):
            if choose(rows, size, depth) is None:
                x = padded(rows, depth, like=weights).normal_()
                calls = [lambda w=w, x=x: F.linear(x, w) for w in weights]
                times[rows] = times.get(rows, 0.0) + 1e6 * graph_time(calls, replays=6)
    return times


def odd(times: Mapping[int, float]) -> dict[int, int]:
    """The sizes that cost more than a larger one, and which."""
    best = {
        rows: min((other for other in times if rows <= other <= rows + _FURTHER), key=times.get)
        for rows in times
    }
    return {rows: other for rows, other in best.items() if times[other] < _WORTH * times[rows]}


if __name__ == "__main__":
    main()
