"""linear against its oracle: small shapes in Triton's interpreter, all configurations natively."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.roles import epilogue_of

from millstream.kernels import reference
from millstream.kernels.gemv import Norm
from millstream.kernels.linear import ScaledRows, Workspace, linear, num_pieces
from millstream.kernels.linear_configs import _MEASURED, Config, Gemv, Tile, choose, fits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPILOGUES = ["plain", "residual", "swiglu"]  # by their numbers in gemv
SMALL: list[tuple[int, Config]] = [
    (1, Gemv(block_n=4, block_k=128)),
    (1, Gemv(block_n=2, block_k=64, num_warps=1)),  # six chunks: two in the loop
    (1, Tile(block_m=16, block_n=32, block_k=128, num_warps=2)),
    (7, Tile(block_m=16, block_n=16, block_k=128)),
    (16, Tile(block_m=16, block_n=32, block_k=32, split_k=3)),
    (33, Tile(block_m=16, block_n=32, block_k=64, split_k=2)),
    (20, Tile(block_m=32, block_n=16, block_k=64, stages=3)),
    (70, Tile(block_m=64, block_n=32, block_k=64, stages=4, split_k=3)),
    (70, Tile(block_m=16, block_n=32, block_k=64, stages=3, split_k=3, across=True)),
]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def tensors(
    rows: int, size: int, depth: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(rows + size * 3 + depth * 7)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device)

    x, weight, residual = drawn(rows, depth), drawn(size, depth), drawn(rows, size)
    return x.to(dtype), (weight / depth**0.5).to(dtype), residual.to(dtype)


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    config: Config,
    epilogue: str,
    workspace: Workspace,
) -> None:
    added = residual if epilogue == "residual" else None
    swiglu = epilogue == "swiglu"
    got = linear(x, weight, config, workspace, residual=added, swiglu=swiglu)
    expected = reference.linear(x, weight, added, swiglu=swiglu)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    # Each of the roundings may fall to the other side.
    step = 2 * torch.finfo(x.dtype).eps
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        step *= 6  # the interpreter cuts bfloat16 off where a GPU rounds, all to one side
    torch.testing.assert_close(got, expected, rtol=step, atol=step)
    difference = (got.double() - expected.double()).norm() / expected.double().norm()
    assert difference < step / 4
    assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "config"), SMALL, ids=str)
def test_equals_the_oracle(
    device: str, rows: int, config: Config, epilogue: str, dtype: torch.dtype
) -> None:
    if device == "cpu" and dtype == torch.bfloat16 and isinstance(config, Tile):
        pytest.skip("the interpreter multiplies the bits of bfloat16 operands of tl.dot")
    workspace = Workspace.create(torch.device(device))
    workspace.partials.fill_(float("nan"))
    check(*tensors(rows, 64, 384, device, dtype), config, epilogue, workspace)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("depth", [128, 384, 640])
def test_one_row_with_its_norm(device: str, depth: int, epilogue: str) -> None:
    x, weight, residual = tensors(1, 64, depth, device, torch.float16)
    norm = Norm(weight=(1 + weight[0]).contiguous(), eps=1e-6)
    workspace = Workspace.create(torch.device(device))
    normed = reference.rms_norm(x * 3, norm.weight, norm.eps)
    added = residual if epilogue == "residual" else None
    swiglu = epilogue == "swiglu"
    config = Gemv(block_n=4, block_k=128)
    got = linear(x * 3, weight, config, workspace, residual=added, swiglu=swiglu, norm=norm)
    expected = reference.linear(normed, weight, added, swiglu=swiglu)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "config"), SMALL[2:], ids=str)
def test_squares_of_one_product_scale_the_next(
    device: str, rows: int, config: Tile, epilogue: str
) -> None:
    """x = y V^T + r leaves its squares, and none of rows behind; RMSNorm(x) W^T is made of them."""
    y, before, residual = tensors(rows, 384, 192, device, torch.float16)
    _, weight, added = tensors(rows, 64, 384, device, torch.float16)
    workspace = Workspace.create(torch.device(device))
    producer = Tile(block_m=16, block_n=32, block_k=64, stages=config.stages, split_k=3)
    memory = torch.full((rows + 64, num_pieces(384, producer)), float("nan"), device=device)
    squares, behind = memory[:rows], memory[rows:]
    x = linear(y, before, producer, workspace, residual=residual, squares=squares)
    assert bool(behind.isnan().all())
    wide = x.double()
    torch.testing.assert_close(squares.sum(1).double(), wide.square().sum(1), rtol=1e-4, atol=0)
    swiglu = epilogue == "swiglu"
    onto = added if epilogue == "residual" else None
    got = linear(
        x, weight, config, workspace, residual=onto, swiglu=swiglu,
        norm=ScaledRows(squares=squares, eps=0.5),
    )  # fmt: skip
    normed = wide * (wide.square().mean(1, keepdim=True) + 0.5).rsqrt()
    expected = reference.linear(normed, weight.double(), onto, swiglu=swiglu)
    torch.testing.assert_close(got.double(), expected.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("bad", ["gemv", "rows", "dtype", "pieces", "swiglu"])
def test_squares_that_do_not_fit(device: str, bad: str) -> None:
    x, weight, _ = tensors(1 if bad == "gemv" else 16, 64, 384, device)
    gemv = Gemv(block_n=4, block_k=128)
    tile = Tile(block_m=16, block_n=32, block_k=128)
    squares = torch.zeros(
        len(x) + (bad == "rows"), 3 if bad == "pieces" else 2, device=device,
        dtype=torch.float16 if bad == "dtype" else torch.float32,
    )  # fmt: skip
    with pytest.raises(ValueError, match="squares"):
        linear(
            x, weight, gemv if bad == "gemv" else tile, Workspace.create(x.device),
            squares=squares, swiglu=bad == "swiglu",
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "depth"), [(4096, 1024), (6144, 1024), (7168, 5120)], ids=str)
def test_a_norm_at_the_size_of_real_models(device: str, size: int, depth: int) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    x, weight, _ = tensors(1, size, depth, device)
    norm = Norm(weight=torch.randn(depth, device=device).bfloat16(), eps=1e-6)
    config, workspace = choose(1, size, depth), Workspace.create(torch.device(device))
    assert config is not None
    for swiglu in (False, True):
        got = linear(x, weight, config, workspace, swiglu=swiglu, norm=norm).double()
        normed = reference.rms_norm(x, norm.weight, norm.eps)
        expected = reference.linear(normed, weight, swiglu=swiglu).double()
        assert (got - expected).norm() / expected.norm() < 0.003


def test_a_depth_that_ranks_share(device: str) -> None:
    """Half of 5120 is no multiple of what a program usually takes at a time."""
    x, weight, residual = tensors(1, 64, 2560, device)
    config, workspace = choose(1, 64, 2560), Workspace.create(torch.device(device))
    assert config is not None
    for epilogue in ("plain", "residual", "swiglu"):
        check(x, weight, residual, config, epilogue, workspace)


def test_rows_that_lie_apart(device: str) -> None:
    x, weight, residual = tensors(18, 64, 256, device, torch.float16)
    workspace = Workspace.create(torch.device(device))
    config = Tile(block_m=16, block_n=32, block_k=64, split_k=2)
    check(x[::2, :128], weight[:, :128].contiguous(), residual[::2], config, "residual", workspace)
    with_bias = residual[:1].expand(18, -1)
    check(x, weight, with_bias, config, "residual", workspace)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "depth"), _MEASURED, ids=str)
def test_every_configuration_that_ships(device: str, size: int, depth: int) -> None:
    """Every shape, at both ends of each configuration's range, several times: a race would move."""
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    workspace = Workspace.create(torch.device(device))
    workspace.partials.fill_(float("nan"))
    fewest = 1
    for most, config in _MEASURED[size, depth]:
        end = min(most, 2048)
        for rows in sorted({fewest, (fewest + end) // 2, end}):
            assert choose(rows, size, depth) is config
            if config is None:
                continue
            x, weight, residual = tensors(rows, size, depth, device)
            epilogue = EPILOGUES[epilogue_of((size, depth))]
            check(x, weight, residual, config, epilogue, workspace)
            added, swiglu = residual if epilogue == "residual" else None, epilogue == "swiglu"
            outs = [
                linear(x, weight, config, workspace, residual=added, swiglu=swiglu)
                for _ in range(20)
            ]
            assert all(torch.equal(out, outs[0]) for out in outs)
        fewest = most + 1


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "depth"), [(34816, 5120), (5120, 17408), (14336, 4096)], ids=str)
def test_one_row_of_a_large_model(device: str, size: int, depth: int) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    config = choose(1, size, depth)
    assert config is not None
    workspace = Workspace.create(torch.device(device))
    for epilogue in EPILOGUES:
        check(*tensors(1, size, depth, device), config, epilogue, workspace)


