"""What the device keeps of slots whose logits are edited: counts of tokens (penalties), biases,
masks. A row is as wide as the vocabulary, 4 bytes an id (a mask: an eighth of one), and is there
only for slots that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from millstream.engine.edits.logit_edits import (
    IN_PROMPT,
    Penalties,
    add_bias,
    apply_mask,
    count_tokens,
    penalize,
)
from millstream.engine.edits.row_table import RowTable
from millstream.engine.grammars.token_masks import Words, num_words
from millstream.engine.plan import SlotStart
from millstream.engine.request import Sampling
from millstream.engine.stepping.uploads import Ints


class TableRows(NamedTuple):
    """Rows of a batch, each with a row of a table."""

    rows: torch.Tensor  # [n] int64
    table_rows: torch.Tensor  # [n] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEdits:
    """What happens to the logits of a batch, on the device; empty tensors where nothing does."""

    penalties: Penalties
    bias: TableRows
    mask: TableRows
    scored: torch.Tensor  # [A] int64: rows whose log probabilities are wanted

    @property
    def changes_logits(self) -> bool:
        rows = (self.penalties.rows, self.bias.rows, self.mask.rows)
        return any(map(len, rows))


class EditTables:
    """The rows of all slots. Methods called `..._arrays` say what is to be uploaded for others."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # Two words come up as one int64.
        self._mask_width = -(-num_words(vocab_size) // 2) * 2
        self._counts = RowTable(vocab_size, torch.int32, device)
        self._biases = RowTable(vocab_size, torch.float32, device)
        self._masks = RowTable(self._mask_width, torch.int32, device)

    def release(self, slot: int) -> None:
        """The slot's sequence is gone."""
        for table in (self._counts, self._biases, self._masks):
            table.release(slot)

    # ---- contents

    def contents_arrays(
        self, new: Sequence[SlotStart], masks: Sequence[tuple[int, Words]]
    ) -> list[Ints]:
        """Eight: for sequences that have no rows yet, and for slots whose masks changed."""
        words = np.zeros((len(masks), self._mask_width), dtype=np.int32)
        if masks:
            words[:, : num_words(self._vocab_size)] = [row for _, row in masks]
        mask_rows = [self._masks.take(slot) for slot, _ in masks]
        return [
            *self._count_arrays([start for start in new if start.sampling.has_penalties]),
            *self._bias_arrays([start for start in new if start.sampling.logit_bias]),
            _ints(mask_rows),
            words.view(np.int64).ravel(),
        ]

    def _count_arrays(self, new: Sequence[SlotStart]) -> list[Ints]:
        """Rows to clear, then places in the table and their entries."""
        rows = [self._counts.take(start.slot) for start in new]
        places, entries = [_ints([])], [_ints([])]
        for row, start in zip(rows, new, strict=True):
            prompt_len = start.min_position - start.sampling.min_tokens
            prompt = np.unique(_ints(start.token_ids[:prompt_len]))
            output, counts = np.unique(_ints(start.token_ids[prompt_len:]), return_counts=True)
            token_ids, index = np.unique(np.concatenate((prompt, output)), return_inverse=True)
            entry = np.zeros(len(token_ids), dtype=np.int64)
            entry[index[: len(prompt)]] = IN_PROMPT
            entry[index[len(prompt) :]] += counts
            places.append(token_ids + row * self._vocab_size)
            entries.append(entry)
        return [_ints(rows), np.concatenate(places), np.concatenate(entries)]

    def _bias_arrays(self, new: Sequence[SlotStart]) -> list[Ints]:
        """The same of biases; an entry is the bits of a float64."""
        rows = [self._biases.take(start.slot) for start in new]
        places, entries = [_ints([])], [_ints([])]
        for row, start in zip(rows, new, strict=True):
            token_ids, biases = zip(*start.sampling.logit_bias, strict=True)
            places.append(_ints(token_ids) + row * self._vocab_size)
            entries.append(np.array(biases, dtype=np.float64).view(np.int64))
        return [_ints(rows), np.concatenate(places), np.concatenate(entries)]

    def write(self, *parts: torch.Tensor) -> None:
        """Takes over contents_arrays, on the device."""
        cleared, places, counts, unbiased, bias_places, biases, masks, words = parts
        if len(cleared):
            self._counts.rows.index_fill_(0, cleared, 0)
            self._counts.rows.view(-1).index_copy_(0, places, counts.int())
        if len(unbiased):
            biases = biases.view(torch.float64).float()
            self._biases.rows.index_fill_(0, unbiased, 0)
            self._biases.rows.view(-1).index_copy_(0, bias_places, biases)
        if len(masks):
            rows = words.view(torch.int32).view(len(masks), self._mask_width)
            self._masks.rows.index_copy_(0, masks, rows)

    # ---- batches

    def batch_arrays(
        self,
        *,
        penalized: Sequence[tuple[int, int, Sampling]],
        biased: Sequence[tuple[int, int]],
        masked: Sequence[tuple[int, int]],
        scored: Sequence[int],
    ) -> list[Ints]:
        """Eight, for `batch`: rows of the batch with their slots."""
        floats = [
            (each.repetition_penalty, each.frequency_penalty, each.presence_penalty)
            for _, _, each in penalized
        ]
        return [
            _ints([row for row, _, _ in penalized]),
            _ints([self._counts.take(slot) for _, slot, _ in penalized]),
            np.array(floats, dtype=np.float64).reshape(-1, 3).T.ravel().view(np.int64),
            _ints([row for row, _ in biased]),
            _ints([self._biases.take(slot) for _, slot in biased]),
            _ints([row for row, _ in masked]),
            _ints([self._masks.take(slot) for _, slot in masked]),
            _ints(scored),
        ]

    def batch(self, *parts: torch.Tensor) -> BatchEdits:
        """The edits of batch_arrays, on the device."""
        penalized, counts, floats, biased, biases, masked, masks, scored = parts
        repetition, frequency, presence = floats.view(torch.float64).float().view(3, len(penalized))
        return BatchEdits(
            penalties=Penalties(
                rows=penalized,
                counts=counts,
                repetition=repetition,
                frequency=frequency,
                presence=presence,
            ),
            bias=TableRows(biased, biases),
            mask=TableRows(masked, masks),
            scored=scored,
        )

    # ---- steps

    def apply(self, edits: BatchEdits, logits: torch.Tensor) -> None:
        """Edits float32 logits [R, V] in place."""
        if len(edits.penalties.rows):
            penalize(logits, edits.penalties, self._counts.rows)
        if len(edits.bias.rows):
            add_bias(logits, edits.bias.rows, self._biases.rows, edits.bias.table_rows)
        if len(edits.mask.rows):
            apply_mask(logits, edits.mask.rows, self._masks.rows, edits.mask.table_rows)

    def count(self, edits: BatchEdits, token_ids: torch.Tensor) -> None:
        """The batch sampled token_ids [R]."""
        if len(edits.penalties.rows):
            count_tokens(self._counts.rows, edits.penalties, token_ids)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
