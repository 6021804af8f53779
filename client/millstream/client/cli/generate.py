"""`millstream generate`: completes one prompt."""

from __future__ import annotations

import argparse
import json
import sys

from millstream.client.cli import flags
from millstream.client.client import Client

HELP = "complete a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with; -: from stdin")
    parser.add_argument("--chat", action="store_true", help="as a user's message to a chat model")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--timeout-s", type=float, help="give up after so many seconds")
    flags.add_connection_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = flags.sampling_params(args)
    conversation = [{"role": "user", "content": prompt}]
    with Client(args.engine, args.tokenizer, timeout_s=args.connect_timeout_s) as client:
        if args.json:
            if args.chat:
                output = client.chat(conversation, params, timeout_s=args.timeout_s)
            else:
                output = client.generate(prompt, params, timeout_s=args.timeout_s)
            print(json.dumps(flags.as_json(output), ensure_ascii=False))
            return 0
        if args.chat:
            deltas = client.chat_stream(conversation, params, timeout_s=args.timeout_s)
        else:
            deltas = client.stream(prompt, params, timeout_s=args.timeout_s)
        empty = True
        for delta in deltas:
            print(delta.text, end="", flush=True)
            empty = empty and not delta.text
        print()
        if empty and not args.chat:
            print("(the model adds no text; --chat puts the prompt as a question)", file=sys.stderr)
    return 0
