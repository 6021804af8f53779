"""`millstream bench`: throughput (also without a word), latency, serve."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable

from google.protobuf import json_format

from millstream.client.bench import in_process, plot, report, runs
from millstream.client.bench.files import check_writable
from millstream.client.bench.metrics import Goals
from millstream.client.bench.progress import Progress
from millstream.client.bench.report import Results
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
    """The exit code: 1 when a request failed. Files are written of what was measured, however it
    ends, and only then."""
    target = bench_flags.target(args)
    in_process: bool = getattr(args, "in_process", False)
    figure = None if args.plot is None else plot.new_figure()
    for file in (args.json, args.plot):
        if file is not None:
            check_writable(file)
    results = Results()
    try:
        if in_process:
            _in_process(target, make_loads, results)
        else:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(_through_grpc(target, make_loads, goals, results))
        results.has_ended = True
    finally:
        if results.measured and args.json is not None:
            workload = bench_flags.workload(args)
            document = report.document(
                bench, target, workload, results, in_process=in_process, goals=goals
            )
            args.json.write_text(json.dumps(document, indent=2) + "\n")
        if results.measured and args.plot is not None:
            title = f"millstream bench {bench}, {results.engine.get('model', '')}"
            plot.draw(figure, results.measured, title, goals)
            plot.save(figure, args.plot)
    if (failures := report.failures(results.runs)) is not None:
        print(f"millstream bench: {failures}", file=sys.stderr)
        return 1
    return 0


def _in_process(target: Target, make_loads: MakeLoads, results: Results) -> None:
    """Shows each run."""
    with in_process.open_llm(target.model, target.options) as llm:
        results.engine = {"model": target.model, **dataclasses.asdict(llm.info)}
        loads = make_loads(llm.info.vocab_size)
        for run in in_process.measure_in_process(llm, loads, Progress()):
            _show(run, results)


async def _through_grpc(
    target: Target, make_loads: MakeLoads, goals: Goals | None, results: Results
) -> None:
    """The same through gRPC."""
    progress = Progress()
    async with open_sender(target, progress) as (sender, info):
        results.engine = json_format.MessageToDict(info, preserving_proto_field_name=True)
        loads = make_loads(info.vocab_size)
        async for run in runs.measure(sender, loads, progress, goals):
            _show(run, results)


def _show(run: Run, results: Results) -> None:
    results.runs.append(run)
    if run.measured:
        print(report.line(run), flush=True)
