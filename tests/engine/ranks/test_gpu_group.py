"""GpuGroup's choices and shapes, on CPUs: gloo between threads stands in for symmetric memory and
NCCL. What these do themselves is tests/bench/tp_gpu.py's matter, on GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from millstream.engine.ranks import gpu_group
from millstream.engine.ranks.collectives import GlooGroup
from millstream.engine.ranks.gpu_group import GpuGroup
from millstream.kernels.sum_add_rms_norm import Mailboxes

ROWS = 5


class StandIns:
    """Counts which way each call took; a thread is a rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = threading.local()
        self.ways: list[str] = []  # of rank 0
        monkeypatch.setattr(gpu_group, "_one_shot", self.one_shot)
        monkeypatch.setattr(gpu_group, "_two_shot", self.two_shot)
        nccl = SimpleNamespace(
            all_reduce=lambda x: self.note("nccl").all_reduce(x),
            broadcast=lambda x, _: self.note("nccl").from_first(x),
            all_gather_into_tensor=self.gather,
        )
        monkeypatch.setattr(gpu_group, "dist", nccl)

    def note(self, way: str) -> GlooGroup:
        group: GlooGroup = self.local.gloo
        if group.rank == 0:
            self.ways.append(way)
        return group

    def one_shot(self, buffer: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        assert (buffer.shape, buffer.dtype, name) == (x.shape, x.dtype, "name")
        return self.note("one shot").all_reduce(x.clone())

    def two_shot(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        assert name == "name" and buffer.nbytes % 32 == 0
        return self.note("two shots").all_reduce(buffer)

    def gather(self, gathered: torch.Tensor, x: torch.Tensor) -> None:
        gathered.copy_(self.note("nccl").all_gather(x).view(-1))


def run(stand_ins: StandIns, work: Callable[[GpuGroup], Any]) -> list[Any]:
    """What two ranks return."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        stand_ins.local.gloo = GlooGroup(number, 2, lambda: store)
        stand_ins.local.gloo.join(64)
        group = GpuGroup(number, 2, lambda: store)
        group._name = "name"
        group._sums = {
            dtype: torch.empty(gpu_group._TWO_SHOT_BYTES // dtype.itemsize, dtype=dtype)
            for dtype in gpu_group._SYMMETRIC_DTYPES
        }
        group._gathers = torch.empty(group._one_shot_bytes // 4)
        return work(group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize(
    ("dtype", "columns", "way"),
    [
        (torch.bfloat16, 64, "one shot"),
        (torch.bfloat16, (128 << 10) // 2 // ROWS, "one shot"),
        (torch.bfloat16, (128 << 10) // 2, "two shots"),
        (torch.float32, (3 << 20) // 4, "two shots"),
        (torch.bfloat16, (128 << 10) // 2 + 1, "nccl"),  # no multiple of what ranks share
        (torch.bfloat16, (16 << 20) // 2, "nccl"),
        (torch.float16, 64, "nccl"),
    ],
)
def test_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, way: str) -> None:
    stand_ins = StandIns(monkeypatch)
    for summed in run(
        stand_ins,
        lambda group: group.all_reduce(torch.full((ROWS, columns), group.rank + 1.0, dtype=dtype)),
    ):
        assert summed.shape == (ROWS, columns) and summed.dtype == dtype
        assert bool((summed == 3).all())
    assert stand_ins.ways == [way]


def test_a_sum_of_no_rows_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that samples nothing, behind the last layer's attention."""
    stand_ins = StandIns(monkeypatch)
    for dtype in (torch.float32, torch.float16):
        for summed in run(
            stand_ins, lambda group, d=dtype: group.all_reduce(torch.empty(0, 64, dtype=d))
        ):
            assert summed.shape == (0, 64) and summed.dtype == dtype
    assert stand_ins.ways == []


@pytest.mark.parametrize(
    ("rows", "dtype", "way"),
    [
        (1, torch.float32, "one shot"),
        (1024, torch.float32, "one shot"),
        (20_000, torch.float32, "nccl"),
        (8, torch.bfloat16, "nccl"),  # logits
    ],
)
def test_gathers(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, way: str) -> None:
    stand_ins = StandIns(monkeypatch)
    parts = torch.randn(2, 3, rows).to(dtype)
    parts[0, 1, 0] = -torch.inf
    for gathered in run(stand_ins, lambda group: group.all_gather(parts[group.rank])):
        assert torch.equal(gathered, parts)
    assert stand_ins.ways == [way]


@pytest.mark.parametrize(("rows", "way"), [(1, "one shot"), (40_000, "nccl")])
def test_the_first_ranks_ids(monkeypatch: pytest.MonkeyPatch, rows: int, way: str) -> None:
    stand_ins = StandIns(monkeypatch)
    ids = torch.randint(0, 1 << 24, (rows,))
    for told in run(
        stand_ins,
        lambda group: group.from_first(ids.clone() if group.rank == 0 else ids.clone() + 5),
    ):
        assert told.dtype == torch.int64 and torch.equal(told, ids)
    assert stand_ins.ways == [way]


@pytest.mark.parametrize(
    ("shape", "dtype", "through"),
    [
        ((1, 64), torch.bfloat16, True),
        ((4, 64), torch.bfloat16, True),
        ((5, 64), torch.bfloat16, False),
        ((1, 32), torch.bfloat16, False),
        ((1, 64), torch.float32, False),
        ((1, 64), torch.float16, False),
    ],
)
def test_mailboxes(shape: tuple[int, int], dtype: torch.dtype, through: bool) -> None:
    group = GpuGroup(0, 2, lambda: None)
    addresses = torch.zeros(2, dtype=torch.int64)
    group._mailboxes = Mailboxes.create(addresses, rank=0, hidden_size=64, max_rows=4)
    mailboxes = group.mailboxes(torch.zeros(shape, dtype=dtype))
    assert mailboxes is (group._mailboxes if through else None)
