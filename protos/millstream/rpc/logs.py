"""Logging, configured once by each process where it starts."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, *, process: str) -> None:
    """Logs to stderr: time, level, process, logger, message. Never prompts or token ids at INFO."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s",
        force=True,
    )
