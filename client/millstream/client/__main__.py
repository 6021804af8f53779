"""`millstream`: the command line. Errors are one clear line and a non-zero exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream.client.cli import bench, chat, demo, generate, health, models, serve
from millstream.client.processes import LaunchError
from millstream.rpc.errors import MillstreamError
from millstream.rpc.parsing import Parser
from millstream.rpc.process import open_standard_streams
from millstream.rpc.version import millstream_version


@dataclass(frozen=True, slots=True)
class _Command:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    arrange: Callable[[Sequence[str]], Sequence[str]] = lambda arguments: arguments


_COMMANDS = {
    "serve": _Command(serve.HELP, serve.add_arguments, serve.run),
    "demo": _Command(demo.HELP, demo.add_arguments, demo.run),
    "generate": _Command(generate.HELP, generate.add_arguments, generate.run, generate.arrange),
    "chat": _Command(chat.HELP, chat.add_arguments, chat.run),
    "health": _Command(health.HELP, health.add_arguments, health.run),
    "fetch": _Command(models.FETCH_HELP, models.add_fetch_arguments, models.run_fetch),
    "import-gguf": _Command(
        models.IMPORT_GGUF_HELP, models.add_import_gguf_arguments, models.run_import_gguf
    ),
    "bench": _Command(bench.HELP, bench.add_throughput_arguments, bench.run_throughput),
    "bench throughput": _Command(
        bench.THROUGHPUT_HELP, bench.add_throughput_arguments, bench.run_throughput
    ),
    "bench latency": _Command(bench.LATENCY_HELP, bench.add_latency_arguments, bench.run_latency),
    "bench serve": _Command(bench.SERVE_HELP, bench.add_serve_arguments, bench.run_serve),
}


def main() -> None:
    open_standard_streams()
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """The exit code; argparse exits by itself."""
    names = (" ".join(argv[:words]) for words in (2, 1) if len(argv) >= words)
    name = next((name for name in names if name in _COMMANDS), None)
    if name is None:
        _overview().parse_args(argv)
        return 2  # not reached: without a command the parser exits
    command = _COMMANDS[name]
    arguments = command.arrange(argv[len(name.split()) :])
    prog = f"millstream {name}"
    try:
        parser = Parser(prog=prog, description=f"{command.help[0].upper()}{command.help[1:]}.")
        command.add_arguments(parser)
        return command.run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MillstreamError, LaunchError, OSError, UnicodeError) as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _overview() -> argparse.ArgumentParser:
    """Lists the commands, and refuses what is none. Flags of a command are its own parser's: they
    may need what is not installed."""
    parser = Parser(
        prog="millstream",
        description="Serves large language models as two gRPC services; talks with them.",
        epilog="millstream COMMAND --help says everything about a command.",
    )
    parser.add_argument("--version", action="version", version=millstream_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        if " " not in name:
            commands.add_parser(name, help=command.help)
    return parser


if __name__ == "__main__":
    main()
