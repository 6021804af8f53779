"""A row's result is the same bits alone and among others: in the interpreter, natively -m gpu."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
import torch
from tests.paged_kv import PagedKV, check_rows, paged_kv, starts_of

from millstream.kernels import reference_attention
from millstream.kernels.add_rms_norm import add_rms_norm, rms_norm
from millstream.kernels.heads import Heads
from millstream.kernels.invariant_tiles import invariant_tile
from millstream.kernels.linear import Workspace, linear
from millstream.kernels.linear_configs import Tile, fits
from millstream.kernels.paged_decode import DecodeConfig, FixedCut, PagedDecode
from millstream.kernels.paged_prefill import paged_prefill
from millstream.kernels.qk_norm_rope_store import qk_norm_rope_store
from millstream.kernels.work_list import WorkList

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
# The interpreter multiplies no bfloat16 matrices.
DTYPES = {"cpu": torch.float16, "cuda": torch.bfloat16}
# (out_features, in_features) of the models that the benchmarks run, and some that nobody measured
SHAPES = [
    (4096, 1024), (1024, 2048), (6144, 1024), (151936, 1024),  # Qwen3-0.6B
    (34816, 5120), (5120, 17408),  # Qwen3-14B
    (960, 576), (3072, 576),  # SmolLM2-135M
    (48, 80),
]  # fmt: skip
ROWS = [1, 2, 7, 64, 65, 128, 129, 200, 512, 513, 1000, 3000]


# ---- products


@pytest.mark.parametrize("epilogue", ["plain", "residual", "swiglu"])
def test_rows_of_a_product_in_the_interpreter(epilogue: str) -> None:
    x, weight, residual = tensors(150, 96, 192, "cpu")
    whole = product(x, weight, residual, epilogue, rows=150)
    for count in (1, 2, 16, 63, 64, 65, 128, 149):
        got = product(x[-count:], weight, residual[-count:], epilogue, rows=count)
        assert torch.equal(got, whole[-count:]), count


@GPU
@pytest.mark.parametrize(("size", "depth"), SHAPES, ids=str)
def test_rows_of_a_product(size: int, depth: int) -> None:
    """All tiles of a shape against each other: first, last and middle rows of many."""
    x, weight, residual = tensors(max(ROWS), size, depth, "cuda")
    epilogues = {6144: "swiglu", 34816: "swiglu", 3072: "swiglu", 1024: "residual"}
    epilogue = epilogues.get(size, "plain")
    whole = product(x, weight, residual, epilogue, rows=max(ROWS))
    exact = x[:64].double() @ weight.double().T
    if epilogue == "plain":
        assert (whole[:64].double() - exact).norm() < 0.003 * exact.norm()
    for count in ROWS:
        for first in {0, 37, max(ROWS) - count}:
            some = slice(first, first + count)
            got = product(x[some], weight, residual[some], epilogue, rows=count)
            assert torch.equal(got, whole[some]), f"{count} rows from {first}"


def tensors(rows: int, size: int, depth: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(rows + size)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": DTYPES[device]}
    shapes = (rows, depth), (size, depth), (rows, size)
    x, weight, residual = (torch.randn(shape, **options) for shape in shapes)
    return x, weight / depth**0.5, residual


def product(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, epilogue: str, *, rows: int
) -> torch.Tensor:
    tile = invariant_tile(rows, *weight.shape)
    assert tile is not None
    if x.device.type == "cpu":
        # numpy's sums, which the interpreter's products are, depend on the tile's shape.
        tile = invariant_tile(1, *weight.shape)
        assert tile is not None
    added = residual if epilogue == "residual" else None
    workspace = Workspace.create(x.device)
    return linear(x, weight, tile, workspace, residual=added, swiglu=epilogue == "swiglu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shapes_tiles_add_up_in_one_order(shape: tuple[int, int]) -> None:
    """All are wgmma's, which takes 64 rows for 4 warps, and none splits K."""
    for rows in ROWS:
        tile = invariant_tile(rows, *shape)
        assert isinstance(tile, Tile) and fits(tile, rows, *shape)
        assert tile.split_k == 1 and tile.stages > 0 and tile.num_warps % 4 == 0
        assert tile.block_m % 64 == 0 and tile.block_n % 16 == 0 and tile.block_k % 16 == 0


def test_shapes_without_a_tile() -> None:
    assert invariant_tile(1, 151936 + 8, 1024) is None
    assert invariant_tile(1, 1024, 1000) is None
    assert invariant_tile(1 << 16, 34816, 5120) is None
    assert invariant_tile(1 << 14, 34816, 5120) is not None


