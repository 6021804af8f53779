"""A request as the scheduler takes it: validated, with every default filled in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

GREEDY_BELOW = 1e-5  # temperatures below this are greedy; nothing is ever divided by them


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are the proto's FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5
    SHUTDOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Resolved sampling parameters. Ranges are validation.py's; this type is never out of them."""

    max_tokens: int  # already clamped to the context limit
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no filter
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one submission asks for."""

    key: int  # names the request between the front end and the core
    token_ids: list[int]  # the prompt, at least one id
    sampling: Sampling
    request_id: str = ""  # for logs
    cache_salt: str = ""
