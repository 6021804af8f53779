"""The `tokenizers` library's panics as errors like any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LibraryPanic(RuntimeError):
    """The library gave up on what the tokenizer's file or the input made it do."""


def panics_as_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Raises LibraryPanic where `call` panics: what Rust raises then is no Exception, so it would
    pass by every handler, and the caller of an RPC would get no answer."""

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise LibraryPanic(str(panic)) from panic

    return guarded
