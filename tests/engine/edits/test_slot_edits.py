"""What edits cost: nothing to batches without any, and one copy to those that have some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millstream.engine.edits.row_table import RowTable
from millstream.engine.edits.slot_edits import SlotEdits
from millstream.engine.plan import Chunk, Plan, SlotStart
from millstream.engine.request import Sampling
from millstream.engine.slots import SlotTable
from millstream.engine.stepping.batch_layout import BatchLayout
from millstream.engine.stepping.uploads import Ints, Uploader

CPU = torch.device("cpu")
VOCAB_SIZE = 50
PROMPT = (1, 2, 3)


class Steps:
    """A slot table and its edits, without a model: the logits are all 0, the samples all 5."""

    def __init__(self, samplings: Sequence[Sampling], monkeypatch: pytest.MonkeyPatch) -> None:
        count = len(samplings)
        self.table = SlotTable(max_num_seqs=count, max_model_len=64, block_size=16, device=CPU)
        self.edits = SlotEdits(vocab_size=VOCAB_SIZE, device=CPU)
        self.uploads: list[int] = []  # sizes, of edits alone
        upload = Uploader(CPU)

        def spy(arrays: Sequence[Ints]) -> list[torch.Tensor]:
            self.uploads.append(sum(map(len, arrays)))
            return upload(arrays)

        monkeypatch.setattr(self.edits, "_upload", spy)
        self._slots = tuple(range(count))
        self._step = 0
        starts = tuple(self.start(slot, sampling) for slot, sampling in enumerate(samplings))
        chunks = tuple(
            Chunk(slot=slot, start=0, token_ids=PROMPT, samples=True) for slot in self._slots
        )
        self.plan(starts=starts, chunks=chunks)

    def start(self, slot: int, sampling: Sampling) -> SlotStart:
        return SlotStart(
            slot=slot,
            sampling=sampling,
            min_position=len(PROMPT) + sampling.min_tokens,
            banned_token_ids=sampling.stop_token_ids if sampling.min_tokens else (),
            num_computed_tokens=0,
            block_ids=(slot + 1,),
            token_ids=PROMPT if sampling.needs_token_ids else (),
        )

    def plan(self, **fields: Any) -> torch.Tensor | None:
        """One step; the edited logits, None if nothing is edited or scored."""
        self._step += 1
        plan = Plan(step=self._step, **fields)
        self.edits.start(plan.starts)
        layout = self.table.apply(plan)
        edited = self._edit(layout)
        token_ids = torch.full((len(layout.sample_slots),), 5)
        self.table.advance(self.table.batch(layout), layout.sample_slots, token_ids)
        self.table.note_advance(layout)
        return edited

    def decode(self) -> torch.Tensor | None:
        return self.plan(decode_slots=self._slots)

    def _edit(self, layout: BatchLayout) -> torch.Tensor | None:
        if not layout.host.special:
            return None
        positions = self.table.sample_positions(layout)
        if not self.edits.wanted(layout, positions):
            return None
        count = len(layout.sample_slots)
        logits = torch.zeros(count, VOCAB_SIZE)
        edited = self.edits.edit(logits, positions)
        assert not logits.any(), "the model's own are scored"
        self.edits.settle(logits, torch.full((count,), 5))
        self.edits.scores()
        self.edits.sampled(lambda: [5] * count)
        return edited


def test_plain_batches_are_not_special(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(
        [Sampling(max_tokens=9, top_k=3, min_p=0.1, stop_token_ids=(3,))] * 2, monkeypatch
    )
    assert steps.decode() is None
    assert not steps.uploads and not len(steps.edits.tables._counts.rows)


def test_a_step_uploads_once_and_a_steady_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [
        Sampling(max_tokens=9, presence_penalty=1.0, logit_bias=((7, 2.0),), logprobs=2),
        Sampling(max_tokens=9),
        Sampling(max_tokens=9, allowed_token_ids=(4, 5)),
    ]
    steps = Steps(samplings, monkeypatch)
    assert len(steps.uploads) == 1
    first = steps.decode()
    assert len(steps.uploads) == 2, "the batch is another"
    for counted in range(2, 5):
        edited = steps.decode()
        assert edited is not None and first is not None
        assert edited[0, 7] == 2.0 and edited[0, 5] == -1.0, counted
        assert not edited[1].any()
        assert (edited[2] == 0).nonzero().flatten().tolist() == [4, 5]
    assert len(steps.uploads) == 2


def test_counts_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequency: one more each step, without an upload."""
    steps = Steps([Sampling(max_tokens=9, frequency_penalty=0.5)], monkeypatch)
    for count in range(1, 5):
        edited = steps.decode()
        assert edited is not None and edited[0, 5] == -0.5 * count


