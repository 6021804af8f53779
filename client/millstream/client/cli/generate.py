"""`millstream generate`: answers or completes one prompt."""

from __future__ import annotations

import argparse
import json
import sys

from millstream.client.cli import flags
from millstream.client.client import Client
from millstream.rpc.values import check_text

HELP = "answer a prompt, or complete it"


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
    parser.add_argument("--timeout-s", type=float, help="give up after so many seconds")
    flags.add_connection_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    check_text("prompt", prompt)  # before anything is connected
    params = flags.sampling_params(args)
    conversation = [{"role": "user", "content": prompt}]
    with Client(args.engine, args.tokenizer, timeout_s=args.connect_timeout_s) as client:
        chat = args.chat
        if chat is None:
            tokenizer = client.info().tokenizer
            chat = tokenizer is not None and tokenizer.has_chat_template
        if args.json:
            if chat:
                output = client.chat(conversation, params, timeout_s=args.timeout_s)
            else:
                output = client.generate(prompt, params, timeout_s=args.timeout_s)
            print(json.dumps(flags.as_json(output), ensure_ascii=False))
            return 0
        if chat:
            deltas = client.chat_stream(conversation, params, timeout_s=args.timeout_s)
        else:
            deltas = client.stream(prompt, params, timeout_s=args.timeout_s)
        empty = True
        for delta in deltas:
            print(delta.text, end="", flush=True)
            empty = empty and not delta.text
        print()
        if empty:
            print("(the model says nothing)", file=sys.stderr)
    return 0
