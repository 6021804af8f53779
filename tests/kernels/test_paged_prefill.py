"""Prefill attention against its oracle: in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.bench.prefill_candidates import prefill_candidates, shipped_prefill
from tests.paged_kv import PagedKV, check_rows, paged_kv, starts_of

from millstream.kernels import reference_attention
from millstream.kernels.decode_configs import HEAD_DIMS, MAX_GROUP
from millstream.kernels.paged_prefill import paged_prefill
from millstream.kernels.prefill_configs import PrefillConfig, choose_config

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.bfloat16, torch.float32),
}


def attend(
    paged: PagedKV, query_lens: Sequence[int], group: int, config: PrefillConfig | None = None
) -> None:
    num_heads, head_dim = paged.key_cache.shape[2] * group, paged.key_cache.shape[3]
    device, dtype = str(paged.key_cache.device), paged.key_cache.dtype
    generator = torch.Generator().manual_seed(group)
    query = torch.randn((sum(query_lens), num_heads, head_dim), generator=generator)
    query = query.to(device, dtype)
    rest = (paged.key_cache, paged.value_cache, paged.block_tables, paged.slots)
    rest += (starts_of(query_lens, device), paged.context_lens)
    out = paged_prefill(query, *rest, config=config)
    check_rows(out, reference_attention.paged_attention(query, *rest))
    given = torch.full_like(query, float("nan"))
    assert paged_prefill(query, *rest, out=given, config=config) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_chunks_with_and_without_a_prefix(device: str, block_size: int) -> None:
    contexts, query_lens = [70, 33, 200, 5, 64, 129], [70, 10, 100, 1, 64, 2]
    for dtype in DTYPES[device]:
        paged = paged_kv(
            contexts, num_kv_heads=2, head_dim=16, block_size=block_size, dtype=dtype, device=device
        )
        attend(paged, query_lens, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (3, 64), (5, 16)])
def test_groups_and_head_dims(device: str, group: int, head_dim: int) -> None:
    for dtype in DTYPES[device][:1]:
        paged = paged_kv(
            [50, 90], num_kv_heads=2, head_dim=head_dim, block_size=32, dtype=dtype, device=device
        )
        attend(paged, [50, 40], group)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize(("query_tile", "heads"), [(16, 2), (8, 4), (4, 16)])
@pytest.mark.parametrize("tail_apart", [True, False])
def test_heads_that_share_a_program(
    device: str, group: int, query_tile: int, heads: int, tail_apart: bool
) -> None:
    """Groups that fill programs and such that do not; chunks with and without a prefix,
    which end inside a tile and with one."""
    config = PrefillConfig(
        query_tile=query_tile, heads=heads, key_tile=16, num_warps=4, num_stages=2,
        tail_apart=tail_apart,
    )  # fmt: skip
    contexts, query_lens = [21, 50, 16, 1, 33], [21, 9, 16, 1, 32]
    paged = paged_kv(
        contexts, num_kv_heads=2, head_dim=16, block_size=32, dtype=DTYPES[device][0],
        device=device,
    )  # fmt: skip
    attend(paged, query_lens, group, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("looked_through", [256, 16])
def test_many_short_chunks(
    device: str, looked_through: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than tiles, and than are looked through at once; a chunk's tile begins in the
    middle of another's number; some chunks have no queries."""
    monkeypatch.setattr("millstream.kernels.paged_prefill._SEQUENCES_BLOCK", looked_through)
    query_lens = [index % 4 for index in range(40)]
    contexts = [length + index % 20 for index, length in enumerate(query_lens)]
    dtype = DTYPES[device][0]
    paged = paged_kv(
        contexts, num_kv_heads=1, head_dim=16, block_size=16, dtype=dtype, device=device
    )
    attend(paged, query_lens, 1)
    config = PrefillConfig(query_tile=2, heads=8, key_tile=16, num_warps=4, num_stages=2)
    attend(paged, query_lens, 2, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("looked_through", [256, 2])
def test_what_lies_behind_the_chunks_is_none(
    device: str, looked_through: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that fills up a graph: tokens that pad, and after them decodes, whose place in the
    vectors the chunks' are slices of."""
    monkeypatch.setattr("millstream.kernels.paged_prefill._SEQUENCES_BLOCK", looked_through)
    config = PrefillConfig(query_tile=16, key_tile=16, num_warps=4, num_stages=2)
    paged = paged_kv(
        [40, 9, 30, 30], num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32,
        device=device,
    )  # fmt: skip
    starts = torch.tensor([0, 20, 29, 65, 66], dtype=torch.int32, device=device)
    query = torch.randn(64, 1, 16).to(device)
    out = torch.full_like(query, float("nan"))
    rest = (paged.key_cache, paged.value_cache, paged.block_tables, paged.slots[:2], starts[:3])
    rest += (paged.context_lens[:2],)
    paged_prefill(query, *rest, out=out, config=config)
    check_rows(out[:29], reference_attention.paged_attention(query[:29], *rest))
    assert bool(out[29:].isnan().all())


def test_bad_inputs_are_refused() -> None:
    paged = paged_kv(
        [9, 20], num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device="cpu"
    )
    query, starts = torch.randn(12, 4, 16), starts_of([9, 3], "cpu")
    good = (query, paged.key_cache, paged.value_cache, paged.block_tables, paged.slots, starts)
    good += (paged.context_lens,)
    for index, bad, says in (
        (0, query[:, :3].contiguous(), "3 heads"),
        (0, query.half(), "dtypes"),
        (0, query.transpose(0, 1), "contiguous"),
        (1, paged.key_cache[..., :8], "shapes"),
        (3, paged.block_tables.long(), "int32"),
        (4, paged.slots[:1], r"\[S\]"),
        (4, paged.slots.float(), "slots are"),
        (5, starts[:-1], r"\[S \+ 1\]"),
    ):
        arguments = (*good[:index], bad, *good[index + 1 :])
        with pytest.raises(ValueError, match=says):
            paged_prefill(*arguments)
    with pytest.raises(ValueError, match="out must"):
        paged_prefill(*good, out=query[:1])
    empty = paged_prefill(
        query[:0], *good[1:3], paged.block_tables, paged.slots[:0], starts[:1],
        paged.context_lens[:0],
    )  # fmt: skip
    assert empty.shape == (0, 4, 16)


@GPU
@pytest.mark.parametrize(("group", "head_dim"), [(2, 128), (3, 64), (5, 128)])
@pytest.mark.parametrize("block_size", [64, 256])
def test_full_size(group: int, head_dim: int, block_size: int) -> None:
    query_lens, contexts = [1024, 37, 300, 128, 129], [1024, 2000, 812, 128, 640]
    paged = paged_kv(
        contexts, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    attend(paged, query_lens, group)


@GPU
@pytest.mark.parametrize(
    ("group", "head_dim", "config"),
    [
        pytest.param(*shape, config, id=f"{shape} {name}")
        for shape in ((2, 128), (3, 64), (8, 128))
        for name, config in prefill_candidates(*shape).items()
    ],
)
def test_full_size_of_candidates(group: int, head_dim: int, config: PrefillConfig) -> None:
    paged = paged_kv(
        [1024, 2000, 812, 129], num_kv_heads=2, head_dim=head_dim, block_size=64,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    attend(paged, [1024, 37, 300, 129], group, config)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, MAX_GROUP + 1))
def test_all_that_ships_is_compiled_without_a_gpu(group: int, head_dim: int) -> None:
    """By compile_sm90, and timed beside its neighbours: no step takes another configuration."""
    known = shipped_prefill(group, head_dim)
    for num_tokens in (1, 1000, 4095, 4096, 1 << 20):
        for longest in (None, 1, 1000, 1024, 1025, 1 << 20):
            config = choose_config(
                torch.bfloat16, group, head_dim, num_tokens=num_tokens, longest=longest
            )
            assert config in known
    assert set(known) <= set(prefill_candidates(group, head_dim).values())
