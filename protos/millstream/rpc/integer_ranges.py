"""What the integers among the sampling parameters may be. The engine checks it; whoever finds a
number that protobuf cannot even carry names the same range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from millstream.rpc.values import UINT32_MAX, UINT64_MAX

MAX_SAMPLES = 128
MAX_LOGPROBS = 20  # of the likeliest tokens of one place


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerRange:
    """From `low` to `high`, both included."""

    low: int
    high: int
    words: str = ""  # for people, where the plain range does not say it all

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return self.words or f"from {self.low} to {self.high}"


_INT32_MAX = 2**31 - 1

# Fields of millstream.v1.SamplingParams.
IntegerField = Literal[
    "top_k", "seed", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs"
]
INTEGER_RANGES: Mapping[IntegerField, IntegerRange] = {
    "top_k": IntegerRange(
        low=-1, high=_INT32_MAX, words=f"-1 or 0 (off), or from 1 to {_INT32_MAX}"
    ),
    "seed": IntegerRange(low=0, high=UINT64_MAX),
    "max_tokens": IntegerRange(low=1, high=UINT32_MAX),
    "min_tokens": IntegerRange(low=0, high=UINT32_MAX),
    "n": IntegerRange(low=1, high=MAX_SAMPLES),
    "logprobs": IntegerRange(low=0, high=MAX_LOGPROBS),
    "prompt_logprobs": IntegerRange(low=0, high=MAX_LOGPROBS),
}
