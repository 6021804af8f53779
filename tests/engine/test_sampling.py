"""sampling.py: the filters' edges, exact distributions, independence of rows."""

from __future__ import annotations

import math

import pytest
import torch

from millstream.engine.sampling import (
    ALL_GREEDY,
    SamplingRows,
    sample,
    top_k_threshold,
    top_p_threshold,
    vocab_block,
)


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def rows_of(
    *,
    temperature: list[float],
    seed: list[int] | None = None,
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> SamplingRows:
    """SamplingRows of rows that are all random, with filters where they are not off."""
    count = len(temperature)
    with_k = [row for row in range(count) if top_k and top_k[row] > 0]
    with_p = [row for row in range(count) if top_p and top_p[row] < 1]
    return SamplingRows(
        random=torch.arange(count),
        temperatures=torch.tensor(temperature),
        seeds=torch.tensor([signed(value) for value in seed or range(count)]),
        top_k_rows=torch.tensor(with_k) if with_k else None,
        top_k=torch.tensor([top_k[row] for row in with_k]) if top_k and with_k else None,
        max_top_k=max(top_k) if top_k else 0,
        top_p_rows=torch.tensor(with_p) if with_p else None,
        top_p=torch.tensor([top_p[row] for row in with_p]) if top_p and with_p else None,
        min_p=torch.tensor(min_p) if min_p else None,
    )


def draws(logits: torch.Tensor, count: int, **params: float) -> torch.Tensor:
    """`count` samples of one row of logits: one seed, positions 0 to count - 1."""
    rows = rows_of(
        seed=[1234] * count,
        **{name: [value] * count for name, value in {"temperature": 1.0, **params}.items()},  # type: ignore[arg-type]
    )
    return sample(logits.expand(count, -1).clone(), torch.arange(count), rows)


def test_greedy_is_one_argmax() -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, torch.arange(5), ALL_GREEDY), logits.argmax(-1))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_samples_have_the_exact_distribution(params: dict[str, float]) -> None:
    """Chi-square against transformers' warpers; 99.99 % quantile of 15 degrees of freedom: 44.3."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    count = 20_000
    logits = torch.randn(16, generator=torch.Generator().manual_seed(5)) * 1.5
    warped = logits[None] / params.get("temperature", 1.0)
    if "top_k" in params:
        warped = TopKLogitsWarper(int(params["top_k"]))(None, warped)
    if "top_p" in params:
        warped = TopPLogitsWarper(params["top_p"])(None, warped)
    if "min_p" in params:
        warped = MinPLogitsWarper(params["min_p"])(None, warped)
    expected = warped.softmax(-1)[0] * count
    got = draws(logits, count, **params).bincount(minlength=16).float()
    assert (got[expected == 0] == 0).all()
    seen = expected > 0
    chi_square = ((got[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    assert chi_square < 44.3


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0], ids=["flat", "uneven", "peaked"])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_many_blocks_have_the_exact_distribution(scale: float, temperature: float) -> None:
    """Chi-square of blocks and of tokens, those with too few draws taken together; its quantile of
    99.99 % for n degrees of freedom is about n + 3.72 sqrt(2 n) + 9."""
    count, vocab = 20_000, 300
    logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(8))
    logits[40:60] = -torch.inf
    got = draws(logits, count, temperature=temperature).bincount(minlength=vocab).double()
    expected = (logits.double() / temperature).softmax(0) * count
    assert got[40:60].sum() == 0 and vocab_block(vocab) == 16
    pad = (0, -vocab % 16)
    of_blocks = [torch.nn.functional.pad(each, pad).view(-1, 16).sum(1) for each in (got, expected)]
    for seen, wanted in ((got, expected), of_blocks):
        few = wanted < 10
        seen = torch.cat((seen[~few], seen[few].sum()[None]))
        wanted = torch.cat((wanted[~few], wanted[few].sum()[None]))
        degrees = len(wanted) - 1
        chi_square = float(((seen - wanted) ** 2 / wanted.clamp(min=1)).sum())
        assert chi_square < degrees + 3.72 * math.sqrt(2 * degrees) + 9


def test_rare_tokens_of_a_flat_tail_are_sampled() -> None:
    """65,536 tokens of 1.5e-7 each have 1 % together: noise must resolve far below that."""
    logits = torch.zeros(1 + 2**16)
    logits[0] = torch.tensor(99.0 * 2**16).log()
    count, rare = 200, 0
    rows = rows_of(temperature=[1.0] * count, seed=list(range(count)))
    for position in range(3):
        positions = torch.full((count,), position)
        got = sample(logits.expand(count, -1).clone(), positions, rows)
        rare += int((got != 0).sum())
    assert 1 <= rare <= 18  # 6 expected


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        threshold = top_p_threshold(logits[None], torch.tensor([top_p]))
        assert int((logits >= threshold).sum()) == kept


@pytest.mark.parametrize("flatness", [0.01, 1.0, 5.0])
def test_top_p_from_the_largest_few_equals_a_full_sort(flatness: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3000, generator=generator) / flatness
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.95, 0.99, 0.999])
    ordered = logits.softmax(-1).sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    last = (before < top_p[:, None]).sum(-1) - 1
    expected = logits.gather(1, ordered.indices.gather(1, last[:, None]))[:, 0]
    got = top_p_threshold(logits, top_p)
    # Sums of thousands of floats may part by a rounding: the neighbouring token at most.
    differing = (got != expected).nonzero()[:, 0].tolist()
    for row in differing:
        assert abs(int((logits[row] >= got[row]).sum()) - int(last[row]) - 1) <= 1


def test_row_51_top_k_in_a_mixed_batch() -> None:
    """k of 1, V - 1 and off among greedy rows; k = 1 is the argmax."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 40, generator=generator)
    assert top_k_threshold(logits, torch.tensor([1, 2, 3, 4, 39, 40]), 40).shape == (6,)
    rows = SamplingRows(
        random=torch.tensor([1, 2, 3, 5]),
        temperatures=torch.ones(4),
        seeds=torch.arange(4),
        top_k_rows=torch.tensor([0, 3]),
        top_k=torch.tensor([1, 39]),
        max_top_k=39,
    )
    got = sample(logits.clone(), torch.arange(6), rows)
    argmax = logits.argmax(-1)
    assert got[[0, 1, 4]].tolist() == argmax[[0, 1, 4]].tolist()
    assert ((got >= 0) & (got < 40)).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2])