@pytest.mark.gpu
def test_a_chain_in_a_cuda_graph(device: str) -> None:
    """Dependent kernels that share a workspace, each started while the one before still runs."""
    if device == "cpu":
        pytest.skip("no graphs")
    workspace = Workspace.create(torch.device(device))
    for rows in (1, 4, 16, 64, 256):
        x = torch.randn(rows, 1024, device=device).bfloat16()
        weights = [
            torch.randn(size, depth, device=device).bfloat16() / depth**0.5
            for _ in range(6)
            for size, depth in ((6144, 1024), (1024, 3072))
        ]

        def chain(x: torch.Tensor, rows: int, weights: list[torch.Tensor]) -> torch.Tensor:
            for gate_up, down in zip(weights[::2], weights[1::2], strict=True):
                up, back = choose(rows, 6144, 1024), choose(rows, 1024, 3072)
                assert up is not None and back is not None
                wide = linear(x, gate_up, up, workspace, swiglu=True)
                x = linear(wide, down, back, workspace, residual=x)
            return x

        exact, rounded = x.double(), x
        for gate_up, down in zip(weights[::2], weights[1::2], strict=True):
            gate, up = F.linear(exact, gate_up.double()).chunk(2, dim=1)
            exact = F.linear(F.silu(gate) * up, down.double()) + exact
            rounded = F.linear(reference.silu_mul(F.linear(rounded, gate_up)), down) + rounded
        eager = chain(x, rows, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, rows, weights)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager)
        # bfloat16's roundings add up over the chain: as much as torch's own is what may be off.
        assert (out.double() - exact).norm() <= 1.2 * (rounded.double() - exact).norm()


