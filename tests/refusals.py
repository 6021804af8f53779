"""What a refusal may cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from millstream.rpc.errors import MillstreamError


def refusal_at_no_cost(refuse: Callable[[], object]) -> MillstreamError:
    """The error, which is raised without a copy of what is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(MillstreamError) as caught:
            refuse()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    return caught.value
