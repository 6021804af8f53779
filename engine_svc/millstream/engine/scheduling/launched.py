"""Launched: a plan that the runner has, and what its result means for whom."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.engine.plan import StepResult, TokenLogprobs
from millstream.engine.records import PromptLogprobs
from millstream.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan whose result is not there yet."""

    step: int
    rows: list[Sequence]  # whose token each entry of the result is
    num_chunk_rows: int  # the first so many sample at the end of a chunk
    scored: list[Sequence]  # whose each entry of the result's prompt_logprobs is

    def logprobs_of_the_living(
        self, result: StepResult
    ) -> tuple[list[TokenLogprobs | None], list[PromptLogprobs]]:
        """A StepRecord's: without the rows of sequences that ended before this step's result."""
        logprobs: list[TokenLogprobs | None] = []
        gone = Status.FINISHED
        if result.logprobs:
            rows = zip(self.rows, result.logprobs, strict=True)
            logprobs = [entry for sequence, entry in rows if sequence.status is not gone]
        scored = zip(self.scored, result.prompt_logprobs, strict=True)
        return logprobs, [
            PromptLogprobs(sequence.key, entries)
            for sequence, entries in scored
            if sequence.status is not gone
        ]
