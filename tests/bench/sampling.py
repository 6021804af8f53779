"""Sampling's two kernels on a GPU, in microseconds: other tiles of the first, and what is left.

    python -m tests.bench.sampling [--rows 1 64 128 256] [--vocab 151936]

Each runs in a CUDA graph on rotating bfloat16 logits that overflow the cache. A plain read of them
is the floor: torch's sum, whose result is a number a row. The whole less the masses is the choice.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from tests.bench.graph_timing import graph_time
from tests.bench.pointwise import buffers

from millstream.engine.sampling import vocab_block
from millstream.kernels.decode_state import SlotTables
from millstream.kernels.sample import sample
from millstream.kernels.sample_masses import SHIPPED, Tile, block_masses

MASSES_TILES = (
    Tile(logits=2048, warps=1),
    Tile(logits=4096, warps=2),
    Tile(logits=4096, warps=4),
    Tile(logits=8192, warps=4),
    Tile(logits=8192, warps=8),
    Tile(logits=16384, warps=8),
)


def measure(rows: int, vocab_size: int, temperature: float) -> None:
    logits = buffers(rows, vocab_size, torch.bfloat16)
    block_size = vocab_block(vocab_size)
    slots = torch.arange(rows, device="cuda")
    temperatures = torch.full((rows + 1,), temperature, device="cuda")
    seeds = torch.arange(rows + 1, device="cuda")
    tables = SlotTables(computed=seeds.clone(), last_tokens=seeds.clone())

    def masses(tile: Tile, x: torch.Tensor) -> torch.Tensor:
        return block_masses(x, slots, temperatures, None, block_size, tile)

    def whole(advanced: SlotTables | None, x: torch.Tensor) -> torch.Tensor:
        arguments = (slots, slots, temperatures, seeds)
        return sample(x, *arguments, block_size=block_size, advanced=advanced)

    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "torch's sum": lambda x: x.sum(dim=1, dtype=torch.float32),
        **{f"masses, {tile}": functools.partial(masses, tile) for tile in MASSES_TILES},
        f"sample ({SHIPPED})": functools.partial(whole, None),
        "sample and advance": functools.partial(whole, tables),
    }
    for name, call in calls.items():
        us = 1e6 * graph_time([functools.partial(call, each) for each in logits])
        print(f"{rows} x {vocab_size}, temperature {temperature}: {us:7.2f} us {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for rows in arguments.rows:
        for temperature in (0.0, 0.6):
            measure(rows, arguments.vocab, temperature)


if __name__ == "__main__":
    main()
