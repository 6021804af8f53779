"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata


def millstream_version() -> str:
    """Of the installed distribution; "unknown" where the sources run without being installed."""
    try:
        return importlib.metadata.version("millstream")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
