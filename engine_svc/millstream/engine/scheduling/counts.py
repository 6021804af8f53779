"""The counters of a scheduler, which only grow."""

from __future__ import annotations

import dataclasses

from millstream.engine.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Counts:
    """Fields of records.Stats."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    requests_finished: int = 0

    def note_first_admission(self, sequence: Sequence) -> None:
        """Of a prompt, with what the prefix cache has of it."""
        self.prompt_tokens += sequence.prompt_len
        self.prefix_cache_queries += sequence.prompt_len
        self.prefix_cache_hits += sequence.cached_tokens

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)
