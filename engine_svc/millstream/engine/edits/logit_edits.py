"""What changes logits before a token is sampled: functions over explicit tensors, in place.

The order is vLLM's and transformers': repetition, frequency and presence penalty, bias, mask; then
temperature and filters, which are sampling's. Rows that are not named stay as they are, bit by bit.
Temporaries are bounded: few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# An entry of a table of counts: how often the output has the id, and whether the prompt does.
IN_PROMPT = 1 << 30
_OUTPUT = IN_PROMPT - 1
# An extreme repetition penalty makes no infinity, which a difference would turn into NaN.
_LARGEST = 1e30
_PIECE_BYTES = 32 << 20  # of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Of P rows of a batch, each with a row in a table of counts [., V] int32."""

    rows: torch.Tensor  # [P] int64, of the batch
    counts: torch.Tensor  # [P] int64, rows of the table
    repetition: torch.Tensor  # [P] float32
    frequency: torch.Tensor  # [P] float32
    presence: torch.Tensor  # [P] float32


def penalize(logits: torch.Tensor, penalties: Penalties, table: torch.Tensor) -> None:
    """Takes the penalties off float32 logits [R, V]."""
    for piece in _pieces(len(penalties.rows), logits.shape[1]):
        rows, counts = penalties.rows[piece], table[penalties.counts[piece]]
        picked, in_output = logits[rows], counts & _OUTPUT
        repetition = penalties.repetition[piece, None]
        repeated = torch.where(picked > 0, picked / repetition, picked * repetition)
        picked = torch.where(counts != 0, repeated, picked)
        picked -= penalties.frequency[piece, None] * in_output
        picked -= penalties.presence[piece, None] * (in_output > 0)
        logits[rows] = picked.clamp_(-_LARGEST, _LARGEST)


def count_tokens(table: torch.Tensor, penalties: Penalties, token_ids: torch.Tensor) -> None:
    """Counts the tokens [R] that the batch sampled."""
    places = penalties.counts * table.shape[1] + token_ids[penalties.rows]
    table.view(-1).index_add_(0, places, torch.ones_like(places, dtype=table.dtype))


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, biases: torch.Tensor
) -> None:
    """Adds rows `biases` [B] of a table [., V] to rows [B] of the logits [R, V]; all float32."""
    for piece in _pieces(len(rows), logits.shape[1]):
        logits[rows[piece]] += table[biases[piece]]


def apply_mask(
    logits: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, masks: torch.Tensor
) -> None:
    """Sets what rows `masks` [M] of a table [., words] int32 (grammars/token_masks.py) do not
    allow to -inf in rows [M] of the logits [R, V]."""
    vocab_size = logits.shape[1]
    bits = 1 << torch.arange(32, dtype=torch.int32, device=logits.device)
    for piece in _pieces(len(rows), vocab_size):
        words = table[masks[piece]]
        banned = ((words[:, :, None] & bits) == 0).flatten(1)[:, :vocab_size]
        picked = logits[rows[piece]]
        logits[rows[piece]] = picked.masked_fill_(banned, -torch.inf)


def _pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, _PIECE_BYTES // (4 * vocab_size))
    return (slice(start, start + step) for start in range(0, num_rows, step))
