"""`millstream chat`: a conversation in the terminal that remembers its turns."""

from __future__ import annotations

import argparse
import contextlib
import sys

from millstream.client.cli import flags
from millstream.client.client import Client
from millstream.client.jobs import RequestOptions
from millstream.rpc.errors import EngineUnavailable, InvalidArgument, MillstreamError
from millstream.rpc.sampling_params import SamplingParams

HELP = "talk with the model in the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A conversation that remembers its turns. Ctrl-C stops the running answer, or, at the "
        "prompt, the program. /reset forgets the turns; /exit or Ctrl-D ends."
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    flags.add_connection_flags(parser)
    flags.add_request_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and has a history
    params, options = flags.sampling_params(args), flags.request_options(args)
    if (params.n or 1) > 1:
        raise InvalidArgument("n: a conversation goes on with one answer", field="n")
    start = [{"role": "system", "content": args.system}] if args.system else []
    turns = list(start)
    with flags.client(args) as client:
        client.info()  # says at once if there is nobody to talk with
        while (text := _read_line()) is not None:
            if text == "/reset":
                turns = list(start)
            elif text:
                question = {"role": "user", "content": text}
                answer = _answer(client, [*turns, question], params, options)
                if answer is not None:
                    turns += [question, {"role": "assistant", "content": answer}]
    return 0


def _read_line() -> str | None:
    """The next line; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line == "/exit" else line


def _answer(
    client: Client, turns: list[dict[str, str]], params: SamplingParams, options: RequestOptions
) -> str | None:
    """Prints the answer as it comes; what there is of it if it is stopped; None if it failed."""
    texts: list[str] = []
    try:
        for delta in client.chat_stream(turns, params, **options):
            texts.append(delta.text)
            print(delta.text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]", flush=True)
    except EngineUnavailable:
        raise
    except MillstreamError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return None
    return "".join(texts)
