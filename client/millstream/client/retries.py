"""How long to wait before a request that found the engine's queue full is sent again."""

from __future__ import annotations

import random

_FIRST_S, _LONGEST_S = 0.1, 5.0  # without a hint from the engine: doubled each time, up to so long
_JITTER = 0.5  # up to so much longer, so that those who were refused together do not come together


def delay_s(hint_s: float | None, attempt: int, rng: random.Random) -> float:
    """Never less than the engine's hint. `attempt`: 0 for the first time."""
    wait_s = min(_FIRST_S * 2 ** min(attempt, 10), _LONGEST_S) if hint_s is None else hint_s
    return wait_s * (1 + _JITTER * rng.random())
