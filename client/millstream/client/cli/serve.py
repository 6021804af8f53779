"""`millstream serve`: both services in the foreground, as child processes."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from types import FrameType

from millstream.client.cli import flags
from millstream.client.launch import engine_arguments, prefetch, tokenizer_arguments
from millstream.client.processes import ServiceProcesses
from millstream.rpc.logs import LEVELS, configure_logging
from millstream.rpc.options import address
from millstream.rpc.parsing import number

HELP = "run both services in the foreground until Ctrl-C or SIGTERM"

logger = logging.getLogger("millstream.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("services")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    for name, default in (("engine", 50051), ("tokenizer", 50052)):
        group.add_argument(
            f"--{name}-port",
            type=number(int, 0, 65535),
            default=default,
            metavar="PORT",
            help=f"0: any free one; default: {default}",
        )
    group.add_argument("--log-level", choices=LEVELS, default="info", help="default: info")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    configure_logging(args.log_level, process="serve")
    signal.signal(signal.SIGTERM, _exit)
    options = flags.engine_options(args)
    model = options.get("model")
    prefetch(model, options)
    common = ["--host", args.host, "--log-level", args.log_level]
    with ServiceProcesses() as processes:
        engine = processes.start(
            "engine",
            [*engine_arguments(options), *common, "--port", str(args.engine_port)],
            quiet=False,
        )
        tokenizer = processes.start(
            "tokenizer",
            [*tokenizer_arguments(model, options), *common, "--port", str(args.tokenizer_port)],
            quiet=False,
        )
        processes.wait_serving()
        for child in (engine, tokenizer):
            assert child.port is not None
            logger.info("%s on %s", child.name, address(args.host, child.port))
        processes.wait_failure()
    return 0


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)  # unwinds through the children's end
