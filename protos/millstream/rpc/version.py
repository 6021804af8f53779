"""The versions that both services tell: of the protocol, and of the installed distribution."""

from __future__ import annotations

import importlib.metadata

API_VERSION = "v1"


def millstream_version() -> str:
    """Of the installed distribution; "unknown" where the sources run without being installed."""
    try:
        return importlib.metadata.version("millstream")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
