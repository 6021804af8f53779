"""Products of decode on a GPU: cuBLAS and the kernels behind it, and linear.py's, in one run.

    python -m tests.bench.linear [--models qwen3-0.6b qwen3-14b] [--rows 8 16 32 64 128 256]
                                 [--json FILE]

A CUDA graph of one product for each layer over distinct weights; the time is for one. Behind cuBLAS
come the residual's addition with the norm, or SwiGLU; ours have the residual and the rows' squares,
SwiGLU and the scale of rows within. Where linear_configs has no configuration for a shape,
candidates are tried: figures for its table. Kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.bench.compilation import compile_in_parallel
from tests.bench.graph_timing import copy_bandwidth, graph_time

from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.shapes import named_shape
from millstream.kernels.add_rms_norm import add_rms_norm
from millstream.kernels.boxes import padded
from millstream.kernels.linear import ScaledRows, Workspace, linear, num_pieces
from millstream.kernels.linear_configs import Config, Tile, choose, fits
from millstream.kernels.silu_mul import silu_mul

BF16 = torch.bfloat16
_MULTIPROCESSORS = 132
_EPS = 1e-6
_BYTES = 400 << 20  # of distinct weights: several times the L2
_MAX_ELEMENTS = 1 << 31  # of an output: a tile's offsets have 32 bits
_COMPILED_ROWS = 256  # at most: compiled kernels serve any number, and a prompt's are made slowly


def _tile(block_m: int, block_n: int, block_k: int, stages: int, num_warps: int = 4) -> Tile:
    return Tile(
        block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, num_warps=num_warps
    )


_FEW = (_tile(16, 64, 256, 4), _tile(16, 128, 128, 5), _tile(16, 32, 256, 5))
_SOME = (
    _tile(64, 16, 256, 5),
    _tile(64, 32, 128, 6),
    _tile(64, 32, 256, 4),
    _tile(64, 64, 128, 4),
    _tile(64, 64, 256, 3),
    _tile(64, 128, 128, 4),
)
_MANY = (
    _tile(64, 32, 256, 4),
    _tile(64, 64, 128, 5),
    _tile(64, 128, 128, 4),
    _tile(128, 64, 64, 6),
    _tile(128, 64, 128, 4),
    _tile(128, 128, 64, 3),
    _tile(128, 128, 64, 5, num_warps=8),
    _tile(128, 256, 64, 4, num_warps=8),
)
_PROMPTS = tuple(
    replace(tile, across=True)
    for tile in (
        _tile(128, 128, 64, 3),
        _tile(128, 128, 64, 4, num_warps=8),
        _tile(128, 256, 64, 3, num_warps=8),
        _tile(128, 256, 64, 4, num_warps=8),
    )
)
_CANDIDATES = (  # up to so many rows
    (16, (*_FEW, *_SOME)),
    (64, _SOME),
    (256, _MANY),
    (1 << 18, _PROMPTS),
)


@dataclass(frozen=True)
class Product:
    name: str
    out_features: int
    in_features: int
    layers: int

    @property
    def adds(self) -> bool:
        return self.name in ("o", "down")

    def configs(self, rows: int) -> list[Config]:
        shipped = choose(rows, self.out_features, self.in_features)
        if shipped is not None:
            return [shipped]
        candidates = next((tiles for most, tiles in _CANDIDATES if rows <= most), ())
        return [
            tile
            for tile in candidates
            if fits(tile, rows, self.out_features, self.in_features)
            and rows * self.out_features <= _MAX_ELEMENTS
            and 3 * -(-rows // tile.block_m) * self.out_features // tile.block_n >= _MULTIPROCESSORS
        ]


def products(config: ModelConfig) -> Iterator[Product]:
    for name, shape in config.layer_products.items():
        yield Product(name, *shape, config.num_layers)
    yield Product("head", config.vocab_size, config.hidden_size, 1)


class Bench:
    """One product of so many rows, in either way."""

    def __init__(self, product: Product, rows: int, device: str) -> None:
        like = torch.empty(1, dtype=BF16, device=device)
        self.product, self.rows = product, rows
        self.x = padded(rows, product.in_features, like=like).normal_()
        self.residual = padded(rows, product.out_features, like=like).normal_()
        self.norm_weight = like.new_ones(product.out_features)
        self.squares = torch.ones(rows, -(-product.in_features // 64), device=device)
        self.workspace = Workspace.create(torch.device(device))

    def cublas(self, weight: torch.Tensor) -> torch.Tensor:
        out = F.linear(self.x, weight)
        if self.product.adds:
            return add_rms_norm(out, self.residual, self.norm_weight, _EPS)
        return silu_mul(out) if self.product.name == "gate_up" else out

    def ours(self, config: Config, weight: torch.Tensor) -> torch.Tensor:
        squares, scale = None, None
        if isinstance(config, Tile) and self.product.adds:
            squares = self.squares.new_empty(self.rows, num_pieces(len(weight), config))
        elif isinstance(config, Tile) and self.product.name != "head":
            scale = ScaledRows(squares=self.squares, eps=_EPS)
        return linear(
            self.x,
            weight,
            config,
            self.workspace,
            residual=self.residual if self.product.adds else None,
            swiglu=self.product.name == "gate_up",
            norm=scale,
            squares=squares,
        )


def compile_one(product: Product, rows: int, config: Config) -> None:
    weight = torch.empty(product.out_features, product.in_features, dtype=BF16)
    Bench(product, min(rows, _COMPILED_ROWS), "cpu").ours(config, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-14b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = {model: named_shape(model) for model in arguments.models}
    unknown = [model for model, shape in shapes.items() if shape is None]
    if unknown:
        parser.error(f"--models: no built-in shape {', '.join(unknown)}")
    configs = {model: shape for model, shape in shapes.items() if shape is not None}
    # A kernel is compiled for a product and a tile, not for rows.
    jobs = {
        (product, config): (product, rows, config)
        for shape in configs.values()
        for product in products(shape)
        for rows in arguments.rows
        for config in product.configs(rows)
    }
    compile_in_parallel(compile_one, list(jobs.values()))
    print(f"{len(jobs)} kernels compiled", flush=True)
    torch.manual_seed(0)
    print(f"copy: {copy_bandwidth() / 1e9:.0f} GB/s")
    results = []
    for model, shape in configs.items():
        results += measure_model(model, shape, arguments.rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def measure_model(
    model: str, shape: ModelConfig, all_rows: Sequence[int]
) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    totals = {rows: [0.0, 0.0] for rows in all_rows}
    for product in products(shape):
        size = product.out_features, product.in_features
        count = max(2, -(-_BYTES // (2 * size[0] * size[1])))
        weights = [torch.randn(*size, device="cuda", dtype=BF16) for _ in range(count)]
        for rows in all_rows:
            bench = Bench(product, rows, "cuda")
            cublas = us(bench.cublas, weights)
            timed = [
                (us(functools.partial(bench.ours, config), weights), config)
                for config in product.configs(rows)
            ]
            timed.sort(key=lambda entry: entry[0])
            best = min([cublas, *(each for each, _ in timed)])
            totals[rows][0] += product.layers * cublas
            totals[rows][1] += product.layers * best
            gb_s = 2 * size[0] * size[1] / best / 1e3
            print(
                f"{model} {product.name} {rows} rows: cuBLAS {cublas:.2f} us; {gb_s:.0f} GB/s best"
            )
            for each, config in timed[:3]:
                print(f"    {each:.2f} us {config}", flush=True)
                entry = {"model": model, **asdict(product), "rows": rows, "cublas_us": cublas}
                results.append({**entry, "us": each, "config": str(config)})
    for rows, (cublas, best) in totals.items():
        print(f"{model} whole step of {rows} rows: cuBLAS {cublas:.0f} us, best {best:.0f} us")
    return results


def us(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    return 1e6 * graph_time([functools.partial(call, weight) for weight in weights], replays=8)


if __name__ == "__main__":
    main()
