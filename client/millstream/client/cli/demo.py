"""`millstream demo`: both services, one question, the answer as it is generated, and the end."""

from __future__ import annotations

import argparse
import sys
import time

from millstream.client.cli import flags
from millstream.client.launch import launch
from millstream.client.types import Delta
from millstream.rpc.logs import LEVELS
from millstream.rpc.sampling_params import SamplingParams

HELP = "start both services, ask one question, stream the answer, stop"
PROMPT = "What is the capital of France?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default=PROMPT, help=f"default: {PROMPT}")
    parser.add_argument("--max-tokens", type=int, default=flags.MAX_TOKENS, help="default: 256")
    parser.add_argument("--log-level", choices=LEVELS, help="show the services' logs")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    options = flags.engine_options(args)
    model = options.pop("model", None)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    started = time.monotonic()
    _note("starting the engine and the tokenizer service ...")
    with launch(model, log_level=args.log_level, **options) as client:
        engine, tokenizer = client.engine_target, client.tokenizer_target
        name = client.info().engine
        _note(
            f"{name.model if name else 'the model'} is ready after "
            f"{time.monotonic() - started:.1f} s: engine on {engine}, tokenizer on {tokenizer}"
        )
        print(f"> {args.prompt}", flush=True)
        for delta in client.chat_stream([{"role": "user", "content": args.prompt}], params):
            print(delta.text, end="", flush=True)
        print()
        print(_summary(delta), flush=True)
        _note("stopping ...")
    return 0


def _summary(last: Delta) -> str:
    usage, timings = last.usage, last.timings
    assert usage is not None
    assert timings is not None
    elapsed_s = timings.first_token_s + timings.decode_s
    return (
        f"[{usage.prompt_tokens} prompt tokens, {usage.output_tokens} output tokens in "
        f"{elapsed_s:.2f} s: {usage.output_tokens / max(elapsed_s, 1e-9):.1f} tokens/s, "
        f"first token after {timings.first_token_s:.2f} s, finish reason {last.finish_reason}]"
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
