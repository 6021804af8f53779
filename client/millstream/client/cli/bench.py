"""`millstream bench`: the flagship workload, or a smaller one, through gRPC or in process."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from millstream.client import bench
from millstream.client.cli import flags
from millstream.client.workload import Workload

HELP = "measure tokens/s and latencies of an engine"
_DUMMY_MODEL = "qwen3-0.6b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Workload()
    parser.description = (
        "Runs random requests, all at once, token ids in and out. The defaults are the flagship "
        f"workload; with --load-format dummy the default model is {_DUMMY_MODEL}."
    )
    group = parser.add_argument_group("workload")
    group.add_argument("--in-process", action="store_true", help="without gRPC, in this process")
    group.add_argument("--num-requests", type=_positive, default=default.num_requests)
    for name, what in (("input", "prompt"), ("output", "output")):
        group.add_argument(
            f"--{name}-len",
            nargs=2,
            type=_positive,
            action=_Range,
            metavar=("MIN", "MAX"),
            default=getattr(default, f"{name}_len"),
            help=f"{what} tokens, drawn evenly; default: 100 1024",
        )
    group.add_argument("--temperature", type=float, default=default.temperature)
    group.add_argument(
        "--runs", type=_positive, default=2, help="the first one warms up; default: 2"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    options = flags.engine_options(args)
    model = options.pop("model", None)
    if model is None and options.get("load_format") == "dummy":
        model = _DUMMY_MODEL
    workload = Workload(
        num_requests=args.num_requests,
        input_len=args.input_len,
        output_len=args.output_len,
        temperature=args.temperature,
    )
    if args.json is not None:
        args.json.touch()  # what cannot be written is told before the work
    measure = bench.run_in_process if args.in_process else bench.run_through_grpc
    results = measure(model, options, workload, args.runs)
    for number, result in enumerate(results, 1):
        print(f"run {number}: {_line(result)}", flush=True)
    if args.json is not None:
        figures = {
            "mode": "in-process" if args.in_process else "grpc",
            "model": model,
            "options": options,
            "workload": dataclasses.asdict(workload),
            "runs": results,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _line(result: bench.Result) -> str:
    latencies = "".join(
        f", {name.upper()} " + "/".join(f"{value:.1f}" for value in result[f"{name}_ms"].values())
        for name in ("ttft", "itl")
    )
    return (
        f"{result['output_tokens_per_s']:,.0f} output tokens/s ({result['requests']} requests, "
        f"{result['prompt_tokens']:,} + {result['output_tokens']:,} tokens in "
        f"{result['elapsed_s']:.2f} s){latencies} ms (p50/p90/p99)"
    )


class _Range(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        low, high = values
        if low > high:
            raise argparse.ArgumentError(self, f"MIN {low} is above MAX {high}")
        setattr(namespace, self.dest, (low, high))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"1 or more, not {text}")
    return value


_positive.__name__ = "number"
