"""What the installed commands call: a Ctrl-C during their imports is a quiet exit, no traceback.

The imports take a few tenths of a second, and a command's own handling begins after them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import Any

_INTERRUPTED = 130


def client() -> None:
    """`millstream`."""
    _run("millstream.client.__main__", "millstream")


def engine() -> None:
    """`millstream-engine`."""
    _run("millstream.engine.__main__", "millstream-engine")


def tokenizer() -> None:
    """`millstream-tokenizer`."""
    _run("millstream.tokenizer.__main__", "millstream-tokenizer")


def needs(library: str | None) -> str:
    """What to say where a service's library is missing."""
    extras = "pip install 'millstream[engine,tokenizer]'"
    return f"this needs {library}, which the bare client does without: {extras}"


def _run(module: str, prog: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    asked_for = handler is signal.default_int_handler  # else it is ignored: nohup, a shell's `&`
    if asked_for:
        signal.signal(signal.SIGINT, _exit)
    try:
        main: Any = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("millstream"):
            raise
        sys.exit(f"{prog}: error: {needs(error.name)}")
    try:
        if asked_for:
            signal.signal(signal.SIGINT, handler)
        main()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _exit(number: int, frame: FrameType | None) -> None:
    """At once: there is nothing to clean up, and an exception could come out of anything."""
    os._exit(_INTERRUPTED)
