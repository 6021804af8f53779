"""The slots whose requests edit logits or ask for log probabilities, and what batches do for them.

All that a step brings goes up in one copy; a batch that stays the same uploads only masks that
changed. A mask may follow the tokens (grammars, bad words of several ids). Then the host waits for
the last step's tokens, with the next forward queued on the device already, which hides the making
of the mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millstream.engine.edits.tables import BatchEdits, EditTables
from millstream.engine.grammars.token_masks import Grammars, SlotMask, Words
from millstream.engine.plan import Chunk, SlotStart
from millstream.engine.stepping.batch_layout import BatchLayout
from millstream.engine.stepping.logprobs import Scores, StepScores, score
from millstream.engine.stepping.uploads import Ints, Uploader

# Waits for a step's sampled tokens.
Tokens = Callable[[], list[int]]


@dataclass(slots=True, eq=False)
class _Slot:
    start: SlotStart
    mask: SlotMask | None
    is_new: bool = True  # its rows of counts and biases are not written yet
    mask_row: Words | None = None  # the one on the device


@dataclass(slots=True, eq=False)
class _Batch:
    """The special rows of a layout."""

    layout: BatchLayout
    slots: dict[int, _Slot]  # by row
    scored: list[int]  # rows whose log probabilities are wanted
    edited: list[int]  # rows with penalties or a bias
    masks: dict[int, SlotMask]  # by row, as long as they narrow anything
    edits: BatchEdits | None = None  # what is on the device; None: not what it should be
    scores: Scores | None = None  # of this step


class SlotEdits:
    """Used by one thread. For a step, in this order: start, wanted; if it is, edit, settle,
    scores and sampled."""

    def __init__(
        self, *, vocab_size: int, device: torch.device, grammars: Grammars | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._upload = Uploader(device)
        self.clear()

    def clear(self) -> None:
        """Forgets every slot, and frees the tables."""
        self.tables = EditTables(self._vocab_size, self._device)
        self._slots: dict[int, _Slot] = {}
        self._batch: _Batch | None = None
        # Steps whose tokens some masks do not know yet; which row's token each mask takes.
        self._unseen: deque[tuple[Tokens, list[tuple[int, SlotMask]]]] = deque()

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Sequences take slots; those that were there are gone."""
        for start in starts:
            if self._slots.pop(start.slot, None) is not None:
                self.tables.release(start.slot)
            if is_special(start):
                self._slots[start.slot] = _Slot(start, self._make_mask(start))

    def _make_mask(self, start: SlotStart) -> SlotMask | None:
        spec = start.sampling.grammar
        assert spec is None or self._grammars is not None, "validation refuses what is not there"
        grammar = self._grammars.start(spec) if self._grammars and spec else None
        mask = SlotMask(start, self._vocab_size, grammar)
        return mask if mask.narrows(0) else None

    def wanted(self, layout: BatchLayout, positions: Ints) -> bool:
        """Whether the batch's logits are edited or scored. positions: [R], of the tokens that it
        samples. Asked before a step computes anything, if the layout is special."""
        if self._batch is None or self._batch.layout is not layout:
            self._batch = self._make_batch(layout)
        batch = self._batch
        for row, mask in [*batch.masks.items()]:
            if not mask.narrows(positions[row]):  # for good: what ends is min_tokens
                del batch.masks[row]
                batch.edits = None
        has_targets = layout.host.plan.has_targets
        return bool(batch.edited or batch.scored or batch.masks or has_targets)

    def _make_batch(self, layout: BatchLayout) -> _Batch:
        slots = {
            row: self._slots[slot]
            for row, slot in enumerate(layout.host.sample_slots.tolist())
            if slot in self._slots
        }
        samplings = [(row, slot.start.sampling) for row, slot in slots.items()]
        return _Batch(
            layout=layout,
            slots=slots,
            scored=[row for row, sampling in samplings if sampling.logprobs is not None],
            edited=[row for row, each in samplings if each.has_penalties or each.logit_bias],
            masks={row: slot.mask for row, slot in slots.items() if slot.mask is not None},
        )

    def _prepare(self, positions: Ints) -> BatchEdits:
        """The batch's edits, with everything that they need on the device."""
        batch = self._batch
        assert batch is not None
        if any(mask.follows for mask in batch.masks.values()):
            self._catch_up()
        new = [slot for slot in batch.slots.values() if slot.is_new]
        masks = self._changed_masks(batch, positions)
        arrays: list[Ints] = []
        if new or masks:
            arrays += self.tables.contents_arrays([slot.start for slot in new], masks)
        num_contents = len(arrays)
        if batch.edits is None:
            arrays += self._batch_arrays(batch)
        parts = self._upload(arrays) if arrays else []
        if num_contents:
            self.tables.write(*parts[:num_contents])
        for slot in new:
            slot.is_new = False
        if batch.edits is None:
            batch.edits = self.tables.batch(*parts[num_contents:])
        return batch.edits

    def _changed_masks(self, batch: _Batch, positions: Ints) -> list[tuple[int, Words]]:
        """By slot."""
        if self._grammars is not None:
            self._grammars.fill_ahead(
                [mask.grammar for mask in batch.masks.values() if mask.grammar is not None]
            )
        changed = []
        for row, mask in batch.masks.items():
            slot, mask_row = batch.slots[row], mask.row(positions[row])
            if mask_row is not slot.mask_row:
                slot.mask_row = mask_row
                changed.append((slot.start.slot, mask_row))
        return changed

    def _batch_arrays(self, batch: _Batch) -> list[Ints]:
        edited = [(row, batch.slots[row].start) for row in batch.edited]
        return self.tables.batch_arrays(
            penalized=[
                (row, start.slot, start.sampling)
                for row, start in edited
                if start.sampling.has_penalties
            ],
            biased=[(row, start.slot) for row, start in edited if start.sampling.logit_bias],
            masked=[(row, batch.slots[row].start.slot) for row in batch.masks],
            scored=batch.scored,
        )

    def sampled(self, tokens: Tokens) -> None:
        """How the batch that `wanted` was asked about will tell the tokens that it sampled."""
        assert self._batch is not None
        follow = [(row, mask) for row, mask in self._batch.masks.items() if mask.follows]
        if follow:
            self._unseen.append((tokens, follow))

    def _catch_up(self) -> None:
        """Waits until the masks know all tokens so far. Those of sequences that are gone may learn
        more than they should: nobody asks them."""
        while self._unseen:
            tokens, follow = self._unseen.popleft()
            token_ids = tokens()
            for row, mask in follow:
                mask.accept(token_ids[row])

    # ---- what the batch that `wanted` was asked about does on the device

    def edit(self, logits: torch.Tensor, positions: Ints) -> torch.Tensor:
        """What it samples from: its logits [R, V] as they are, or an edited copy in float32. Waits
        for the tokens of earlier steps if masks follow them."""
        edits = self._prepare(positions)
        if not edits.changes_logits:
            return logits
        edited = logits.to(torch.float32, copy=True)
        self.tables.apply(edits, edited)
        return edited

    def settle(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Token_ids [R] were sampled: counts them, and scores them under the unedited logits."""
        batch = self._batch
        assert batch is not None
        assert batch.edits is not None, "edit comes first"
        self.tables.count(batch.edits, token_ids)
        if batch.scored:
            rows = batch.edits.scored
            num_top = max(filter(None, self._num_logprobs(batch)), default=0)
            batch.scores = score(
                logits.__getitem__, rows, token_ids[rows], num_top, self._vocab_size
            )

    def scores(
        self, prompt_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> StepScores:
        """What the step has to tell; prompt_logits gives the logits of some of its tokens, of a
        step that has targets."""
        batch = self._batch
        assert batch is not None
        sampled, batch.scores, prompts = batch.scores, None, None
        chunks = self._scored_chunks(batch.layout)
        shapes = [(len(chunk.target_ids), num_top) for chunk, _, num_top in chunks]
        if chunks:
            assert prompt_logits is not None
            rows, token_ids = self._upload_targets(chunks)
            num_top = max(num_top for _, num_top in shapes)
            prompts = score(prompt_logits, rows, token_ids, num_top, self._vocab_size)
        counts = self._num_logprobs(batch)
        problems = {row: mask.problem for row, mask in batch.masks.items() if mask.problem}
        return StepScores(
            sampled=sampled, counts=counts, prompts=prompts, shapes=shapes, problems=problems
        )

    def _num_logprobs(self, batch: _Batch) -> list[int | None]:
        slots = batch.slots
        num_rows = len(batch.layout.host.sample_slots)
        return [
            slots[row].start.sampling.logprobs if row in slots else None for row in range(num_rows)
        ]

    def _scored_chunks(self, layout: BatchLayout) -> list[tuple[Chunk, int, int]]:
        """Chunks with targets, where they begin in the step, and how many likeliest tokens go with
        each target."""
        chunks, starts = layout.host.plan.chunks, layout.host.query_starts.tolist()
        return [
            (chunk, start, self._num_prompt_logprobs(chunk.slot))
            for chunk, start in zip(chunks, starts, strict=False)
            if chunk.target_ids
        ]

    def _num_prompt_logprobs(self, slot: int) -> int:
        known = self._slots.get(slot)  # not to ranks that only help to compute
        return (known.start.sampling.prompt_logprobs or 0) if known is not None else 0

    def _upload_targets(self, chunks: Sequence[tuple[Chunk, int, int]]) -> list[torch.Tensor]:
        """Rows of the step's tokens, and the ids that follow these."""
        rows = [
            np.arange(len(chunk.target_ids)) + start + chunk.first_target
            for chunk, start, _ in chunks
        ]
        token_ids = [np.array(chunk.target_ids, dtype=np.int64) for chunk, _, _ in chunks]
        return self._upload([np.concatenate(rows), np.concatenate(token_ids)])


def is_special(start: SlotStart) -> bool:
    """Whether the logits of a sequence are edited or scored, be it only at first."""
    sampling = start.sampling
    return bool(
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.grammar is not None
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or start.banned_token_ids
    )
