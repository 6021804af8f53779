"""Fixtures that every part's tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton interprets its kernels. It reads this when it is first imported, which
    any test module's imports may do.

    A shell starts what is in the background with Ctrl-C ignored, and whatever tests start inherits
    it: those of Ctrl-C would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not gpu" in config.option.markexpr:
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The real default model's folder in the user's own cache; obtained there on first use."""
    from millstream.hub.default_model import fetch_default

    return fetch_default()