# ---- decode attention


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens_are_rows", [False, True])
def test_a_sequence_alone_and_in_a_crowd(device: str, tokens_are_rows: bool) -> None:
    """Cut or not, with fewer programs than items or as many; the first step's rests are stale."""
    contexts = [70, 0, 300, 64, 65, 1, 17, 128, 129, 299]
    config = DecodeConfig(
        tile=32, num_warps=4, num_stages=2, tokens_are_rows=tokens_are_rows, tail_apart=True
    )
    fixed = FixedCut(share=64, most_parts=3)
    check_decode(contexts, device, (2, 1, 16), 32, config, fixed)


@GPU
@pytest.mark.parametrize(
    "heads", [(16, 8, 128), (9, 3, 64), (24, 8, 128), (40, 8, 128), (32, 4, 128)], ids=str
)
def test_a_sequence_alone_and_in_a_crowd_at_full_size(heads: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(7)
    contexts = torch.randint(1, 1500, (200,), generator=generator).tolist()
    contexts[3], contexts[50], contexts[199] = 20_000, 16_385, 512
    check_decode(contexts, "cuda", heads, 64, None, FixedCut())


def check_decode(
    contexts: Sequence[int],
    device: str,
    heads: tuple[int, int, int],
    block_size: int,
    config: DecodeConfig | None,
    fixed: FixedCut,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    dtype = DTYPES[device]
    paged = paged_kv(
        contexts,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    batch = len(contexts)
    decode = PagedDecode(
        batch, *heads, block_size, max(contexts), torch.device(device), dtype=dtype, config=config,
        fixed=fixed,
    )  # fmt: skip
    query = torch.randn(batch, num_heads, head_dim).to(device, dtype)
    whole = run_decode(decode, paged, query, torch.arange(batch))
    check_rows(whole, oracle(query, paged, starts_of([1] * batch, device)))
    generator = torch.Generator().manual_seed(1)
    order, other = (torch.randperm(batch, generator=generator) for _ in range(2))
    crowds = [order, other[: batch // 2]] if batch > 20 else []
    alone = torch.arange(batch).split(1)[:10]
    for rows in (*crowds, *order.split(7)[:6], *alone, torch.tensor([batch - 1])):
        assert torch.equal(run_decode(decode, paged, query, rows), whole[rows.to(device)])


def run_decode(
    decode: PagedDecode, paged: PagedKV, query: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    rows = rows.to(query.device)
    decode.begin_step(paged.block_tables, paged.slots[rows], paged.context_lens[rows])
    first = decode(query[rows], paged.key_cache, paged.value_cache)
    second = decode(query[rows], paged.key_cache, paged.value_cache)
    assert torch.equal(first, second)
    return second


def oracle(query: torch.Tensor, paged: PagedKV, starts: torch.Tensor) -> torch.Tensor:
    rest = paged.key_cache, paged.value_cache, paged.block_tables, paged.slots
    return reference_attention.paged_attention(query, *rest, starts, paged.context_lens)


@pytest.mark.parametrize("device", DEVICES)
def test_fixed_shares_cover_every_token_once(device: str) -> None:
    """However many sequences there are; the list's end is marked as far as programs look."""
    fixed = FixedCut(share=64, most_parts=4)
    work = WorkList(
        max_batch=40, num_kv_heads=2, num_programs=16, tile=32, max_context=900,
        device=torch.device(device), fixed=fixed,
    )  # fmt: skip
    assert work.capacity == 40 * 4
    generator = torch.Generator().manual_seed(2)
    for batch in (40, 1, 17, 2):
        contexts = torch.randint(0, 901, (batch,), generator=generator).int()
        work.build(torch.arange(batch).to(device), contexts.to(device))
        items = work.items.tolist()
        num_items = next((i for i, item in enumerate(items) if item[0] < 0), work.capacity)
        marked = items[num_items : num_items + work.programs_for(batch)]
        assert all(item[0] < 0 for item in marked)
        ends, parts = [0] * batch, []
        for row, slot, start, end, count, first, part in sorted(i[:7] for i in items[:num_items]):
            share = max(64, ceil(ceil(int(contexts[row]) / 4) / 32) * 32)
            assert (start, slot) == (ends[row], row)
            assert first <= part < first + count <= first + 4
            is_rest = part == first + count - 1
            assert is_rest or end - start == share
            ends[row] = end
            parts.append(part)
        assert ends == contexts.tolist() and parts == [*range(num_items)]


def test_shares_are_whole_tiles() -> None:
    with pytest.raises(ValueError, match="shares of 80 tokens, tiles of 64"):
        WorkList(
            max_batch=1, num_kv_heads=1, num_programs=4, tile=64, max_context=100,
            device=torch.device("cpu"), fixed=FixedCut(share=80),
        )  # fmt: skip


# ---- prefill attention


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(2, 1, 16), (4, 2, 64)], ids=str)
def test_a_token_is_the_same_however_its_prompt_is_cut(
    device: str, heads: tuple[int, int, int]
) -> None:
    check_cuts([150, 40], [[150], [70, 80], [1, 64, 20, 65], [149, 1]], device, heads)


@GPU
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64)], ids=str)
def test_cuts_of_long_prompts(heads: tuple[int, int, int]) -> None:
    cuts = [[3000], [1024, 1024, 952], [1, 63, 64, 129, 2743], [2999, 1]]
    check_cuts([3000, 700, 65], cuts, "cuda", heads)


def check_cuts(
    contexts: list[int], cuts: list[list[int]], device: str, heads: tuple[int, int, int]
) -> None:
    """The first of the sequences in chunks, each beside the others whole."""
    num_heads, num_kv_heads, head_dim = heads
    dtype = DTYPES[device]
    paged = paged_kv(
        contexts, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=64, dtype=dtype,
        device=device,
    )  # fmt: skip
    query = torch.randn(sum(contexts), num_heads, head_dim).to(device, dtype)
    expected = oracle(query, paged, starts_of(contexts, device))
    results = []
    for cut in cuts:
        assert sum(cut) == contexts[0]
        parts, end = [], 0
        for length in cut:
            start, end = end, end + length
            queries = torch.cat((query[start:end], query[contexts[0] :]))
            lens = torch.tensor([end, *contexts[1:]], dtype=torch.int32, device=device)
            out = paged_prefill(
                queries,
                paged.key_cache,
                paged.value_cache,
                paged.block_tables,
                paged.slots,
                starts_of([length, *contexts[1:]], device),
                lens,
            )
            parts.append(out[:length])
        results.append(torch.cat(parts))
        check_rows(results[-1], expected[: contexts[0]])
    for cut, result in zip(cuts, results, strict=True):
        assert torch.equal(result, results[0]), cut


# ---- norms


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_normed_and_rotated(device: str, head_dim: int) -> None:
    num_heads, num_kv_heads, dtype = 3, 1, DTYPES[device]
    tokens = 70 if device == "cpu" else 700
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(device, dtype)
    weights = [(1 + torch.randn(head_dim) / 8).to(device, dtype) for _ in range(2)]
    table = torch.randn(tokens, head_dim).to(device, dtype)
    cos, sin = table.chunk(2, dim=-1)

    def run(some: slice) -> tuple[torch.Tensor, ...]:
        count = len(qkv[some])
        keys, values = (
            torch.zeros(-(-count // 16), 16, num_kv_heads, head_dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        positions = torch.arange(tokens, device=device)[some]
        q_weight, k_weight = weights
        heads = Heads(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=1e-6,
            cos=cos,
            sin=sin,
            positions=positions,
            kv_indices=torch.arange(count, device=device),
            key_cache=keys,
            value_cache=values,
        )
        query = qk_norm_rope_store(qkv[some], heads)
        return query, keys.flatten(0, 1)[:count], values.flatten(0, 1)[:count]

    whole = run(slice(0, tokens))
    for some in (slice(0, 1), slice(5, 12), slice(tokens - 65, tokens), slice(tokens - 1, tokens)):
        for got, all_of_it in zip(run(some), whole, strict=True):
            assert torch.equal(got, all_of_it[some])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [576, 1024])
def test_norms(device: str, hidden: int) -> None:
    x, residual = torch.randn(2, 90, hidden).to(device, DTYPES[device])
    weight = torch.randn(hidden).to(device, DTYPES[device])
    whole, added = rms_norm(x, weight, 1e-6), residual.clone()
    summed = add_rms_norm(x, added, weight, 1e-6)
    for row in (0, 41, 89):
        one = slice(row, row + 1)
        assert torch.equal(rms_norm(x[one], weight, 1e-6), whole[one])
        alone = residual[one].clone()
        assert torch.equal(add_rms_norm(x[one], alone, weight, 1e-6), summed[one])
        assert torch.equal(alone, added[one])
