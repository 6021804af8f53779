"""Decode attention against its oracle: in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.paged_kv import PagedKV, check_rows, paged_kv, starts_of
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.kernels import reference_attention
from millstream.kernels.paged_decode import DecodeConfig, PagedDecode, choose_config
from millstream.kernels.work_list import WorkList

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
# The interpreter multiplies no bfloat16 matrices.
DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.bfloat16, torch.float32),
}
CONTEXTS = [70, 0, 200, 64, 65, 1, 17, 128]

CONFIGS = {
    "heads-are-rows": DecodeConfig(
        tile=64, num_warps=4, num_stages=2, tokens_are_rows=False, tail_apart=False
    ),
    "heads-are-rows, tail apart": DecodeConfig(
        tile=64, num_warps=2, num_stages=3, tokens_are_rows=False, tail_apart=True
    ),
    "tokens-are-rows": DecodeConfig(
        tile=64, num_warps=4, num_stages=3, tokens_are_rows=True, tail_apart=False
    ),
    "tokens-are-rows, tail apart": DecodeConfig(
        tile=64, num_warps=4, num_stages=3, tokens_are_rows=True, tail_apart=True
    ),
    "128 registers": DecodeConfig(
        tile=64,
        num_warps=4,
        num_stages=3,
        tokens_are_rows=True,
        tail_apart=False,
        max_registers=128,
    ),
}


def attend(
    paged: PagedKV,
    group: int,
    *,
    config: DecodeConfig | None = None,
    max_batch: int | None = None,
    layers: int = 1,
) -> None:
    """Checks `layers` calls after one begin_step, each with other queries."""
    batch, (_, block_size, num_kv_heads, head_dim) = len(paged.slots), paged.key_cache.shape
    device, dtype = paged.key_cache.device, paged.key_cache.dtype
    decode = PagedDecode(
        max_batch or batch,
        num_kv_heads * group,
        num_kv_heads,
        head_dim,
        block_size,
        int(paged.context_lens.max()),
        device,
        dtype=dtype,
        config=config,
    )
    decode.begin_step(paged.block_tables, paged.slots, paged.context_lens)
    generator = torch.Generator().manual_seed(group)
    for _ in range(layers):
        query = torch.randn((batch, num_kv_heads * group, head_dim), generator=generator)
        query = query.to(device, dtype)
        out = torch.full_like(query, float("nan"))
        assert decode(query, paged.key_cache, paged.value_cache, out=out) is out
        check_rows(out, oracle(query, paged))


def oracle(query: torch.Tensor, paged: PagedKV) -> torch.Tensor:
    return reference_attention.paged_attention(
        query,
        paged.key_cache,
        paged.value_cache,
        paged.block_tables,
        paged.slots,
        starts_of([1] * len(query), "cpu"),
        paged.context_lens,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_way_through_an_item(device: str, config: DecodeConfig) -> None:
    """Padding rows give zeros; what lies behind a context, here NaN, is not seen."""
    for dtype in DTYPES[device][:2]:
        paged = paged_kv(
            CONTEXTS, num_kv_heads=2, head_dim=32, block_size=64, dtype=dtype, device=device
        )
        attend(paged, 3, config=config, layers=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(device: str, block_size: int) -> None:
    for dtype in DTYPES[device][:1]:
        paged = paged_kv(
            [300, 5, 64], num_kv_heads=1, head_dim=16, block_size=block_size, dtype=dtype,
            device=device,
        )  # fmt: skip
        attend(paged, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_tiles_of_which_a_block_has_several_or_a_part(
    device: str, block_size: int, tile: int
) -> None:
    """Loaded as boxes where a block has all of a tile; five query heads of each KV head."""
    config = replace(CONFIGS["heads-are-rows, tail apart"], tile=tile)
    for dtype in DTYPES[device][-1:]:
        paged = paged_kv(
            [300, 5, 64], num_kv_heads=2, head_dim=16, block_size=block_size, dtype=dtype,
            device=device,
        )  # fmt: skip
        attend(paged, 5, config=config)


def test_without_a_copy_engine_there_are_no_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same result."""
    config = CONFIGS["heads-are-rows, tail apart"]
    shape = {"num_kv_heads": 2, "head_dim": 16, "block_size": 64}
    paged = paged_kv([300, 5, 64], **shape, dtype=torch.float32, device="cpu")
    described: list[object] = []
    describe = TensorDescriptor.from_tensor

    def counted(*arguments: Any) -> Any:
        described.append(arguments)
        return describe(*arguments)

    monkeypatch.setattr(TensorDescriptor, "from_tensor", counted)
    attend(paged, 2, config=config)
    assert len(described) == 2
    monkeypatch.setattr("millstream.kernels.boxes.are_copied", lambda device: False)
    attend(paged, 2, config=config)
    assert len(described) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 2, 5, 8, 16])
