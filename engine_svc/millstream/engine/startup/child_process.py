"""What the engine's child processes have in common: the core, and the ranks beside it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM)
# What a wrong flag or a bad model folder raises, with a message for the person who started us.
CLEAR_ERRORS = (ValueError, OSError, NotImplementedError)


@contextlib.contextmanager
def deaf_from_birth() -> Iterator[None]:
    """Signals to the whole process group find a process that is started meanwhile deaf to them,
    until it ignores them (outlive_nobody); those to us come a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_nobody() -> None:
    """The kernel kills this process when the thread that started it ends, also while no thread of
    ours can run. The parent alone decides: signals to the whole process group are ignored."""
    for number in _OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_GROUP)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def explain(error: Exception) -> str:
    """An exception in one line: a clear one by its message alone."""
    return one_line(error) if isinstance(error, CLEAR_ERRORS) else named(error)


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
