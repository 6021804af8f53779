"""Which part of a model each rank holds, and what the ranks do together.

Column-parallel layers (QKV, gate and up) hold some of the rows of their weights, whole heads at a
time; row-parallel ones (O, down) some of the columns, so their outputs are parts of a sum. The
vocabulary is cut into shares of whole sampling blocks; no share is padded, so there is no padding
that could be sampled.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

from millstream.engine.hardware import LoadError
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.sampling import vocab_block

if TYPE_CHECKING:
    from millstream.kernels.sum_add_rms_norm import Mailboxes


class Group(Protocol):
    """The ranks that share a model. A model of one process has none (None).

    Every method is called by all ranks, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    @property
    def device_bytes(self) -> int:
        """Memory of this rank's GPU that the group took, which torch's allocator does not know."""

    def join(self, hidden_size: int) -> None:
        """Meets the other ranks; before this nothing else may be called. hidden_size: of the rows
        that mailboxes are for."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks of x, contiguous, which may be overwritten. It may lie where the
        next all_reduce leaves its own."""

    def mailboxes(self, x: Tensor) -> Mailboxes | None:
        """Through which kernels exchange parts [n, hidden_size] of a sum like x; None: all_reduce
        is better. The same on all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, contiguous: [size, *x.shape]."""

    def from_first(self, token_ids: Tensor) -> Tensor:
        """Rank 0's token ids [n] int64, below 2**24; the others give as many."""

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on the host; it waits for the other ranks."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part [start, stop) of a dimension of `size` that a rank holds."""

    start: int
    stop: int
    size: int

    @classmethod
    def whole(cls, size: int) -> Self:
        return cls(0, size, size)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.length == self.size

    def times(self, factor: int) -> Span:
        """The same part of a dimension with `factor` entries for each of this one's."""
        return Span(self.start * factor, self.stop * factor, self.size * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of a model."""

    config: ModelConfig  # with this rank's heads and width of the MLP, but the whole vocabulary
    heads: Span
    kv_heads: Span  # of one head on several ranks when there are fewer than ranks
    mlp: Span  # of intermediate_size
    vocab: Span


def share_of(config: ModelConfig, rank: int = 0, size: int = 1) -> Share:
    """The part of `rank` of `size`. Raises LoadError, the same on every rank, if the model cannot
    be cut into so many."""
    heads = _even(config.num_heads, "num_attention_heads", "attention heads", rank, size)
    kv_heads = _kv_heads(config, rank, size)
    mlp = _even(config.intermediate_size, "intermediate_size", "columns of the MLP", rank, size)
    return Share(
        config=replace(
            config,
            num_heads=heads.length,
            num_kv_heads=kv_heads.length,
            intermediate_size=mlp.length,
        ),
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        vocab=vocab_spans(config.vocab_size, size)[rank],
    )


def _even(whole: int, key: str, what: str, rank: int, size: int) -> Span:
    if whole % size:
        raise LoadError(
            f"tensor_parallel_size: {whole} {what} ({key}) cannot be split over {size} ranks"
        )
    length = whole // size
    return Span(rank * length, (rank + 1) * length, whole)


def _kv_heads(config: ModelConfig, rank: int, size: int) -> Span:
    """Each rank's own, or one that it shares with others that have the query heads for it."""
    num_heads = config.num_kv_heads
    if num_heads % size and size % num_heads:
        raise LoadError(
            f"tensor_parallel_size: {num_heads} key and value heads (num_key_value_heads) can "
            f"neither be split over {size} ranks nor be repeated on them"
        )
    start = rank * num_heads // size
    return Span(start, start + max(num_heads // size, 1), num_heads)


def vocab_spans(vocab_size: int, size: int) -> list[Span]:
    """Every rank's part of a vocabulary, whole blocks of it but for the last one's end. Raises
    LoadError if one would have none."""
    block_size = vocab_block(vocab_size)
    num_blocks = -(-vocab_size // block_size)
    bounds = [min(num_blocks * index // size * block_size, vocab_size) for index in range(size + 1)]
    spans = [Span(start, stop, vocab_size) for start, stop in itertools.pairwise(bounds)]
    if not all(span.length for span in spans):
        raise LoadError(
            f"tensor_parallel_size: a vocabulary of {vocab_size} (vocab_size) is too small for "
            f"{size} ranks"
        )
    return spans
