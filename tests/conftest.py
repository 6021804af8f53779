"""Fixtures that every part's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton interprets its kernels. It reads this when it is first imported, which
    any test module's imports may do."""
    if "not gpu" in config.option.markexpr:
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The real default model's folder in the user's own cache; obtained there on first use."""
    from millstream.hub.default_model import fetch_default

    return fetch_default()
