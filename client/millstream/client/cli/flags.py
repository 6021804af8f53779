"""Flags that several commands share, and what they mean in Python."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.client.client import Client
from millstream.client.jobs import RequestOptions
from millstream.client.launch import import_service
from millstream.client.types import Output
from millstream.rpc.parsing import HelpFormatter, number
from millstream.rpc.sampling_params import SamplingParams, to_proto

# Where the services are when no flag says so; a container's environment knows better.
ENVIRONMENT_ENGINE = os.environ.get("MILLSTREAM_ENGINE") or None
ENGINE = ENVIRONMENT_ENGINE or "localhost:50051"
TOKENIZER = os.environ.get("MILLSTREAM_TOKENIZER") or "localhost:50052"
MAX_TOKENS = 256


def _bias(text: str) -> tuple[int, float]:
    token_id, bias = text.split("=")
    return int(token_id), float(bias)


_bias.__name__ = "ID=BIAS"


# Of a path and a file with a suffix; no schema and no grammar looks like that.
_FILE_NAME = re.compile(r"[\w./~-]+\.(json|lark|gbnf|ebnf|txt)")


def text_or_file(text: str) -> str:
    """The contents of the file of this name, if there is one; else the text itself, unless it looks
    like a file's name."""
    try:
        if Path(text).is_file():
            return Path(text).read_text()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL
        return text
    if _FILE_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return text


_IDS: Mapping[str, Any] = {"type": int, "nargs": "+", "action": "extend", "metavar": "ID"}

# Ranges and defaults are the engine's, which checks them; the text here is for --help.
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {"type": int, "default": MAX_TOKENS, "help": f"default: {MAX_TOKENS}"},
    "min_tokens": {"type": int, "help": "no end before so many tokens"},
    "temperature": {"type": float, "help": "0 (greedy) to 2; default: 1"},
    "top_p": {"type": float, "help": "above 0, up to 1 (off, the default)"},
    "top_k": {"type": int, "help": "0 or -1: off (the default)"},
    "min_p": {"type": float, "help": "0 (off, the default) to 1"},
    "seed": {"type": int, "help": "gives the same answer again; default: a random one"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "ends the text; repeatable"},
    "stop_token_ids": {**_IDS, "help": "end the answer; repeatable"},
    "include_stop": {"action": "store_true", "help": "keep what matched in the text"},
    "ignore_eos": {"action": "store_true", "help": "go on after an EOS token"},
    "skip_special_tokens": {
        "action": argparse.BooleanOptionalAction,
        "help": "leave special tokens out of the text (the default)",
    },
    "presence_penalty": {"type": float, "help": "-2 to 2; default: 0"},
    "frequency_penalty": {"type": float, "help": "-2 to 2; default: 0"},
    "repetition_penalty": {"type": float, "help": "above 0; default: 1"},
    "n": {"type": int, "help": "so many answers; default: 1"},
    "logit_bias": {
        "type": _bias,
        "metavar": _bias.__name__,
        "action": "append",
        "help": "added to the logit of a token id, -100 to 100; repeatable",
    },
    "allowed_token_ids": {**_IDS, "help": "only these; repeatable"},
    "bad_words": {"action": "append", "metavar": "TEXT", "help": "never this; repeatable"},
    "logprobs": {
        "type": int,
        "metavar": "N",
        "help": "of each token, and of the N likeliest in its place; shown with --json",
    },
    "prompt_logprobs": {"type": int, "metavar": "N", "help": "the same of the prompt's tokens"},
    "json_schema": {
        "type": text_or_file,
        "metavar": "JSON|FILE",
        "help": "the answer follows this JSON schema; at most one of this and the next four",
    },
    "json_object": {"action": "store_true", "help": "the answer is a JSON object"},
    "regex": {"help": "the whole answer matches this"},
    "choice": {
        "action": "append",
        "metavar": "TEXT",
        "help": "the answer is this; repeatable: or this",
    },
    "grammar": {
        "type": text_or_file,
        "metavar": "TEXT|FILE",
        "help": "the answer follows this grammar (Lark, or GBNF)",
    },
}

_ID_FLAGS = ("--stop-token-ids", "--allowed-token-ids")


def targets(text: str) -> str | list[str]:
    """One target, or several with commas between (which gRPC's own lists of addresses have too)."""
    several = "," in text and not text.startswith(("ipv4:", "ipv6:"))
    return text.split(",") if several else text


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("services")
    group.add_argument(
        "--engine",
        default=ENGINE,
        help=f"gRPC target, or several with commas between; default: {ENGINE}",
    )
    group.add_argument("--tokenizer", default=TOKENIZER, help=f"default: {TOKENIZER}")
    group.add_argument(
        "--connect-timeout-s",
        type=number(float, 0.01, 1e6),
        default=10.0,
        help="how long to wait until they serve; default: 10",
    )


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request")
    group.add_argument("--timeout-s", type=float, help="give up after so many seconds")
    group.add_argument("--priority", type=int, default=0, help="smaller is served first; default 0")
    group.add_argument(
        "--max-retries",
        type=int,
        default=0,
        help="how often to come again when the engine's queue is full; default: 0",
    )
    group.add_argument(
        "--api-key", default="", help="whose part of the engine this uses; default: its own"
    )


def request_options(args: argparse.Namespace) -> RequestOptions:
    """What the request flags say, but for the key, which is the client's."""
    return {
        "timeout_s": args.timeout_s,
        "priority": args.priority,
        "max_retries": args.max_retries,
    }


def client(args: argparse.Namespace) -> Client:
    """The client that the connection and request flags describe."""
    return Client(
        targets(args.engine), args.tokenizer, timeout_s=args.connect_timeout_s, api_key=args.api_key
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling",
        "Where the model's generation_config.json sets temperature, top_p, top_k, min_p or "
        "repetition_penalty, that is the default.",
    )
    for name, options in _SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), **options)


def with_text_first(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with a text that follows token ids moved to the front: argparse would take it
    for one more id. A number is one, unless `--` is before it."""
    for start, flag in enumerate(arguments, 1):
        if flag == "--":
            break
        ids = list(itertools.takewhile(_is_number, arguments[start:])) if flag in _ID_FLAGS else []
        end = start + len(ids)
        text = arguments[end : end + 1]
        if ids and text and (text[0] == "-" or not text[0].startswith("-")):
            return [*text, *arguments[:end], *arguments[end + 1 :]]
    return arguments


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags say; a flag that is not given is unset. Raises InvalidArgument for
    what the client itself refuses."""
    given = {name: getattr(args, name) for name in _SAMPLING}
    given = {name: value for name, value in given.items() if not (value is None or value is False)}
    if args.skip_special_tokens is False:
        given["skip_special_tokens"] = False
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    params = SamplingParams(**given)
    to_proto(params)  # before anything is connected
    return params


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of millstream-engine, and its defaults in the help. Raises LaunchError where that
    is not installed."""
    parser.formatter_class = HelpFormatter
    import_service("millstream.engine.config").add_arguments(
        parser.add_argument_group("engine (the flags of millstream-engine)")
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that differ from their defaults: keywords for launch and LLM."""
    fields = dataclasses.fields(import_service("millstream.engine.config").EngineConfig)
    values = {field.name: getattr(args, field.name) for field in fields}
    return {
        field.name: values[field.name] for field in fields if values[field.name] != field.default
    }


def as_json(output: Output) -> dict[str, Any]:
    """An output as plain JSON values."""
    return dataclasses.asdict(output)
