"""Flags of `millstream bench`: the workload, and the engine that is measured."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Literal

from millstream.client.bench import plot
from millstream.client.bench.targets import Target
from millstream.client.cli import flags
from millstream.client.processes import LaunchError
from millstream.client.workload import Workload
from millstream.rpc.errors import InvalidArgument

DUMMY_MODEL = "qwen3-0.6b"
_GOALS = ("ttft", "itl", "e2e")
_LOWEST_RATE = 0.001  # requests a second: of less, nobody sees the end


def add_workload_flags(parser: argparse.ArgumentParser, default: Workload) -> Any:
    """Returns the group, for more of them."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-requests",
        type=positive,
        default=default.num_requests,
        help=f"default: {default.num_requests}",
    )
    for name, what in (("input", "prompt"), ("output", "output")):
        low, high = getattr(default, f"{name}_len")
        group.add_argument(
            f"--{name}-len",
            nargs="+",
            type=positive,
            action=_Range,
            metavar=("MIN", "MAX"),
            default=(low, high),
            help=f"{what} tokens, drawn evenly; one number: always so many; default: {low} {high}",
        )
    group.add_argument("--temperature", type=_finite, default=default.temperature)
    group.add_argument("--workload-seed", type=int, default=default.seed, help="default: 0")
    group.add_argument("--json", type=Path, metavar="FILE", help="write settings and figures there")
    group.add_argument(
        "--plot", type=_plot_file, metavar="FILE", help="draw them: FILE.png or FILE.svg"
    )
    return group


def add_target_flags(parser: argparse.ArgumentParser, *, streams: bool, in_process: bool) -> None:
    group = parser.add_argument_group("where")
    group.add_argument(
        "--engine",
        metavar="TARGET",
        help="one that runs, instead of a new one; of several with commas between, each request "
        "goes to the one with least to do; with a stream for each, they take turns",
    )
    group.add_argument("--tokenizer", metavar="TARGET", help="that of --engine, for --text")
    group.add_argument(
        "--text", action="store_true", help="text in and out, through the tokenizer service"
    )
    if in_process:
        group.add_argument(
            "--in-process", action="store_true", help="without gRPC, in this process"
        )
    if streams:
        group.add_argument(
            "--streams",
            choices=("one", "per-request"),
            default="one",
            help="all requests on one Generate stream (the default), or a stream for each",
        )
        group.add_argument(
            "--channels",
            type=positive,
            default=4,
            help="connections of these to each engine; default: 4",
        )
    try:
        flags.add_engine_flags(parser)
        parser.set_defaults(no_engine=None)
    except LaunchError as error:  # the bare client, which can measure an engine that runs
        parser.set_defaults(no_engine=error)


def workload(args: argparse.Namespace) -> Workload:
    return Workload(
        num_requests=args.num_requests,
        input_len=args.input_len,
        output_len=args.output_len,
        temperature=args.temperature,
        seed=args.workload_seed,
    )


def target(args: argparse.Namespace) -> Target:
    """Raises InvalidArgument for flags that go against each other, LaunchError where no engine is
    installed and none is given. The bare client measures that of the environment (in a container:
    the other container's)."""
    if args.engine is None and args.no_engine is not None and flags.ENVIRONMENT_ENGINE is not None:
        args.engine = flags.ENVIRONMENT_ENGINE
        args.tokenizer = args.tokenizer or (flags.TOKENIZER if args.text else None)
    options: dict[str, Any] = {} if args.no_engine else flags.engine_options(args)
    streams: Literal["one", "per-request"] = getattr(args, "streams", "one")
    _check(args, options, streams)
    model = options.pop("model", None)
    if model is None and options.get("load_format") == "dummy":
        model = DUMMY_MODEL
    return Target(
        engine=None if args.engine is None else flags.targets(args.engine),
        tokenizer=args.tokenizer,
        model=model,
        options=options,
        streams=streams,
        channels=args.channels if streams == "per-request" else 1,
        text=args.text,
    )


def _check(args: argparse.Namespace, options: dict[str, Any], streams: str) -> None:
    def refuse(name: str, why: str) -> None:
        raise InvalidArgument(f"--{name}: {why}", field=name)

    if args.engine is None and args.no_engine is not None:
        raise args.no_engine
    if args.engine is not None and options:
        name = next(iter(options)).replace("_", "-")
        refuse(name, "an engine that runs (--engine) has its own settings")
    if args.tokenizer is not None and args.engine is None:
        refuse("tokenizer", "only with --engine")
    if args.tokenizer is not None and not args.text:
        refuse("tokenizer", "only with --text; token ids need none")
    if args.text and args.engine is not None and args.tokenizer is None:
        refuse("text", "needs --tokenizer, as --engine is given")
    if args.text and streams != "one":
        refuse("text", "goes through the client's one stream")
    if getattr(args, "in_process", False) and (args.engine is not None or args.text):
        refuse("in-process", "neither with --engine nor with --text")
    if args.json and args.plot and args.json.resolve() == args.plot.resolve():
        refuse("plot", "a file of its own, not that of --json")
    if getattr(args, "in_process", False) and streams != "one":
        refuse("in-process", "has no streams")


class _Range(argparse.Action):
    """MIN and MAX, or one number for both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if len(values) > 2:
            raise argparse.ArgumentError(self, f"MIN and MAX, not {len(values)} numbers")
        low, high = values[0], values[-1]
        if low > high:
            raise argparse.ArgumentError(self, f"MIN {low} is above MAX {high}")
        setattr(namespace, self.dest, (low, high))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"1 or more, not {text}")
    return value


def rate(text: str) -> float:
    value = float(text)
    if not value >= _LOWEST_RATE:
        raise argparse.ArgumentTypeError(f"{_LOWEST_RATE:g} or more, not {text}")
    return value


def goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in _GOALS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(_GOALS)} with :MS, not {text}")
    if not 0 < float(limit) < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds above 0, not {limit}")
    return name, float(limit)


def _finite(text: str) -> float:
    """JSON has no other numbers."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"a finite number, not {text}")
    return value


def _plot_file(text: str) -> Path:
    file = Path(text)
    if file.suffix.lower() not in plot.SUFFIXES:
        raise argparse.ArgumentTypeError(f"a file name ending in .png or .svg, not {text}")
    return file


positive.__name__ = rate.__name__ = _finite.__name__ = "number"
goal.__name__ = "NAME:MS"
