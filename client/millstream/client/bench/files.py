"""The files that a benchmark writes when it has run."""

from __future__ import annotations

from pathlib import Path


def check_writable(file: Path) -> None:
    """Raises OSError for a file that cannot be written, before the work. Leaves all as it was."""
    if file.exists() and not (file.is_file() or file.is_dir()):
        return  # a pipe, whose reader would take this for the end
    place = file.resolve()
    is_new = not place.exists()
    with place.open("a"):
        pass
    if is_new:
        place.unlink()
