"""The processes of ranks, found from outside, for tests of their ends."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.engine_processes import alive


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children = (thread / "children").read_text().split()
                found += [
                    each for child in children for each in (int(child), *descendants(int(child)))
                ]
    return found


def rank_pids(pid: int) -> list[int]:
    """The rank processes below one, in the order of their ranks."""
    return sorted(each for each in descendants(pid) if _runs(each, b"engine.ranks.process"))


def wait_for_ranks(pid: int, count: int, within_s: float = 30) -> list[int]:
    """Waits until there are as many, or more."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if len(pids := rank_pids(pid)) >= count:
            return pids
        time.sleep(0.01)
    raise AssertionError("no such ranks")


def all_end(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.01)
    return False


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _runs(pid: int, module: bytes) -> bool:
    with contextlib.suppress(OSError):
        return module in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
