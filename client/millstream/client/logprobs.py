"""Log probabilities out of the engine's columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

from millstream.client.types import Logprob
from millstream.v1 import engine_pb2


def unpack(columns: engine_pb2.Logprobs, token_ids: Sequence[int]) -> Iterator[Logprob | None]:
    """Of each of token_ids; None where the request did not ask."""
    tops = zip(columns.top_token_ids, columns.top_logprobs, strict=True)
    counts = columns.top_counts or repeat(0, len(token_ids))
    for token_id, logprob, count in zip(token_ids, columns.token_logprobs, counts, strict=True):
        top = [Logprob(token_id=i, logprob=value) for i, value in _first(tops, count)]
        yield None if math.isnan(logprob) else Logprob(token_id=token_id, logprob=logprob, top=top)


def _first(pairs: Iterator[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    return [next(pairs) for _ in range(count)]
