"""sampling.py's two levels: their noise, blocks and masses, and a draw against its definition."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millstream.engine.sampling import SamplingRows, block_masses, draw, vocab_block
from millstream.engine.stepping.noise import block_noise, philox, token_noise


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper has it."""
    mask = 2**32 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def test_philox_known_answers() -> None:
    """The known-answer file of Random123, and the paper's definition for other counters."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, zero, zero, 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed, low, high in ((1, 2, 3), (2**64 - 1, 2**32 - 1, 2**32 - 1), (2**63 + 7, 9, 40_000)):
        for third in (0, 1):
            got = philox(
                torch.tensor([_signed(seed)]), torch.tensor([low]), torch.tensor([high]), third
            )
            expected = reference_philox([low, high, third, 0], [seed % 2**32, seed >> 32])
            assert [int(word) for word in got] == expected


TRITON_SCRIPT = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, position, COUNT: tl.constexpr):
    block = tl.arange(0, COUNT)
    zero = block * 0
    a, b, c, d = tl.philox(seed, block, zero + position, zero + 1, zero)
    tl.store(out + block * 4 + 0, a.to(tl.int64) & 0xFFFFFFFF)
    tl.store(out + block * 4 + 1, b.to(tl.int64) & 0xFFFFFFFF)
    tl.store(out + block * 4 + 2, c.to(tl.int64) & 0xFFFFFFFF)
    tl.store(out + block * 4 + 3, d.to(tl.int64) & 0xFFFFFFFF)

out = torch.zeros(64, dtype=torch.int64)
kernel[(1,)](out, 0x1234567890ABCDEF, 77, COUNT=16)
print(*out.tolist())
"""


def test_the_stream_is_that_of_tritons_philox(tmp_path: Path) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"  # Triton wants the source of a kernel: no `python -c`
    script.write_text(TRITON_SCRIPT)
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = philox(torch.tensor([0x1234567890ABCDEF]), torch.arange(16), torch.tensor([77]), 1)
    assert ran.stdout.split() == [str(int(word)) for word in torch.stack(words, 1).flatten()]


def exponential(word: int) -> float:
    return -math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24))


def test_noise_is_a_function_of_seed_position_and_id() -> None:
    """Tokens' and blocks' come of different counters; neither depends on what else is drawn."""
    seeds, positions = [3, 2**64 - 9, 2**62], [0, 17, 40_000]
    arguments = torch.tensor([_signed(seed) for seed in seeds]), torch.tensor(positions)
    first_ids = torch.tensor([0, 64, 151_552])
    tokens, blocks = token_noise(*arguments, first_ids, 64), block_noise(*arguments, 5, 9)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = [seed % 2**32, seed >> 32]
        for column in (0, 1, 30, 63):
            counter, word = divmod(int(first_ids[row]) + column, 4)
            expected = exponential(reference_philox([counter, position, 0, 0], key)[word])
            assert float(tokens[row, column]) == pytest.approx(expected, rel=1e-6)
        for block in range(9):
            expected = exponential(reference_philox([5 + block, position, 1, 0], key)[0])
            assert float(blocks[row, block]) == pytest.approx(expected, rel=1e-6)
    assert tokens.min() > 0 and tokens.isfinite().all()
    assert torch.equal(token_noise(*arguments, first_ids + 16, 16), tokens[:, 16:32])
    assert torch.equal(block_noise(*arguments, 7, 2), blocks[:, 2:4])


def test_blocks_of_a_vocabulary() -> None:
    sizes = {40: 16, 251: 16, 512: 32, 1003: 32, 5003: 256, 49_152: 1024, 151_936: 1024}
    assert {vocab: vocab_block(vocab) for vocab in sizes} == sizes
    assert vocab_block(1) == 16 and vocab_block(2**24) == 1024


@pytest.mark.parametrize(("vocab", "scale"), [(5003, 3.0), (49_152, 0.5)])
def test_a_blocks_mass_is_the_same_bits_in_any_company(vocab: int, scale: float) -> None:
    """Of other rows, and of other blocks: what ranks hold."""
    size = vocab_block(vocab)
    logits = scale * torch.randn(21, vocab, generator=torch.Generator().manual_seed(1))
    logits[3, : 2 * size] = -torch.inf
    logits = torch.nn.functional.pad(logits, (0, -vocab % size), value=-torch.inf)
    blocks, temperatures = logits.view(21, -1, size), torch.linspace(0.1, 2, 21)
    whole = block_masses(blocks, temperatures)
    assert whole[0].isneginf().nonzero().tolist() == [[3, 0], [3, 1]] and (whole[1] >= 0).all()
    expected = (blocks.double() / temperatures[:, None, None]).logsumexp(dim=2)
    torch.testing.assert_close(
        whole[0].double() / temperatures[:, None] + whole[1], expected, atol=2e-6, rtol=1e-6
    )
    some = [slice(0, 21), slice(7, 8), slice(19, 21)]
    for rows, part in itertools.product(some, [slice(0, 1), slice(5, 11), slice(13, None)]):
        got = block_masses(blocks[rows, part].clone(), temperatures[rows])
        for one, other in zip(got, whole, strict=True):
            assert torch.equal(one, other[rows, part])


def test_a_row_is_drawn_by_its_blocks_masses_and_then_in_the_block() -> None:
    """Against the definition in float64; two scores nearer than GAP may change places."""
    vocab, count, gap = 1003, 2000, 1e-4
    size = vocab_block(vocab)
    logits = 2 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(3))
    temperatures = torch.linspace(0.05, 2.0, count)
    seeds, positions = torch.arange(count) * 7 - 900, torch.arange(count) % 50
    rows = SamplingRows(random=torch.arange(count), temperatures=temperatures, seeds=seeds)
    got = draw(logits, positions, rows, size).token_ids
    scaled = torch.full((count, -(-vocab // size) * size), -torch.inf, dtype=torch.float64)
    scaled[:, :vocab] = logits.double() / temperatures[:, None]
    blocks = scaled.view(count, -1, size)
    noise = block_noise(seeds, positions, 0, blocks.shape[1]).double()
    best_blocks = (blocks.logsumexp(dim=2) - noise.log()).topk(2, dim=1)
    block = best_blocks.indices[:, 0]
    noise = token_noise(seeds, positions, block * size, size).double()
    best_tokens = (blocks[torch.arange(count), block] - noise.log()).topk(2, dim=1)
    expected = block * size + best_tokens.indices[:, 0]
    leads = [-best.values.diff(dim=1)[:, 0] for best in (best_blocks, best_tokens)]
    sure = torch.minimum(*leads) > gap
    assert sure.sum() > 0.99 * count and torch.equal(got[sure], expected[sure])
