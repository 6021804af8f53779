"""Sampling's two kernels on a GPU, in microseconds: so many warps of the second, alone and behind
the LM head.

    python -m tests.bench.sampling [--rows 1 64 128 256] [--vocab 151936] [--hidden 1024]

Each runs in a CUDA graph. Alone: on rotating bfloat16 logits that overflow the cache; torch's sum,
a number a row, is a plain read. Behind the head: as in a step, with what the L2 holds of the logits
then; the head alone is told, so that differences are sampling's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from tests.bench.graph_timing import graph_time
from tests.bench.pointwise import buffers
from tests.sampled_rows import kernel_rows

from millstream.engine.sampling import vocab_block
from millstream.kernels import sample as sample_kernels
from millstream.kernels.decode_state import SlotTables
from millstream.kernels.linear import Workspace, linear
from millstream.kernels.linear_configs import choose
from millstream.kernels.sample import sample
from millstream.kernels.sample_masses import block_masses

CHOICE_WARPS = (2, 4, 8)
_HEADS = 4  # products in a graph, each with what samples its logits

Call = Callable[[torch.Tensor], object]


def calls(rows: int, vocab_size: int, temperature: float) -> dict[str, Call]:
    """What is done with logits [rows, vocab_size]."""
    block_size = vocab_block(vocab_size)
    slots = torch.arange(rows, device="cuda")
    temperatures = torch.full((rows + 1,), temperature, device="cuda")
    seeds = torch.arange(rows + 1, device="cuda")
    tables = SlotTables(computed=seeds.clone(), last_tokens=seeds.clone())

    def masses(x: torch.Tensor) -> torch.Tensor:
        return block_masses(x, slots, temperatures, None, block_size)

    def whole(warps: int, advanced: SlotTables | None, x: torch.Tensor) -> torch.Tensor:
        rows_of_x = kernel_rows(x, slots, slots, temperatures, seeds, block_size=block_size)
        with mock.patch.object(sample_kernels, "_CHOICE_WARPS", warps):
            return sample(rows_of_x, advanced=advanced)

    ships = sample_kernels._CHOICE_WARPS
    return {
        "torch's sum": lambda x: x.sum(dim=1, dtype=torch.float32),
        "masses": masses,
        **{f"sample, {n} warps": functools.partial(whole, n, tables) for n in CHOICE_WARPS},
        f"sample, {ships} warps, nothing advanced": functools.partial(whole, ships, None),
    }


def alone(rows: int, vocab_size: int, temperature: float) -> None:
    logits = buffers(rows, vocab_size, torch.bfloat16)
    for name, call in calls(rows, vocab_size, temperature).items():
        seconds = graph_time([functools.partial(call, each) for each in logits])
        tell(f"{rows} x {vocab_size}, temperature {temperature}", name, seconds)


def behind_the_head(rows: int, vocab_size: int, hidden: int, temperature: float) -> None:
    """The product as TritonOps makes it."""
    weight = torch.randn(vocab_size, hidden, device="cuda").bfloat16()
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    config, workspace = choose(rows, vocab_size, hidden), Workspace.create(x.device)

    def head() -> torch.Tensor:
        return F.linear(x, weight) if config is None else linear(x, weight, config, workspace)

    def then(call: Call) -> object:
        return call(head())

    head_s = graph_time([head] * _HEADS)
    tell(f"{rows} x {vocab_size}", "the head alone", head_s)
    for name, call in calls(rows, vocab_size, temperature).items():
        seconds = graph_time([functools.partial(then, call)] * _HEADS) - head_s
        tell(f"{rows} x {vocab_size}, temperature {temperature}, behind the head", name, seconds)


def tell(case: str, name: str, seconds: float) -> None:
    print(f"{case}: {1e6 * seconds:7.2f} us {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{sample_kernels._CHOICE_WARPS} warps ship")
    for rows in arguments.rows:
        for temperature in (0.0, 0.6):
            alone(rows, arguments.vocab, temperature)
        behind_the_head(rows, arguments.vocab, arguments.hidden, 0.6)


if __name__ == "__main__":
    main()
