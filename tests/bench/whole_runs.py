"""Ways of decode attention, or of a product, in whole flagship runs: microseconds of a step by its
number of sequences.

    python3 -m tests.bench.whole_runs --vary attention [--model qwen3-0.6b] [--json FILE]
    python3 -m tests.bench.whole_runs --vary qkv o gate_up down [--best 3]

Alone in a graph (tests.bench.attention, tests.bench.tiles) a kernel has other neighbours than in a
step, and may be faster there than what is faster here. Each way is taken for a run of its own.
Attention's are those of kernels/decode_configs.py, by all steps but those of a few sequences; a
product's the tiles that are fastest alone, of each class of rows the first of them in one run, the
second in the next, and so on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.bench import tiles as alone
from tests.bench.engine_gpu import record_graphs

from millstream.client.workload import Workload
from millstream.engine import LLM
from millstream.engine.graphs import CudaGraphRecorder
from millstream.engine.plan import Plan
from millstream.kernels import decode_configs, linear_configs
from millstream.kernels.linear_configs import Config, Tile

Way = tuple[str, AbstractContextManager[Any]]
_MOST_ROWS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vary", nargs="+", required=True, choices=["attention", *alone.SHAPES])
    parser.add_argument("--model", default="qwen3-0.6b", help="products: qwen3-0.6b's alone")
    parser.add_argument("--best", type=int, default=3, help="tiles of a class of rows to try")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    products = [name for name in arguments.vary if name != "attention"]
    if products and arguments.model != "qwen3-0.6b":
        parser.error("--vary: products are tried for qwen3-0.6b")
    ways: list[Way] = [("ships", nullcontext())]
    if "attention" in arguments.vary:
        ways += attention_ways()
    if products:
        alone.compile_all(sorted({most for name in products for most, _ in classes(name)}))
    for name in products:
        ways += product_ways(name, arguments.best)
    llm = LLM(arguments.model, load_format="dummy", max_num_seqs=_MOST_ROWS)
    results = {}
    for run, (name, applied) in enumerate(ways):
        with applied:
            record_again(llm)
            if run == 0:
                step_times(llm, 0)  # not counted
            results[name] = step_times(llm, run + 1)
        print(f"{name}: {total_ms(results[name]):.1f} ms of decoding", flush=True)
    print_table(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def attention_ways() -> Iterator[Way]:
    for name in ("_WIDE", "_TWO_STAGES", "_THREE_STAGES"):
        config = getattr(decode_configs, name)
        yield name, mock.patch.object(decode_configs, "_BY_PAIRS", ((math.inf, config),))


def classes(product: str) -> Sequence[tuple[int, Config | None]]:
    """The classes of rows that steps of several sequences have tiles for, and what ships."""
    table = linear_configs._MEASURED[alone.SHAPES[product]]
    return [each for each in table if 1 < each[0] <= _MOST_ROWS and isinstance(each[1], Tile)]


def product_ways(product: str, count: int) -> Iterator[Way]:
    shape = alone.SHAPES[product]
    table = dict(linear_configs._MEASURED[shape])
    best = {most: fastest_alone(product, most, count) for most, _ in classes(product)}
    for place in range(count):
        varied = table | {most: found[place] for most, found in best.items() if place < len(found)}
        rows = tuple(sorted(varied.items()))
        print(f"{product} {place}: {rows}", flush=True)
        yield f"{product} {place}", mock.patch.dict(linear_configs._MEASURED, {shape: rows})


def fastest_alone(product: str, rows: int, count: int) -> list[Tile]:
    shape = alone.SHAPES[product]
    weights = torch.randn(alone.LAYERS, *shape, device="cuda").bfloat16() / shape[1] ** 0.5
    timed = functools.partial(alone.microseconds, product, rows, weights=weights, replays=5)
    return sorted(alone.tiles(shape, rows), key=timed)[:count]


def record_again(llm: LLM) -> None:
    """All graphs of decodes, with the kernels that are chosen now."""
    runner: Any = llm._core._runner
    steps = runner._steps
    steps.use_no_graphs()
    steps._ops._decodes.clear()
    torch.cuda.empty_cache()
    with torch.inference_mode(), runner._stream:
        steps.use_graphs(CudaGraphRecorder())
    record_graphs(llm)


def step_times(llm: LLM, run: int) -> dict[int, list[float]]:
    """Microseconds from the end of a step to that of the next, for steps of decodes alone behind
    such steps, by the size of their graph (from 8 on)."""
    runner: Any = llm._core._runner
    ends: list[torch.cuda.Event] = []
    plans: list[Plan] = []

    def launch(plan: Plan) -> None:
        type(runner).launch(runner, plan)
        with runner._stream:
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
        ends.append(end)
        plans.append(plan)

    requests = Workload().draw().shifted(7 * run, llm.info.vocab_size)
    with mock.patch.object(runner, "launch", launch):
        llm.generate(requests.prompts, requests.params, use_tqdm=False)
    torch.cuda.synchronize()  # for the last end
    times = defaultdict(list)
    steps = zip(plans, ends, strict=True)
    for (before, begin), (plan, end) in itertools.pairwise(steps):
        if not before.chunks and not plan.chunks:
            size = -(-len(plan.decode_slots) // 8) * 8
            times[size].append(1e3 * begin.elapsed_time(end))
    return dict(sorted(times.items()))


def total_ms(times: dict[int, list[float]]) -> float:
    return 1e-3 * sum(len(each) * statistics.median(each) for each in times.values())


def print_table(results: dict[str, dict[int, list[float]]]) -> None:
    width = max(map(len, results)) + 2
    print("size steps " + "".join(f"{name:>{width}}" for name in results) + "  best")
    for size, times in results["ships"].items():
        medians = {name: statistics.median(each[size]) for name, each in results.items()}
        cells = "".join(f"{each:{width}.1f}" for each in medians.values())
        print(f"{size:4} {len(times):5} {cells}  {min(medians, key=medians.__getitem__)}")


if __name__ == "__main__":
    main()
