"""sum_add_rms_norm between processes: in Triton's interpreter on CPUs; between streams of one GPU
with -m gpu. Between GPUs it is tests/bench/tp_gpu.py's matter."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.kernels import reference
from millstream.kernels import sum_add_rms_norm as kernel
from millstream.kernels.sum_add_rms_norm import Mailboxes, sum_add_rms_norm

EPS = 1e-6
ROWS = (3, 1, 4, 2, 4, 4, 1)  # of the exchanges, in their order
MAX_ROWS = 4
LATE_S = 0.3


def inputs(exchange: int, ranks: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Every rank's part [ranks, n, hidden], the residual and the weight: whole numbers, whose sums
    need no rounding."""
    generator = torch.Generator().manual_seed(exchange)
    rows = ROWS[exchange]
    shapes = ((ranks, rows, hidden), (rows, hidden), (hidden,))
    numbers = (torch.randint(-20, 21, shape, generator=generator) for shape in shapes)
    parts, residual, weight = (each.to(torch.bfloat16) for each in numbers)
    # Among them the pair of values that stands for an empty mailbox.
    parts[..., 4:6] = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    return parts, residual, weight


def expected(exchange: int, ranks: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts, residual, weight = inputs(exchange, ranks, hidden)
    summed = parts.float().sum(0).to(torch.bfloat16)
    return reference.add_rms_norm(summed, residual, weight, EPS)


def rank_process(memory: Path, rank: int, ranks: int, hidden: int, out: Any) -> None:
    try:
        num_bytes = Mailboxes.num_bytes(ranks, hidden, MAX_ROWS)
        shared = torch.from_file(str(memory), True, ranks * num_bytes, dtype=torch.uint8)
        addresses = [shared.data_ptr() + i * num_bytes for i in range(ranks)]
        mailboxes = Mailboxes.create(
            torch.tensor(addresses),
            rank=rank,
            hidden_size=hidden,
            max_rows=MAX_ROWS,
        )
        results = []
        receive = kernel._receive
        for exchange in range(len(ROWS)):
            # Others may be an exchange ahead of one that takes its mail late: of all rows, so with
            # the interpreter, which takes one after the other, where there is one row.
            late = rank == ranks - 1 and ROWS[exchange] == 1
            kernel._receive = partial(_receive_late, receive) if late else receive
            parts, residual, weight = inputs(exchange, ranks, hidden)
            normed = sum_add_rms_norm(parts[rank], residual, weight, EPS, mailboxes)
            results.append((normed.float().tolist(), residual.float().tolist()))
        out.put((rank, results))
    except BaseException as error:
        out.put((rank, error))
        raise


def _receive_late(receive: Any, *args: Any) -> Any:
    time.sleep(LATE_S)
    return receive(*args)


@pytest.mark.parametrize(("ranks", "hidden"), [(2, 48), (3, 64), (8, 32)])
def test_ranks_in_processes(tmp_path: Path, ranks: int, hidden: int) -> None:
    memory = tmp_path / "mailboxes"
    num_bytes = Mailboxes.num_bytes(ranks, hidden, MAX_ROWS)
    empty = torch.empty(ranks * num_bytes, dtype=torch.uint8)
    Mailboxes.empty(empty)
    memory.write_bytes(empty.numpy().tobytes())
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=rank_process, args=(memory, rank, ranks, hidden, out))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        results = dict(out.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert results[0] == results[ranks - 1]  # bit for bit
    for exchange, (normed, residual) in enumerate(results[0]):
        norm, total = expected(exchange, ranks, hidden)
        assert torch.equal(torch.tensor(residual), total.float())
        # The interpreter cuts bfloat16 off where torch rounds: a step at each rounding.
        torch.testing.assert_close(torch.tensor(normed), norm.float(), rtol=2**-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 5120])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_streams_of_one_gpu(ranks: int, hidden: int) -> None:
    """So few rows that the programs of all ranks run at once: they wait for each other."""
    num_bytes = Mailboxes.num_bytes(ranks, hidden, MAX_ROWS)
    memory = torch.empty(ranks, num_bytes, dtype=torch.uint8, device="cuda")
    Mailboxes.empty(memory)
    addresses = torch.tensor([box.data_ptr() for box in memory], device="cuda")
    mailboxes = [
        Mailboxes.create(addresses, rank=rank, hidden_size=hidden, max_rows=MAX_ROWS)
        for rank in range(ranks)
    ]
    streams = [torch.cuda.Stream() for _ in mailboxes]  # type: ignore[no-untyped-call]
    cases = [tuple(each.cuda() for each in inputs(i, ranks, hidden)) for i in range(len(ROWS))]
    residuals = [[case[1].clone() for case in cases] for _ in mailboxes]
    torch.cuda.synchronize()
    normed: list[list[torch.Tensor]] = [[] for _ in mailboxes]
    for index, (parts, _, weight) in enumerate(cases):
        for rank, own in enumerate(mailboxes):
            with torch.cuda.stream(streams[rank]):
                residual = residuals[rank][index]
                normed[rank].append(sum_add_rms_norm(parts[rank], residual, weight, EPS, own))
    torch.cuda.synchronize()
    for index in range(len(cases)):
        norm, total = expected(index, ranks, hidden)
        torch.testing.assert_close(normed[0][index].cpu(), norm, rtol=2**-6, atol=1e-6)
        for rank in range(ranks):
            assert torch.equal(normed[0][index], normed[rank][index])
            assert torch.equal(residuals[rank][index].cpu(), total)
