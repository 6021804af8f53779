"""What ships compiles for Hopper, and spills nothing: no GPU is needed to know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_spills_nothing() -> None:
    """In a process of its own, because Triton interprets in this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_sm90"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) > 30
