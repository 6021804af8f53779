"""Log probabilities of tokens: log_softmax, in float32, of a model's own logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from millstream.engine.plan import TokenLogprobs

_PIECE_BYTES = 64 << 20  # of float32 logits; a few times as much is in use at once


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of n tokens, and of the N likeliest where they are; on any device."""

    own: torch.Tensor  # [n] float32
    top_token_ids: torch.Tensor  # [n, N] int64, likeliest first
    top: torch.Tensor  # [n, N] float32

    def to_host(self) -> Scores:
        """A copy that is whole once what is on the current stream now is done."""
        return Scores(*map(_to_host, (self.own, self.top_token_ids, self.top)))

    def entries(self, counts: list[int]) -> Iterator[TokenLogprobs]:
        """On the host: of each token with its first so many likeliest."""
        columns = (self.own.tolist(), self.top_token_ids.tolist(), self.top.tolist())
        for own, top_token_ids, top, count in zip(*columns, counts, strict=True):
            yield TokenLogprobs(own, top_token_ids[:count], top[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """What a step has to tell beside its tokens: log probabilities, on any device, and problems."""

    sampled: Scores | None  # of the rows of the step that asked
    counts: list[int | None]  # of each row: how many likeliest tokens it asked for
    prompts: Scores | None  # of the targets of all chunks, one after the other
    shapes: list[tuple[int, int]]  # of each chunk with targets: how many, likeliest tokens of each
    problems: dict[int, str]  # StepResult's

    def to_host(self) -> StepScores:
        """As Scores.to_host."""
        return replace(
            self,
            sampled=self.sampled and self.sampled.to_host(),
            prompts=self.prompts and self.prompts.to_host(),
        )

    def logprobs(self) -> list[TokenLogprobs | None]:
        """StepResult's."""
        if self.sampled is None:
            return []
        entries = self.sampled.entries([count for count in self.counts if count is not None])
        return [None if count is None else next(entries) for count in self.counts]

    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """StepResult's."""
        if self.prompts is None:
            return []
        entries = self.prompts.entries([top for number, top in self.shapes for _ in range(number)])
        return [list(itertools.islice(entries, number)) for number, _ in self.shapes]


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    vocab_size: int,
) -> Scores:
    """Scores of token_ids [n], each under the logits of one of rows [n], at least one, which
    `logits_of` makes: [k, vocab_size] of k of them. Few of these are there at once."""
    step = max(1, _PIECE_BYTES // (4 * vocab_size))
    pieces = [
        _score(logits_of(rows[start : start + step]), token_ids[start : start + step], num_top)
        for start in range(0, len(rows), step)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return Scores(
        torch.cat([piece.own for piece in pieces]),
        torch.cat([piece.top_token_ids for piece in pieces]),
        torch.cat([piece.top for piece in pieces]),
    )


def _score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    logits = logits.float()
    shifted = logits - logits.amax(dim=1, keepdim=True)
    log_total = shifted.exp().sum(dim=1, keepdim=True).log_()
    own = shifted.gather(1, token_ids[:, None]) - log_total
    top, top_token_ids = shifted.topk(min(num_top, logits.shape[1]), dim=1)
    return Scores(own[:, 0], top_token_ids, top - log_total)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