def test_group_sizes(device: str, group: int) -> None:
    for dtype in DTYPES[device]:
        paged = paged_kv(
            [33, 140], num_kv_heads=2, head_dim=64, block_size=64, dtype=dtype, device=device
        )
        attend(paged, group)


@pytest.mark.parametrize("device", DEVICES)
def test_fewer_sequences_than_the_capture_size(device: str) -> None:
    """Items left of a larger step are not seen, and a later step may be larger again."""
    decode = PagedDecode(8, 4, 2, 16, 16, 512, torch.device(device), dtype=torch.float32)
    for contexts in ([200, 90, 30, 1, 500, 7, 8, 9], [40], [0, 0, 0], [333, 16, 2]):
        paged = paged_kv(
            contexts, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device
        )
        decode.begin_step(paged.block_tables, paged.slots.long(), paged.context_lens)
        query = torch.randn(len(contexts), 4, 16).to(device)
        check_rows(decode(query, paged.key_cache, paged.value_cache), oracle(query, paged))


@pytest.mark.parametrize("device", DEVICES)
def test_the_work_list_covers_every_token_once(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for max_batch, num_programs, longest, least in (
        (8, 16, 100, 1),
        (8, 64, 5000, 1),
        (40, 16, 900, 1),
        (8, 64, 900, 200),
    ):
        contexts = torch.randint(0, longest, (max_batch - 3,), generator=generator)
        work = WorkList(
            max_batch=max_batch,
            num_kv_heads=2,
            num_programs=num_programs,
            tile=64,
            least=least,
            max_context=longest,
            device=torch.device(device),
        )
        slots = torch.randperm(100, generator=generator)[: len(contexts)]
        work.build(slots.to(device), contexts.int().to(device))
        items = [item for item in work.items.tolist() if item[0] >= 0]
        sizes = [end - start for _, _, start, end, *_ in items]
        assert sizes == sorted(sizes, reverse=True)
        share = max(-(-int(contexts.sum()) * 2 // num_programs), least)
        assert sizes[0] <= -(-share // 64) * 64 and (least == 1 or sizes[0] > least)
        ends, parts = [0] * len(contexts), []
        for row, slot, start, end, count, first, part in sorted(item[:7] for item in items):
            assert start == ends[row] and slot == slots[row] and first <= part < first + count
            ends[row] = end
            parts.append(part)
        assert ends == contexts.tolist() and parts == [*range(len(items))]


def test_bad_inputs_are_refused() -> None:
    device = torch.device("cpu")
    for shape in ((6, 4, 16, 16), (34, 2, 16, 16), (4, 2, 48, 16), (4, 2, 16, 24)):
        with pytest.raises(ValueError, match="no decode kernel"):
            PagedDecode(4, *shape, 64, device)
    decode = PagedDecode(2, 4, 2, 16, 16, 64, device, dtype=torch.float32)
    paged = paged_kv(
        [9, 20], num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device="cpu"
    )
    tables, slots, lens = paged.block_tables, paged.slots, paged.context_lens
    query, caches = torch.randn(2, 4, 16), (paged.key_cache, paged.value_cache)
    with pytest.raises(ValueError, match="the step 0 rows"):
        decode(query, *caches)
    for arguments, says in (
        ((tables.long(), slots, lens), "block_tables"),
        ((tables.T, slots, lens), "unit stride"),
        ((tables, slots[:1], lens), "1 slots"),
        ((tables, slots, lens.long()), "lengths are"),
        ((tables, slots.repeat(2), lens.repeat(2)), "at most 2"),
    ):
        with pytest.raises(ValueError, match=says):
            decode.begin_step(*arguments)
    decode.begin_step(tables, slots, lens)
    for arguments, says in (
        ((query[:1], *caches), "query has shape"),
        ((query.half(), *caches), "must be torch.float32"),
        ((query, caches[0], caches[1][:1]), "caches have shapes"),
        ((query.transpose(1, 2).contiguous().transpose(1, 2), *caches), "contiguous"),
    ):
        with pytest.raises(ValueError, match=says):
            decode(*arguments)


# ---- shapes that only a GPU is quick enough for


@GPU
@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (3, 64), (5, 128), (8, 128), (1, 64)])
@pytest.mark.parametrize("batch", [1, 8, 48, 128, 256])  # each way of decode_configs
def test_the_configurations_that_ship(group: int, head_dim: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    contexts = torch.randint(1, 2500, (batch,), generator=generator).tolist()
    contexts[0] = 20_000
    for block_size in (64, 256):
        paged = paged_kv(
            contexts, num_kv_heads=8 if head_dim == 128 else 3, head_dim=head_dim,
            block_size=block_size, dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        attend(paged, group, layers=2, max_batch=batch)


@GPU
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_way_at_full_size(config: DecodeConfig) -> None:
    contexts = [5000, 1, 2, 63, 64, 65, 127, 128, 129, 0, 700, 2049]
    paged = paged_kv(
        contexts, num_kv_heads=8, head_dim=128, block_size=128, dtype=torch.bfloat16, device="cuda"
    )
    attend(paged, 2, config=config, layers=3)


@GPU
def test_one_graph_serves_any_lengths() -> None:
    """Captured once, replayed with other lengths, queries and tables in the same tensors."""
    contexts = [[3000, 5, 900, 64], [1, 2, 3, 4], [40, 4000, 1500, 0]]
    paged = [
        paged_kv(
            lengths, num_kv_heads=2, head_dim=128, block_size=64, dtype=torch.bfloat16,
            device="cuda", seed=seed,
        )
        for seed, lengths in enumerate(contexts)
    ]  # fmt: skip
    width = max(p.block_tables.shape[1] for p in paged)
    blocks = max(p.key_cache.shape[0] for p in paged)
    tables = torch.zeros(6, width, dtype=torch.int32, device="cuda")
    slots = torch.zeros(4, dtype=torch.int32, device="cuda")
    lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    key, value = (
        torch.zeros(blocks, 64, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    query = torch.zeros(4, 4, 128, dtype=torch.bfloat16, device="cuda")
    decode = PagedDecode(4, 4, 2, 128, 64, 4096, torch.device("cuda"))
    out = torch.zeros_like(query)

    def step() -> None:
        decode.begin_step(tables, slots, lens)
        for _ in range(3):
            decode(query, key, value, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for p in paged:
        tables[:, : p.block_tables.shape[1]] = p.block_tables
        slots.copy_(p.slots)
        lens.copy_(p.context_lens)
        key[: len(p.key_cache)] = p.key_cache
        value[: len(p.value_cache)] = p.value_cache
        query.normal_()
        out.fill_(float("nan"))
        graph.replay()
        check_rows(out, oracle(query, p))


@GPU
def test_a_sequence_that_is_not_cut_is_the_same_in_any_order() -> None:
    contexts = [300, 200, 100, 64] * 40
    paged = paged_kv(
        contexts, num_kv_heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16, device="cuda"
    )
    query = torch.randn(160, 16, 128, device="cuda", dtype=torch.bfloat16)
    config = replace(choose_config(160, 16, 8, 128, torch.bfloat16), items_per_multiprocessor=1)
    results = []
    for order in (torch.arange(160), torch.randperm(160)):
        order = order.cuda()
        decode = PagedDecode(160, 16, 8, 128, 64, 1024, torch.device("cuda"), config=config)
        decode.begin_step(paged.block_tables, paged.slots[order], paged.context_lens[order])
        out = decode(query[order], paged.key_cache, paged.value_cache)
        results.append(torch.empty_like(out).index_copy_(0, order, out))
    assert torch.equal(*results)
