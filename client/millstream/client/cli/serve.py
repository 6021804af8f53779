"""`millstream serve`: engines and the tokenizer service in the foreground, as child processes."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from millstream.client.cli import flags
from millstream.client.launch import (
    check_installed,
    engine_arguments,
    prefetch,
    tokenizer_arguments,
)
from millstream.client.processes import ServiceProcesses
from millstream.client.replicas import gpus_of, plan_replicas
from millstream.rpc.logs import LEVELS, configure_logging
from millstream.rpc.options import address
from millstream.rpc.parsing import number

HELP = "run both services in the foreground until Ctrl-C or SIGTERM"
_ENGINE_PORT, _TOKENIZER_PORT = 50051, 50052

logger = logging.getLogger("millstream.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("services")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    port = number(int, 0, 65535)
    group.add_argument(
        "--engine-port",
        type=port,
        default=_ENGINE_PORT,
        metavar="PORT",
        help=f"of the first engine; 0: any free ones; default: {_ENGINE_PORT}",
    )
    group.add_argument(
        "--tokenizer-port",
        type=port,
        metavar="PORT",
        help=f"0: any free one; default: {_TOKENIZER_PORT}, or the port after the engines'",
    )
    group.add_argument(
        "--replicas",
        type=number(int, 1, 1024),
        default=1,
        metavar="N",
        help="engines with the same model on consecutive ports, each with its own GPUs where there "
        "are any, for clients that are given all of them; when one ends, all do; default: 1",
    )
    group.add_argument("--log-level", choices=LEVELS, default="info", help="default: info")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    configure_logging(args.log_level, process="serve")
    signal.signal(signal.SIGTERM, _exit)
    options = flags.engine_options(args)
    check_installed("engine", "tokenizer")
    model = options.get("model")
    prefetch(model, options)
    common = ["--host", args.host, "--log-level", args.log_level]
    gpus = gpus_of(os.environ)
    replicas = plan_replicas(args.replicas, options, first_port=args.engine_port, gpus=gpus)
    with ServiceProcesses() as processes:
        children = [
            processes.start(
                "engine",
                [*engine_arguments(replica.options), *common, "--port", str(replica.port)],
                quiet=False,
                environment=replica.environment,
            )
            for replica in replicas
        ]
        port = _tokenizer_port(args.tokenizer_port, [replica.port for replica in replicas])
        tokenizer = [*tokenizer_arguments(model, options), *common, "--port", str(port)]
        children.append(processes.start("tokenizer", tokenizer, quiet=False))
        processes.wait_serving()
        for child in children:
            assert child.port is not None
            logger.info("%s on %s", child.name, address(args.host, child.port))
        processes.wait_failure()
    return 0


def _tokenizer_port(wanted: int | None, engine_ports: Sequence[int]) -> int:
    if wanted is not None:
        return wanted
    return _TOKENIZER_PORT if _TOKENIZER_PORT not in engine_ports else engine_ports[-1] + 1


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)  # unwinds through the children's end
