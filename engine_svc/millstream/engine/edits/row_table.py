"""Rows on the device for the few slots that need them: as wide as the vocabulary, so that a table
of one for each slot would be large."""

from __future__ import annotations

import torch

_FEWEST_ROWS = 4


class RowTable:
    """A table that is empty at first, and then has room for twice as many rows whenever it is full.
    A slot keeps its row until it is released."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(0, width, dtype=dtype, device=device)
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    def take(self, slot: int) -> int:
        """The slot's row, which has any contents if it is new."""
        row = self._row_of.get(slot)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[slot] = self._free.pop()
        return row

    def release(self, slot: int) -> None:
        """The slot needs none (any more)."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def _grow(self) -> None:
        count, width = self.rows.shape
        grown = self.rows.new_zeros(max(_FEWEST_ROWS, 2 * count), width)
        grown[:count] = self.rows
        self._free.extend(reversed(range(count, len(grown))))
        self.rows = grown
