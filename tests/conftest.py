"""Fixtures that every part's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The real default model's folder in the user's own cache; obtained there on first use."""
    from millstream.hub.default_model import fetch_default

    return fetch_default()
