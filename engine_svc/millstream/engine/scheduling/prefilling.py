"""Prefilling: sequences whose known tokens are being computed in chunks, and who passes them.

A stack: the one on top goes on, each of the others waits for those above it, which are more urgent.

    urgent     [####....]   admitted while the other was in the making
    patient    [######..................]

A short prompt of the same priority passes a long one too, when it is its turn (waiting.py) and all
that the prefix cache does not have of it can be computed in what half of a step leaves beside the
decodes: the other half is the long one's, however many have passed it and decode by now. So it
takes twice as many steps at most.

Pure, like the scheduler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from millstream.engine.sequence import Sequence


class Prefilling:
    """Holds the sequences that need several chunks, each from its first until its last."""

    def __init__(self, tokens_to_compute: Callable[[Sequence], int]) -> None:
        """`tokens_to_compute`: of a sequence that waits."""
        self._tokens_to_compute = tokens_to_compute
        self._stack: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._stack)

    @property
    def top(self) -> Sequence | None:
        """Whose chunk is next, unless somebody passes it."""
        return self._stack[-1] if self._stack else None

    def gives_way_to(self, newcomer: Sequence, spare_tokens: int) -> bool:
        """Whether one that waits goes before the top, if there is a top. `spare_tokens`: the part
        of this step that is not kept for the top; may be negative."""
        top = self.top
        if top is None:
            return True
        if newcomer.request.priority != top.request.priority:
            return newcomer.request.priority < top.request.priority
        if spare_tokens <= 0:
            return False  # without asking the prefix cache, in every step of a full batch
        tokens = self._tokens_to_compute(newcomer)
        return tokens <= spare_tokens and tokens < len(top.token_ids) - top.num_computed_tokens

    def note_chunk(self, sequence: Sequence, *, is_last: bool) -> None:
        """A chunk of the top, or of one that passed it, is in the plan."""
        if sequence is self.top:
            if is_last:
                self._stack.pop()
        elif not is_last:
            self._stack.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Takes one out wherever it is; whether it was there."""
        if sequence in self._stack:
            self._stack.remove(sequence)
            return True
        return False

    def check_invariants(self) -> None:
        """Raises AssertionError where the order is lost."""
        priorities = [sequence.request.priority for sequence in self._stack]
        assert all(below > above for below, above in itertools.pairwise(priorities))
