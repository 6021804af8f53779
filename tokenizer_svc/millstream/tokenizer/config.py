"""The tokenizer service's settings: one frozen value and its flags."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass

from millstream.rpc.parsing import number


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Settings of one tokenizer service."""

    model: str | None = None  # a folder or a Hugging Face id; None: the embedded model
    served_model_name: str | None = None  # None: the id, or the folder's name
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    max_text_bytes: int = 16 * 1024 * 1024
    encode_timeout_s: float = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of TokenizerConfig."""
    default = TokenizerConfig()
    parser.add_argument(
        "--model", help="model folder or Hugging Face id; default: the embedded model"
    )
    parser.add_argument(
        "--served-model-name", help="name to tell clients; default: the id, or the folder's name"
    )
    parser.add_argument(
        "--threads",
        type=number(int, 1, 1024),
        default=default.threads,
        help="threads that encode; default: one a core",
    )
    parser.add_argument(
        "--max-text-bytes",
        type=number(int, 1, 1 << 30),
        default=default.max_text_bytes,
        help="largest text or chat to encode",
    )
    parser.add_argument(
        "--encode-timeout-s",
        type=number(float, 0.001, 86400),
        default=default.encode_timeout_s,
        help="longest time that one Encode call may take",
    )


def from_arguments(arguments: argparse.Namespace) -> TokenizerConfig:
    """The config that parsed flags describe."""
    names = [field.name for field in dataclasses.fields(TokenizerConfig)]
    return TokenizerConfig(**{name: getattr(arguments, name) for name in names})