def test_a_mask_goes_up_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 5 comes a bad word's end each time: one upload, then the same mask."""
    steps = Steps([Sampling(max_tokens=9, bad_words=((5, 6), (5, 5, 7)))], monkeypatch)
    banned = []
    for _ in range(4):
        edited = steps.decode()
        assert edited is not None
        banned.append((edited[0] < 0).nonzero().flatten().tolist())
    assert banned == [[6], [6, 7], [6, 7], [6, 7]]
    # The prompt's mask, that after one 5 (and a new batch), that after two.
    assert len(steps.uploads) == 3


def test_min_tokens_end_and_the_batch_is_plain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token is that of the prompt's chunk; six of seven decodes are banned from 9."""
    sampling = Sampling(max_tokens=20, min_tokens=7, stop_token_ids=(9,))
    steps = Steps([sampling, Sampling(max_tokens=20)], monkeypatch)
    edited = [steps.decode() for _ in range(8)]
    assert [each is not None for each in edited] == [True] * 6 + [False] * 2
    for each in edited[:6]:
        assert each is not None
        assert (each < 0).nonzero().tolist() == [[0, 9]]
    assert len(steps.uploads) == 2


def test_min_tokens_end_beside_other_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [
        Sampling(max_tokens=20, min_tokens=3, stop_token_ids=(9,)),
        Sampling(max_tokens=20, logit_bias=((7, 2.0),)),
    ]
    steps = Steps(samplings, monkeypatch)
    for early in (True, True, False, False):
        edited = steps.decode()
        assert edited is not None
        assert (edited < 0).nonzero().tolist() == ([[0, 9]] if early else [])
        assert edited[1, 7] == 2.0


def test_a_slot_that_starts_anew_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tables are given to others, and cleared."""
    full = Sampling(max_tokens=9, presence_penalty=1.0, logit_bias=((7, 2.0),), bad_words=((8,),))
    steps = Steps([full, full], monkeypatch)
    steps.decode()
    chunk = Chunk(slot=0, start=0, token_ids=PROMPT, samples=True)
    steps.plan(starts=(steps.start(0, Sampling(max_tokens=9)),), chunks=(chunk,), decode_slots=(1,))
    edited = steps.decode()
    assert edited is not None and not edited[0].any() and edited[1].any()
    other = Sampling(max_tokens=9, presence_penalty=0.5)
    edited = steps.plan(starts=(steps.start(0, other),), chunks=(chunk,), decode_slots=(1,))
    assert edited is not None and not edited[0].any()
    edited = steps.decode()
    assert edited is not None
    assert edited[0].nonzero().flatten().tolist() == [5] and edited[0, 5] == -0.5
    biased = Sampling(max_tokens=9, logit_bias=((9, 3.0),))
    edited = steps.plan(starts=(steps.start(0, biased),), chunks=(chunk,), decode_slots=(1,))
    assert edited is not None and edited[0].nonzero().flatten().tolist() == [9]
    assert len(steps.edits.tables._counts.rows) == len(steps.edits.tables._biases.rows) == 4


def test_row_table_grows_and_keeps() -> None:
    table = RowTable(3, torch.int32, CPU)
    rows = [table.take(slot) for slot in range(100, 111)]
    assert sorted(rows) == list(range(11)) and len(table.rows) == 16
    table.rows[rows[0]] = 7
    assert [table.take(slot) for slot in range(100, 111)] == rows
    for slot in range(200, 210):
        table.take(slot)
    assert table.rows[rows[0]].tolist() == [7, 7, 7] and len(table.rows) == 32
    for slot in (100, 100, 999):
        table.release(slot)
    assert table.take(300) == rows[0]


def test_positions_are_of_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps([Sampling(max_tokens=9)] * 2, monkeypatch)
    layout = steps.table.apply(Plan(step=9, decode_slots=(1, 0)))
    assert steps.table.sample_positions(layout).tolist() == [4, 4]
    assert steps.table.sample_positions(layout).dtype == np.int64


def test_rows_45_and_62_a_resumed_row_counts_what_it_had_as_often_as_it_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = Sampling(max_tokens=9, frequency_penalty=0.5, presence_penalty=0.25)
    steps = Steps([sampling], monkeypatch)
    resumed = replace(steps.start(0, sampling), token_ids=(*PROMPT, 5, 7, 5, 5))
    chunk = Chunk(slot=0, start=0, token_ids=resumed.token_ids, samples=True)
    edited = steps.plan(starts=(resumed,), chunks=(chunk,))
    assert edited is not None
    wanted = [0.0] * VOCAB_SIZE
    wanted[5], wanted[7] = -1.75, -0.75
    assert edited.tolist() == [wanted]
