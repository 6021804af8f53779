"""`millstream bench`: throughput (also without a word), latency, serve."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format

from millstream.client.bench import in_process, plot, report, runs
from millstream.client.bench.metrics import Goals
from millstream.client.bench.progress import Progress
from millstream.client.bench.runs import Load, Run
from millstream.client.bench.targets import Target, open_sender
from millstream.client.cli import bench_flags
from millstream.client.workload import Workload
from millstream.rpc.process import loop_factory

HELP = "measure tokens/s and latencies of an engine"
THROUGHPUT_HELP = "many requests at once: tokens/s"
LATENCY_HELP = "one request at a time: time to the first token, ms per token"
SERVE_HELP = "requests at random times, so many a second: latencies and goodput"

_SMALL = Workload(num_requests=10, input_len=(128, 128), output_len=(128, 128))
_LOADED = Workload(num_requests=100, input_len=(100, 1024), output_len=(100, 256))

MakeLoads = Callable[[int], list[Load]]  # for a vocabulary of that size
Show = Callable[[Run], None]


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs random requests, all at once, token ids in and out. The defaults are the flagship "
        f"workload; with --load-format dummy the default model is {bench_flags.DUMMY_MODEL}. "
        "Others: millstream bench latency --help, millstream bench serve --help."
    )
    group = bench_flags.add_workload_flags(parser, Workload())
    group.add_argument(
        "--runs", type=bench_flags.positive, default=2, help="the first one warms up; default: 2"
    )
    bench_flags.add_target_flags(parser, streams=True, in_process=True)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    bench_flags.add_workload_flags(parser, _SMALL)
    bench_flags.add_target_flags(parser, streams=False, in_process=True)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends requests at the times of a Poisson process, whatever became of those before. "
        "Latencies count from when a request was due."
    )
    group = bench_flags.add_workload_flags(parser, _LOADED)
    group.add_argument(
        "--request-rate",
        nargs="+",
        type=bench_flags.rate,
        required=True,
        metavar="RATE",
        help="requests a second; several are run in a row; inf: all at once",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=bench_flags.goal,
        default=[],
        metavar="NAME:MS",
        help="count requests within these: ttft:200 itl:20 (its mean) e2e:5000",
    )
    bench_flags.add_target_flags(parser, streams=True, in_process=False)


def run_throughput(args: argparse.Namespace) -> int:
    workload = bench_flags.workload(args)
    return _run(args, "throughput", lambda size: runs.throughput_loads(workload, size, args.runs))


def run_latency(args: argparse.Namespace) -> int:
    workload = bench_flags.workload(args)
    return _run(args, "latency", lambda size: runs.latency_loads(workload, size))


def run_serve(args: argparse.Namespace) -> int:
    workload = bench_flags.workload(args)
    goals = Goals(**dict(args.goodput)) if args.goodput else None
    rates = args.request_rate
    return _run(args, "serve", lambda size: runs.serve_loads(workload, size, rates), goals)


def _run(
    args: argparse.Namespace, bench: str, make_loads: MakeLoads, goals: Goals | None = None
) -> int:
    """The exit code: 1 when a request failed."""
    target = bench_flags.target(args)
    in_process: bool = getattr(args, "in_process", False)
    figure = None if args.plot is None else plot.new_figure()
    for file in (args.json, args.plot):
        if file is not None:
            file.touch()  # what cannot be written is told before the work
    progress = Progress()
    done: list[Run] = []

    def show(run: Run) -> None:
        done.append(run)
        if run.measured:
            print(report.line(run), flush=True)

    if in_process:
        engine = _in_process(target, make_loads, progress, show)
    else:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            engine = runner.run(_through_grpc(target, make_loads, progress, goals, show))
    workload = bench_flags.workload(args)
    figures = report.document(
        bench, target, workload, done, in_process=in_process, engine=engine, goals=goals
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.plot is not None:
        measured = [run for run in done if run.measured]
        plot.draw(figure, measured, f"millstream bench {bench}, {engine.get('model', '')}", goals)
        plot.save(figure, args.plot)
    if (failures := report.failures(done)) is not None:
        print(f"millstream bench: {failures}", file=sys.stderr)
        return 1
    return 0


def _in_process(
    target: Target, make_loads: MakeLoads, progress: Progress, show: Show
) -> dict[str, Any]:
    """Shows each run; returns what the engine says of itself."""
    with in_process.open_llm(target.model, target.options) as llm:
        loads = make_loads(llm.info.vocab_size)
        for run in in_process.measure_in_process(llm, loads, progress):
            show(run)
        return {"model": target.model, **dataclasses.asdict(llm.info)}


async def _through_grpc(
    target: Target, make_loads: MakeLoads, progress: Progress, goals: Goals | None, show: Show
) -> dict[str, Any]:
    """The same through gRPC."""
    async with open_sender(target, progress) as (sender, info):
        loads = make_loads(info.vocab_size)
        async for run in runs.measure(sender, loads, progress, goals):
            show(run)
        return json_format.MessageToDict(info, preserving_proto_field_name=True)
