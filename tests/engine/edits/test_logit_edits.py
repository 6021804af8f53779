"""Edits of logits against transformers' processors and naive loops; log probabilities likewise."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from millstream.engine.edits import logit_edits
from millstream.engine.edits.logit_edits import (
    IN_PROMPT,
    Penalties,
    add_bias,
    apply_mask,
    count_tokens,
    penalize,
)
from millstream.engine.grammars.token_masks import pack
from millstream.engine.stepping import logprobs
from millstream.engine.stepping.logprobs import score

VOCAB_SIZE = 150


@pytest.fixture(params=["all at once", "row by row"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "row by row":
        monkeypatch.setattr(logit_edits, "_PIECE_BYTES", 1)
        monkeypatch.setattr(logprobs, "_PIECE_BYTES", 1)


def random_logits(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return 5 * torch.randn(rows, VOCAB_SIZE, generator=generator)


def counts_of(prompt: list[int], output: list[int]) -> list[int]:
    return [output.count(i) + IN_PROMPT * (i in prompt) for i in range(VOCAB_SIZE)]


SEQUENCES = [
    ([1, 2, 2, 3], [3, 3, 149]),
    ([5], []),
    ([0, 0, 0, 0], [7, 7, 7, 7, 8]),
]


def penalties_of(rows: list[int], *floats: list[float]) -> Penalties:
    repetition, frequency, presence = map(torch.tensor, floats)
    return Penalties(
        rows=torch.tensor(rows),
        counts=torch.arange(len(rows)).flip(0),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


@pytest.mark.usefixtures("_pieces")
def test_row_62_penalties_are_transformers_and_openais() -> None:
    """Repetition as transformers has it, then minus frequency * count and presence * (count > 0)
    of output tokens; other rows stay bit by bit."""
    logits = random_logits(5)
    before = logits.clone()
    table = torch.tensor([counts_of(*each) for each in reversed(SEQUENCES)], dtype=torch.int32)
    floats = ([1.3, 0.5, 2.0], [0.5, 0.0, -1.25], [0.0, 1.0, 0.75])
    penalties = penalties_of([4, 0, 2], *floats)
    penalize(logits, penalties, table)
    for i, row in enumerate((4, 0, 2)):
        prompt, output = SEQUENCES[i]
        repetition, frequency, presence = (values[i] for values in floats)
        processor = RepetitionPenaltyLogitsProcessor(repetition)
        wanted = processor(torch.tensor([prompt + output]), before[row : row + 1].clone())[0]
        for token_id in set(output):
            wanted[token_id] -= frequency * output.count(token_id) + presence
        torch.testing.assert_close(logits[row], wanted)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_row_62_signs() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0]])
    table = torch.tensor([[IN_PROMPT, 1, 1]], dtype=torch.int32)
    penalize(logits, penalties_of([0], [2.0], [0.0], [0.0]), table)
    assert logits.tolist() == [[1.0, -4.0, 0.0]]


@pytest.mark.parametrize("repetition", [1e-38, 1e-10, 3e38])
def test_extreme_penalties_stay_finite(repetition: float) -> None:
    logits = torch.tensor([[20.0, -20.0, 0.0]])
    table = torch.full((1, 3), 1, dtype=torch.int32)
    penalize(logits, penalties_of([0], [repetition], [2.0], [2.0]), table)
    assert logits.isfinite().all() and (logits - logits.max()).isfinite().all()


def test_counting_sampled_tokens() -> None:
    table = torch.zeros(3, VOCAB_SIZE, dtype=torch.int32)
    penalties = penalties_of([2, 0, 1], *[[1.0] * 3] * 3)
    for token_ids in ([7, 8, 9], [7, 8, 149]):
        count_tokens(table, penalties, torch.tensor(token_ids))
    # Row i of these has row 2 - i of the table.
    assert table.nonzero().tolist() == [[0, 8], [1, 7], [2, 9], [2, 149]]
    assert table[table > 0].tolist() == [2, 2, 1, 1]


@pytest.mark.usefixtures("_pieces")
def test_bias_is_transformers() -> None:
    logits = random_logits(4)
    before = logits.clone()
    biases = [{(3,): 1.5, (149,): -100.0}, {(0,): 100.0}]
    table = torch.zeros(2, VOCAB_SIZE)
    for row, bias in enumerate(biases):
        for (token_id,), value in bias.items():
            table[row, token_id] = value
    add_bias(logits, torch.tensor([3, 1]), table, torch.tensor([0, 1]))
    for row, bias in zip((3, 1), biases, strict=True):
        processor = SequenceBiasLogitsProcessor(bias)
        wanted = processor(torch.tensor([[5, 6]]), before[row : row + 1].clone())[0]
        torch.testing.assert_close(logits[row], wanted)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 65, 150])
def test_masks_cut_what_they_do_not_allow(vocab_size: int) -> None:
    logits = random_logits(4)[:, :vocab_size].contiguous()
    before = logits.clone()
    allowed = [range(0, vocab_size, 3), (vocab_size - 1,)]
    table = torch.stack([torch.from_numpy(pack(ids, vocab_size)) for ids in allowed])
    apply_mask(logits, torch.tensor([0, 2]), table, torch.tensor([1, 0]))
    for row, ids in ((0, allowed[1]), (2, allowed[0])):
        kept = [i for i in range(vocab_size) if logits[row, i] > -math.inf]
        assert kept == list(ids) and torch.equal(logits[row, kept], before[row, kept])
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_the_order_is_transformers() -> None:
    """Repetition, bias, bad words, on one row."""
    logits = random_logits(1)
    ids = torch.tensor([[1, 2, 3]])
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            SequenceBiasLogitsProcessor({(2,): 4.0, (9,): -3.0}),
            NoBadWordsLogitsProcessor([[2], [3, 5], [4, 6]]),
        ]
    )
    wanted = processors(ids, logits.clone())
    penalize(
        logits,
        penalties_of([0], [1.7], [0.0], [0.0]),
        torch.tensor([counts_of([1, 2, 3], [])], dtype=torch.int32),
    )
    bias = torch.zeros(1, VOCAB_SIZE)
    bias[0, 2], bias[0, 9] = 4.0, -3.0
    row = torch.tensor([0])
    add_bias(logits, row, bias, row)
    masks = torch.from_numpy(pack([i for i in range(VOCAB_SIZE) if i not in (2, 5)], VOCAB_SIZE))
    apply_mask(logits, row, masks[None], row)
    torch.testing.assert_close(logits, wanted)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_65_scores_are_log_softmax_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(6).to(dtype)
    rows, token_ids = torch.tensor([5, 0, 3]), torch.tensor([149, 7, 0])
    scores = score(logits.__getitem__, rows, token_ids, 20, VOCAB_SIZE)
    wanted = logits[rows].float().log_softmax(dim=1)
    torch.testing.assert_close(scores.own, wanted.gather(1, token_ids[:, None])[:, 0])
    top = wanted.topk(20)
    torch.testing.assert_close(scores.top, top.values)
    torch.testing.assert_close(wanted.gather(1, scores.top_token_ids), top.values)
    entries = list(scores.entries([0, 3, 20]))
    assert [len(entry.top_token_ids) for entry in entries] == [0, 3, 20]
    assert [len(entry.top_logprobs) for entry in entries] == [0, 3, 20]


def test_scores_of_extreme_logits_are_numbers() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    scores = score(logits.__getitem__, torch.tensor([0, 1]), torch.tensor([2, 1]), 20, 3)
    assert not scores.own.isnan().any() and not scores.top.isnan().any()
    assert scores.top.shape == (2, 3), "no more than there are"
    torch.testing.assert_close(scores.own[1], torch.tensor(-math.log(3)))
