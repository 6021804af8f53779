"""The commands `fetch` and `import-gguf`, here and in `millstream`: flags and what they do."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from millstream.hub.errors import HubError
from millstream.hub.progress import StderrProgress


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a Hugging Face id, or a model folder, which is only looked at; "
        "default: the embedded model",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every file of the embedded model with its checksum, and obtain it again "
        "where one differs",
    )


def run_fetch(args: argparse.Namespace) -> int:
    """Obtains a model; its folder is the last line on stdout."""
    from millstream.hub.default_model import fetch_default

    if args.verify and args.model is not None:
        return _fail("--verify is for the embedded model alone")
    try:
        if args.model is None:
            folder = fetch_default(verify=args.verify)
        else:
            folder = _resolve_interruptibly(args.model)
    except HubError as error:
        return _fail(error)
    sys.stdout.write(f"{folder}\n")
    return 0


def _resolve_interruptibly(model: str) -> Path:
    """resolve(); exits at a Ctrl-C, where huggingface_hub would first finish the files it is at."""
    from millstream.hub.models import resolve
    from millstream.rpc.process import leave
    from millstream.rpc.threads import in_daemon_thread

    try:
        return asyncio.run(in_daemon_thread(lambda: resolve(model), name="fetch"))
    except KeyboardInterrupt:
        leave(130)


def add_import_gguf_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a Llama-architecture GGUF file")
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="the model folder to make; must not exist or be empty"
    )


def run_import_gguf(args: argparse.Namespace) -> int:
    """Converts a GGUF file into a model folder, which is the last line on stdout."""
    progress = StderrProgress()
    try:
        from millstream.hub.gguf_import import import_gguf

        import_gguf(args.file, args.dir, progress)
    except (HubError, OSError) as error:
        progress.close()
        return _fail(error)
    except ImportError as error:
        return _fail(f"import-gguf needs {error.name}: pip install 'millstream[tokenizer]'")
    sys.stdout.write(f"{args.dir}\n")
    return 0


def _fail(error: Exception | str) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 1
