"""copy_out: interpreted on a CPU; natively, into pinned memory, under -m gpu."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels.copy_out import copy_out

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_host(size: int, device: str) -> torch.Tensor:
    return torch.full((size,), -1, dtype=torch.int64, pin_memory=device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_copies_so_many_and_no_more(device: str, count: int) -> None:
    x = torch.randint(-(1 << 62), 1 << 62, (count + 3,)).to(device)
    out = on_host(count + 5, device)
    copy_out(x[3:], out[1 : count + 1])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(out[1 : count + 1], x[3:].cpu())
    assert out[0] == -1 and (out[count + 1 :] == -1).all()


@pytest.mark.gpu
def test_behind_a_graph_and_before_the_next() -> None:
    """As steps do: each replay's result is on the host when its event has come."""
    x = torch.zeros(300, dtype=torch.int64, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    x.zero_()
    buffers = [on_host(300, "cuda") for _ in range(50)]
    events = [torch.cuda.Event() for _ in buffers]
    for buffer, event in zip(buffers, events, strict=True):
        graph.replay()
        copy_out(x, buffer)
        event.record()
    for step, (buffer, event) in enumerate(zip(buffers, events, strict=True)):
        event.synchronize()
        assert (buffer == step + 1).all()


@pytest.mark.parametrize(
    ("x", "out", "says"),
    [
        (torch.zeros(3), torch.zeros(4), "alike"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "alike"),
        (torch.zeros(3, 3), torch.zeros(3, 3), "alike"),
        (torch.zeros(6)[::2], torch.zeros(3), "contiguous"),
        (torch.zeros(3), torch.zeros(6)[::2], "contiguous"),
    ],
)
def test_refuses(x: torch.Tensor, out: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        copy_out(x, out)


@pytest.mark.gpu
def test_refuses_memory_that_a_kernel_cannot_write() -> None:
    with pytest.raises(ValueError, match="pinned"):
        copy_out(torch.zeros(3, device="cuda"), torch.zeros(3))
