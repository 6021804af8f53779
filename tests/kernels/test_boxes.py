"""Memory behind the last row: how much there is, and that what lies there is never seen."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels import reference
from millstream.kernels.boxes import padded, whole_tiles
from millstream.kernels.linear import ScaledRows, Workspace, linear
from millstream.kernels.linear_configs import Tile

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
def test_there_is_memory_for_whole_tiles(rows: int) -> None:
    x = padded(rows, 3, 16, like=torch.zeros(1, dtype=torch.float16))
    assert x.shape == (rows, 3, 16) and x.dtype == torch.float16 and x.is_contiguous()
    if rows:
        tiles = whole_tiles(x.view(rows, 48), 64)
        assert len(tiles) == -(-rows // 64) * 64
        assert tiles.data_ptr() == x.data_ptr() and tiles.stride() == (48, 1)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("width", [16, 10])
def test_no_row_behind_the_memorys_end(offset: int, width: int) -> None:
    """A view that begins somewhere, and whose rows may be narrower than they are apart."""
    memory = torch.arange(20.0 * 16).view(20, 16)
    x = memory[offset : offset + 5, :width]
    tiles = whole_tiles(x, 16)
    assert torch.equal(tiles, memory[offset : offset + 16, :width])
    assert torch.equal(whole_tiles(x, 64), memory[offset:, :width])
    assert len(whole_tiles(memory[15:, 16 - width :], 16)) == 5


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_there_is_not_seen(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (
        padded(20, width, like=torch.zeros(1, dtype=torch.float16, device=device))
        for width in (96, 64)
    )
    for tensor in (x, residual):
        tensor.as_strided((128, tensor.shape[1]), tensor.stride()).fill_(float("nan"))
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    weight = (torch.randn(64, 96, generator=generator) / 10).to(device, torch.float16)
    tile = Tile(block_m=16, block_n=32, block_k=32, stages=3)
    workspace = Workspace.create(torch.device(device))
    out = linear(x, weight, tile, workspace, residual=residual)
    torch.testing.assert_close(out, reference.linear(x, weight, residual), rtol=4e-3, atol=4e-3)
    squares = x.float().square().sum(1, keepdim=True)
    scaled = linear(x, weight, tile, workspace, norm=ScaledRows(squares=squares, eps=1e-6))
    assert bool(scaled.isfinite().all())


@pytest.mark.parametrize("epilogue", ["plain", "residual", "swiglu"])
def test_what_is_multiplied_next_has_it(epilogue: str) -> None:
    """Logits are not: a row of 151,936 would take the memory of 128."""
    x, weight = torch.zeros(20, 96, dtype=torch.float16), torch.zeros(64, 96, dtype=torch.float16)
    tile = Tile(block_m=16, block_n=32, block_k=32, stages=3)
    residual = torch.zeros(20, 64, dtype=torch.float16) if epilogue == "residual" else None
    out = linear(
        x, weight, tile, Workspace.create(x.device), residual=residual, swiglu=epilogue == "swiglu"
    )
    rows = out.untyped_storage().nbytes() // (out.shape[1] * out.itemsize)
    assert rows == (20 if epilogue == "plain" else 128)
