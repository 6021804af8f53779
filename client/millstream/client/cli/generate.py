"""`millstream generate`: answers or completes one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from millstream.client.cli import flags
from millstream.client.client import Client
from millstream.client.types import Delta, Output
from millstream.rpc.values import check_text

HELP = "answer a prompt, or complete it"
arrange = flags.with_text_first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text; -: from stdin")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="put it as a user's message; default: if the model has a chat template",
    )
    form.add_argument(
        "--raw", action="store_false", dest="chat", default=None, help="go on with the text itself"
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    flags.add_connection_flags(parser)
    flags.add_request_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    check_text("prompt", prompt)  # before anything is connected
    params, options = flags.sampling_params(args), flags.request_options(args)
    conversation = [{"role": "user", "content": prompt}]
    with flags.client(args) as client:
        chat = _has_chat_template(client) if args.chat is None else args.chat
        if not args.json and (params.n or 1) == 1:
            if chat:
                _print_deltas(client.chat_stream(conversation, params, **options))
            else:
                _print_deltas(client.stream(prompt, params, **options))
            return 0
        if chat:
            output = client.chat(conversation, params, **options)
        else:
            output = client.generate(prompt, params, **options)
        if args.json:
            print(json.dumps(flags.as_json(output), ensure_ascii=False))
        else:
            _print_samples(output)
    return 0


def _has_chat_template(client: Client) -> bool:
    tokenizer = client.info().tokenizer
    return tokenizer is not None and tokenizer.has_chat_template


def _print_samples(output: Output) -> None:
    for number, sample in enumerate(output.samples, 1):
        print(f"[{number}/{len(output.samples)}]")
        print(sample.text)


def _print_deltas(deltas: Iterable[Delta]) -> None:
    empty = True
    for delta in deltas:
        print(delta.text, end="", flush=True)
        empty = empty and not delta.text
    print()
    if empty:
        print("(the model says nothing)", file=sys.stderr)
