"""Prints what an image installs before the source: `requirements.py PYPROJECT EXTRA`.

The lines are the project's dependencies and those of an extra ("client" has none), without torch
and triton: an image takes torch from where its site has it, and a CUDA build brings its triton.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_APART = {"torch", "triton"}


def requirements(pyproject: str, extra: str) -> list[str]:
    """Requirement lines. Raises KeyError for an extra that there is not."""
    project = tomllib.loads(pyproject)["project"]
    lines: list[str] = list(project["dependencies"])
    if extra != "client":
        lines += project["optional-dependencies"][extra]
    return [line for line in lines if re.split(r"[^A-Za-z0-9._-]", line)[0] not in _APART]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]).read_text(), sys.argv[2])) + "\n")