def test_row_52_tiny_temperatures(temperature: float) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 1e3
    logits[17] = logits.max() + 2
    filters: list[dict[str, float]] = [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}]
    for params in filters:
        got = draws(logits, 50, temperature=temperature, **params)
        assert (got == 17).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4])
def test_row_52_ties_at_tiny_temperatures_are_drawn_evenly(temperature: float) -> None:
    """Within a block and across blocks, of large logits too: nothing overflows or drowns."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 1e3
    tied = [5, 9, 100, 299]
    logits[tied] = logits.max() + 2
    got = draws(logits, 400, temperature=temperature).tolist()
    assert set(got) == set(tied) and all(70 < got.count(token) < 130 for token in tied)


def test_rows_without_a_number_or_a_token_give_an_id() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, 77] = torch.nan
    got = sample(logits, torch.arange(3), rows_of(temperature=[1.0] * 3))
    assert ((got >= 0) & (got < 300)).all()


def mixed_rows(index: torch.Tensor | None = None) -> tuple[torch.Tensor, list[SamplingRows]]:
    """Twelve rows of different parameters, together and one by one."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(12, 1000, generator=generator) * 2
    temperature = [0.6, 1.0, 1.5] * 4
    seed = [2**64 - 1 - row for row in range(12)]
    top_k = [0, 0, 3, 50] * 3
    top_p = [1.0, 0.5, 1.0, 0.9, 0.999, 1.0] * 2
    min_p = [0.0, 0.0, 0.0, 0.0, 0.05, 0.0] * 2
    everything = rows_of(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    alone = [
        rows_of(
            temperature=[temperature[row]],
            seed=[seed[row]],
            top_k=[top_k[row]],
            top_p=[top_p[row]],
            min_p=[min_p[row]],
        )
        for row in range(12)
    ]
    return logits, [everything, *alone]


def test_a_row_samples_the_same_alone_and_in_a_crowd() -> None:
    logits, (everything, *alone) = mixed_rows()
    for step in range(50):
        positions = torch.arange(12) * 7 + step
        together = sample(logits.clone(), positions, everything)
        single = [
            int(sample(logits[row : row + 1].clone(), positions[row : row + 1], rows))
            for row, rows in enumerate(alone)
        ]
        assert together.tolist() == single


def test_ids_at_minus_infinity_are_never_sampled() -> None:
    """Whatever the filters: a mask leaves a row so, and one id of it at least."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 3:] = -torch.inf
    logits[5, :2] = -torch.inf
    rows = rows_of(
        temperature=[1.0, 1e-4, 1.0, 1.0, 1.0, 2.0],
        top_k=[0, 0, 7, 0, 30, 2],
        top_p=[1.0, 1.0, 1.0, 0.5, 1.0, 0.99],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.1, 0.9],
    )
    for position in range(50):
        got = sample(logits.clone(), torch.full((6,), position), rows)
        assert (got < 3).all() and got[5] == 2
    assert sample(logits, torch.zeros(6, dtype=torch.int64), ALL_GREEDY)[5] == 2


def test_no_rows() -> None:
    assert sample(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), ALL_GREEDY).shape == (0,)
