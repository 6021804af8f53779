"""What the engine's child processes have in common: the core, and the ranks beside it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
# What a wrong flag or a bad model folder raises, with a message for the person who started us.
CLEAR_ERRORS = (ValueError, OSError, NotImplementedError)


def outlive_nobody() -> None:
    """The kernel kills this process when the thread that started it ends, also while no thread of
    ours can run. The parent alone decides: signals to the whole process group are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def explain(error: Exception) -> str:
    """An exception in one line: a clear one by its message alone."""
    return one_line(error) if isinstance(error, CLEAR_ERRORS) else named(error)


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
