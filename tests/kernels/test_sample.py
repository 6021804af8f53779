"""sample against the engine's sampler: on the CPU in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sampled_rows import BLOCK, kernel_rows

from millstream.engine import sampling
from millstream.engine.stepping.noise import block_noise, token_noise
from millstream.kernels import reference_state
from millstream.kernels.decode_state import SlotTables
from millstream.kernels.sample import sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Scores that are nearer than this may change places by float rounding.
GAP = 1e-4

pytestmark = pytest.mark.parametrize("device", DEVICES)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tables(
    temperatures: list[float], device: str, seeds: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-slot tables that are columns of wider ones, as the engine keeps them."""
    floats = torch.full((len(temperatures), 3), -9.0, device=device)
    ints = torch.full((len(temperatures), 5), -9, dtype=torch.int64, device=device)
    floats[:, 1] = torch.tensor(temperatures)
    ints[:, 3] = torch.tensor(seeds or range(1, len(temperatures) + 1))
    return floats[:, 1], ints[:, 3]


def expected_ids(
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    block_size: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What engine.sampling draws of rows, and by how much the best block leads or, if that is less,
    the best token of it."""
    random = temperatures > 0
    rows = sampling.SamplingRows(
        random=None, temperatures=torch.where(random, temperatures, 1.0), seeds=seeds
    )
    drawn = sampling.draw(logits.float(), positions, rows, block_size).token_ids
    scaled = logits.double() / rows.temperatures[:, None]
    scaled = torch.nn.functional.pad(scaled, (0, -logits.shape[1] % block_size), value=-torch.inf)
    blocks = scaled.view(len(logits), -1, block_size)
    noise = block_noise(seeds, positions, 0, blocks.shape[1]).double()
    lead = _lead(blocks.logsumexp(dim=2) - noise.log())
    block = drawn // block_size
    noise = token_noise(seeds, positions, block * block_size, block_size).double()
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    lead = torch.minimum(lead, _lead(chosen - noise.log()))
    greedy = logits.float().argmax(dim=1)
    return torch.where(random, drawn, greedy), torch.where(random, lead, torch.inf)


def _lead(scores: torch.Tensor) -> torch.Tensor:
    if scores.shape[1] == 1:
        return torch.full((len(scores),), torch.inf, device=scores.device)
    best = scores.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [2, BLOCK, BLOCK + 1, 1003, 20 * BLOCK - 5])
def test_equals_the_engines_sampler(device: str, dtype: torch.dtype, vocab: int) -> None:
    """Slots in any order; seeds beyond 2^63; positions far along."""
    rows = 6
    logits = logits_of(rows, vocab, seed=vocab).to(device, dtype)
    temperatures, seeds = tables(
        [0.0, 0.6, 1.0, 2.5, 1e-2, 0.0, 0.8, 1.1], device, [7, -1, 3, 2**62, -(2**63), 5, 6, 12345]
    )
    slots = torch.tensor([3, 0, 7, 1, 6, 2], device=device)
    positions = torch.tensor([0, 5, 77, 40_000, 131_071, 2**31 - 1], device=device)
    before = logits.clone()
    got = sample(kernel_rows(logits, slots, positions, temperatures, seeds))
    expected, gap = expected_ids(logits, positions, temperatures[slots], seeds[slots])
    sure = gap > GAP
    assert sure.sum() >= rows - 1 and torch.equal(got[sure], expected[sure])
    assert torch.equal(logits, before) and got.dtype == torch.int64
    narrow = sample(kernel_rows(logits, slots.int(), positions.int(), temperatures, seeds))
    assert torch.equal(got, narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151_936), (256, 151_936), (64, 128_256)])
def test_sizes_of_real_models(device: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    logits = logits_of(rows, vocab).to(device, dtype)
    temperatures, seeds = tables([0.0, 0.6, 1.0, 1.3] * (rows // 4 + 1), device)
    slots = torch.arange(rows, device=device).flip(0) + 1
    for step in range(3):
        positions = torch.arange(rows, device=device) * 17 + step
        got = sample(kernel_rows(logits, slots, positions, temperatures, seeds, block_size=1024))
        expected, gap = expected_ids(logits, positions, temperatures[slots], seeds[slots], 1024)
        sure = gap > GAP
        assert sure.sum() >= 0.99 * rows - 1 and torch.equal(got[sure], expected[sure])


def test_thousands_of_rows(device: str) -> None:
    """No disagreement but where two scores are nearer than GAP: flat rows and peaked ones. In the
    interpreter, which takes 20 ms a row, some hundreds."""
    count, vocab, block_size = 200 if device == "cpu" else 20_000, 300, 32
    scales = torch.linspace(0.1, 6, count)[:, None]
    logits = (logits_of(count, vocab, scale=1.0) * scales).to(device)
    temperatures, seeds = tables([0.2 + (i % 37) / 20 for i in range(count)], device)
    slots = torch.arange(count, device=device)
    got = sample(kernel_rows(logits, slots, slots % 91, temperatures, seeds, block_size=block_size))
    expected, lead = expected_ids(logits, slots % 91, temperatures, seeds, block_size)
    sure = lead > GAP
    assert sure.sum() > 0.999 * count - 2 and torch.equal(got[sure], expected[sure])
    assert len(got.unique()) > (100 if device == "cpu" else 290)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_lowest_id_of_equals(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 2 * BLOCK + 9, dtype=dtype, device=device)
    logits[1, [BLOCK - 1, BLOCK, 2 * BLOCK]] = 2.0
    logits[2, 2 * BLOCK + 8] = 1.0
    logits[3] = float("-inf")
    logits[3, 17] = -3e38
    temperatures, seeds = tables([0.0], device)
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    got = sample(kernel_rows(logits, zeros, zeros, temperatures, seeds))
    assert got.tolist() == [0, BLOCK - 1, 2 * BLOCK + 8, 17]


def test_a_row_samples_the_same_alone_and_in_a_crowd(device: str) -> None:
    """And wherever its slot is."""
    logits = logits_of(5, BLOCK + 300, scale=0.5).to(device)
    temperatures, seeds = tables([0.6, 1.0, 0.0, 1.7, 1.0], device)
    slots = torch.arange(5, device=device)
    for step in range(4):
        positions = slots * 3 + step
        together = sample(kernel_rows(logits, slots, positions, temperatures, seeds))
        for row in range(5):
            one = slice(row, row + 1)
            moved = torch.zeros(1, dtype=torch.int64, device=device)
            alone = sample(
                kernel_rows(logits[one], moved, positions[one], temperatures[one], seeds[one])
            )
            assert torch.equal(alone, together[one])


def test_samples_have_the_exact_distribution(device: str) -> None:
    """Chi-square of 300 draws (GPU: 200,000) of three blocks, the last of two tokens; 99.99 %
    quantile of 33 degrees of freedom: 72."""
    count = 300 if device == "cpu" else 200_000
    row = logits_of(1, 34, seed=5, scale=0.7).to(device)
    temperatures, seeds = tables([0.7], device, [1234])
    slots = torch.zeros(min(count, 20_000), dtype=torch.int64, device=device)
    got = torch.zeros(34, device=device)
    for start in range(0, count, len(slots)):
        positions = torch.arange(start, start + len(slots), device=device)
        rows = row.expand(len(slots), -1)
        drawn = sample(kernel_rows(rows, slots, positions, temperatures, seeds, block_size=16))
        got += drawn.bincount(minlength=34)
    expected = (row[0] / 0.7).softmax(-1) * count
    assert ((got - expected) ** 2 / expected).sum() < 72


@pytest.mark.parametrize("temperature", [1e-5, 1e-4])
def test_row_52_tiny_temperatures(device: str, temperature: float) -> None:
    """Nothing overflows; tokens that tie are drawn evenly, also across blocks."""
    logits = logits_of(1, BLOCK + 100, scale=1e3)
    tied = [5, 90, BLOCK + 50]
    logits[0, tied] = logits.max() + 2
    temperatures, seeds = tables([temperature], device)
    slots = torch.zeros(60, dtype=torch.int64, device=device)
    positions = torch.arange(60, device=device)
    rows = logits.to(device).expand(60, -1)
    got = sample(kernel_rows(rows, slots, positions, temperatures, seeds)).tolist()
    assert set(got) == set(tied) and all(got.count(token) > 5 for token in tied)


def test_thresholds(device: str) -> None:
    """Only tokens that reach the row's threshold are sampled, among them as without: most blocks
    have none, and no mass."""
    logits = logits_of(3, 296, scale=1.0).to(device)
    thresholds = logits.topk(3, dim=1).values[:, 2].contiguous()
    thresholds[1] = float("-inf")
    temperatures, seeds = tables([1.5, 1.5, 0.0], device)
    slots = torch.arange(3, device=device)
    cut = logits.masked_fill(logits < thresholds[:, None], float("-inf"))
    for step in range(8):
        positions = slots + step
        rows = kernel_rows(logits, slots, positions, temperatures, seeds, block_size=16)
        got = sample(replace(rows, thresholds=thresholds))
        assert torch.equal(got, sample(replace(rows, logits=cut)))
        assert logits[0, got[0]] >= thresholds[0] and got[2] == logits[2].argmax()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_it_may_advance_the_slots_that_it_samples_for(device: str, dtype: torch.dtype) -> None:
    """As advance_slots would with the same ids; the last slot pads, and stays as it is."""
    num_slots = 6
    temperatures, seeds = tables([0.0, 0.7, 1.0, 0.0, 1.3, 0.0], device)
    slots = torch.tensor([4, 5, 0, 1, 5], device=device)
    logits = logits_of(len(slots), 300).to(device)
    generator = torch.Generator().manual_seed(1)
    computed, last_tokens = torch.randint(0, 99, (2, num_slots), generator=generator)
    computed[-1] = last_tokens[-1] = 0
    state = SlotTables(
        computed=computed.to(device, copy=True), last_tokens=last_tokens.to(device, copy=True)
    )
    positions = state.computed[slots].to(dtype) + 1
    rows = kernel_rows(logits, slots, positions, temperatures, seeds)
    token_ids = sample(rows, advanced=state)
    assert torch.equal(token_ids, sample(rows))
    expected = reference_state.advance_slots(slots.cpu(), token_ids.cpu(), computed, last_tokens)
    assert torch.equal(state.computed.cpu(), expected[0])
    assert torch.equal(state.last_tokens.cpu(), expected[1])
    for bad in (state.computed[:2], state.computed.int()):
        refused = SlotTables(computed=bad, last_tokens=state.last_tokens)
        with pytest.raises(ValueError, match="computed and last_tokens"):
            sample(rows, advanced=refused)


def test_rows_may_lie_apart_and_ids_stay_in_the_vocabulary(device: str) -> None:
    wide = logits_of(4, 200).to(device)
    temperatures, seeds = tables([0.0, 1.0], device)
    slots = torch.tensor([1, 0], device=device)
    positions = torch.tensor([3, 4], device=device)
    rows = kernel_rows(wide[::2, 10:110], slots, positions, temperatures, seeds)
    assert torch.equal(sample(rows), sample(replace(rows, logits=rows.logits.contiguous())))
    broken = torch.full((2, 100), float("nan"), device=device)
    for bad in (broken, torch.full_like(broken, float("-inf"))):
        got = sample(replace(rows, logits=bad))
        assert ((got >= 0) & (got < 100)).all()


def test_no_rows_and_bad_inputs(device: str) -> None:
    temperatures, seeds = tables([0.0, 1.0], device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    logits = torch.zeros(2, 8, device=device)
    assert sample(kernel_rows(logits[:0], none, none, temperatures, seeds)).shape == (0,)
    two = torch.zeros(2, dtype=torch.int64, device=device)
    rows = kernel_rows(logits, two, two, temperatures, seeds)
    cases = [
        (replace(rows, logits=logits[0]), "shape"),
        (replace(rows, logits=logits[:, :0]), "shape"),
        (replace(rows, logits=logits.double()), "float64"),
        (replace(rows, logits=logits[:, ::2]), "strides"),
        (replace(rows, slots=two[:1]), "one per row"),
        (replace(rows, positions=two.float()), "not integers"),
        (replace(rows, temperatures=temperatures.double()), "float64"),
        (replace(rows, seeds=seeds[:1]), "slots"),
        (replace(rows, thresholds=logits[:, 0]), "one per row"),
        (replace(rows, thresholds=two), "not float32"),
        *((replace(rows, block_size=size), f"block_size: {size}") for size in (0, 8, 100, 4096)),
    ]
    for bad, says in cases:
        with pytest.raises(ValueError, match=says):
            sample(bad)


@pytest.mark.gpu
def test_in_a_cuda_graph(device: str) -> None:
    """A replay reads the tables anew."""
    if device == "cpu":
        pytest.skip("no graphs")
    logits = logits_of(4, 50_000).to(device, torch.bfloat16)
    temperatures, seeds = tables([0.0, 0.7, 1.0, 1.4], device)
    slots = torch.arange(4, device=device)
    positions = slots * 5
    rows = kernel_rows(logits, slots, positions, temperatures, seeds)
    sample(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(rows)
    for step in range(3):
        positions += 1
        slots.copy_(slots.roll(1))
        graph.replay()
        assert torch.equal(out, sample(rows)), step


def test_tokens_at_minus_infinity_are_never_sampled(device: str) -> None:
    """As a mask leaves a row: whole blocks of it may be empty, one token is not."""
    logits = logits_of(3, 2 * BLOCK + 6).to(device)
    logits[0] = float("-inf")
    logits[0, 2 * BLOCK + 1] = -30.0
    logits[1, : BLOCK + 9] = float("-inf")
    slots = torch.arange(3, device=device)
    for temperature in (0.0, 1e-4, 1.0):
        temperatures, seeds = tables([temperature] * 3, device)
        for position in range(5):
            positions = torch.full((3,), position, device=device)
            got = sample(kernel_rows(logits, slots, positions, temperatures, seeds)).tolist()
            assert got[0] == 2 * BLOCK + 1 and got[1] >= BLOCK + 9