def test_choose(device: str) -> None:
    assert choose(1, 4096, 1024) == Gemv(block_n=4)
    assert choose(300, 4096, 1024) is None  # cuBLAS
    assert choose(1, 34816, 5120) is not None and choose(2, 34816, 5120) is None
    assert choose(1, 576, 576) is None
    assert choose(1, 5120, 2560) == choose(1, 5120, 8704) == Gemv(block_n=4, block_k=512)
    for (size, depth), configs in _MEASURED.items():
        assert all(fits(config, most, size, depth) for most, config in configs if config)


def test_bad_inputs_are_refused(device: str) -> None:
    x, weight, residual = tensors(16, 64, 256, device)
    workspace = Workspace.create(torch.device(device))
    config = Tile(block_m=16, block_n=32, block_k=64, split_k=2)
    boxes = Tile(block_m=16, block_n=32, block_k=64, stages=3)
    short = Norm(weight=weight[0, :9], eps=1e-6)
    cases = [
        ((x[0], weight, config), {}, "not \\[M, K\\]"),
        ((x[:0], weight, config), {}, "not \\[M, K\\]"),
        ((x, weight[:, :128], config), {}, "not \\[M, K\\]"),
        ((x, weight[:48], config), {}, "fit"),
        ((x, weight, Gemv(block_n=4, block_k=64)), {}, "fit"),
        ((x, weight, Tile(block_m=16, block_n=32, block_k=32)), {}, "fit"),
        ((x.float(), weight.float(), config), {}, "dtypes"),
        ((x, weight.T.contiguous().T, config), {}, "contiguous"),
        ((x[:1].expand(16, -1), weight, boxes), {}, "each at another"),
        ((x, weight, config), {"residual": residual[:4]}, "residual"),
        ((x, weight, config), {"residual": residual, "swiglu": True}, "residual"),
        ((x, weight, config), {"residual": residual.float()}, "residual"),
        ((x, weight, config), {"norm": Norm(weight=weight[0], eps=1e-6)}, "one row"),
        ((x[:1], weight, Gemv(block_n=4, block_k=64)), {"norm": short}, "norm"),
    ]
    for arguments, options, says in cases:
        with pytest.raises(ValueError, match=says):
            linear(*arguments, workspace, **options)  # type: ignore[arg-type]
