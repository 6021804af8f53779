"""Log probabilities of many tokens as they wait to be sent: parallel arrays of 4 bytes a number."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence

from millstream.engine.plan import TokenLogprobs
from millstream.v1 import engine_pb2


class LogprobColumns:
    """Of one token after the other; only grows."""

    def __init__(self, entries: Sequence[TokenLogprobs | None] = ()) -> None:
        self._logprobs = array("f")
        self._counts = array("B")  # likeliest tokens of each
        self._top_token_ids = array("I")
        self._top_logprobs = array("f")
        self.extend(entries)

    def extend(self, entries: Sequence[TokenLogprobs | None]) -> None:
        """None stands for a token whose request did not ask."""
        for entry in entries:
            if entry is None:
                self._logprobs.append(math.nan)
                self._counts.append(0)
            else:
                self._logprobs.append(entry.logprob)
                self._counts.append(len(entry.top_token_ids))
                self._top_token_ids.extend(entry.top_token_ids)
                self._top_logprobs.extend(entry.top_logprobs)

    @property
    def num_values(self) -> int:
        """Of all tokens together, to bound messages."""
        return len(self._logprobs) + len(self._top_logprobs)

    def message(self, order: Sequence[int] | None = None) -> engine_pb2.Logprobs:
        """The columns; `order`: the tokens' places in another order."""
        logprobs, counts = self._logprobs, self._counts
        top_token_ids, top_logprobs = self._top_token_ids, self._top_logprobs
        if order is not None:
            ends = list(itertools.accumulate(counts))
            places = [i for row in order for i in range(ends[row] - counts[row], ends[row])]
            logprobs = array("f", [logprobs[row] for row in order])
            counts = array("B", [counts[row] for row in order])
            top_token_ids = array("I", [top_token_ids[place] for place in places])
            top_logprobs = array("f", [top_logprobs[place] for place in places])
        return engine_pb2.Logprobs(
            token_logprobs=logprobs,
            top_counts=counts if any(counts) else (),
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
        )


def in_pieces(entries: Sequence[TokenLogprobs], most_values: int) -> Iterator[LogprobColumns]:
    """Columns that hold about `most_values` numbers each, at most 20 more."""
    piece = LogprobColumns()
    for entry in entries:
        piece.extend((entry,))
        if piece.num_values >= most_values:
            yield piece
            piece = LogprobColumns()
    if piece.num_values:
        yield piece
