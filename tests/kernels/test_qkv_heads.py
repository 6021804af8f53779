"""qkv_heads against its oracle: in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.test_qk_norm_rope_store import SENTINEL, inputs

from millstream.kernels import reference, reference_attention
from millstream.kernels.heads import Heads
from millstream.kernels.linear import ScaledRows
from millstream.kernels.linear_configs import Tile
from millstream.kernels.qkv_heads import qkv_heads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE = torch.float16  # the interpreter multiplies the bits of bfloat16 operands of tl.dot
DEPTH = 96
HEADS = (4, 2, 32)
TILE = Tile(block_m=16, block_n=32, block_k=32, stages=3)

pytestmark = pytest.mark.parametrize("device", DEVICES)


def arguments(rows: int, device: str, *, norm: bool = True) -> dict[str, Any]:
    made = inputs(rows, HEADS, DTYPE, device, norm=norm)
    generator = torch.Generator().manual_seed(rows)
    width = made.pop("qkv").shape[1]
    x = torch.randn(rows, DEPTH, generator=generator)
    weight = torch.randn(width, DEPTH, generator=generator) / DEPTH**0.5
    return {"x": x.to(device, DTYPE), "weight": weight.to(device, DTYPE), **made}


def check(given: dict[str, Any], scale: ScaledRows | None = None, tile: Tile = TILE) -> None:
    names = ("key_cache", "value_cache")
    copies = {name: given[name].clone() for name in names}
    rest = {key: value for key, value in given.items() if key not in ("x", "weight", *names)}
    x = given["x"].double()
    if scale is not None:
        x = x * (x.square().mean(1, keepdim=True) + scale.eps).rsqrt()
    qkv = reference.linear(x, given["weight"].double()).to(DTYPE)
    expected = reference_attention.qk_norm_rope_store(qkv, **rest, **copies)
    actual = qkv_heads(given.pop("x"), given.pop("weight"), tile, Heads(**given), scale=scale)
    torch.testing.assert_close(actual, expected, rtol=4e-3, atol=2e-2)
    for name in names:
        torch.testing.assert_close(given[name], copies[name], rtol=4e-3, atol=2e-2)
        assert torch.equal(given[name] == SENTINEL, copies[name] == SENTINEL)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_equals_the_oracle(device: str, rows: int, norm: bool, across: bool) -> None:
    check(arguments(rows, device, norm=norm), tile=replace(TILE, across=across))


def test_a_row_of_cos_and_sin_for_each_token(device: str) -> None:
    given = arguments(20, device)
    for name in ("cos", "sin"):
        given[name] = given[name][given["positions"]]
    check({**given, "positions": None})


def test_of_rows_whose_squares_are_known(device: str) -> None:
    given = arguments(20, device)
    given["x"] *= 3
    squares = given["x"].float().square().view(20, 3, -1).sum(2).contiguous()
    check(given, ScaledRows(squares=squares, eps=0.5))


def test_row_42_padding_rows_write_nothing(device: str) -> None:
    given = arguments(20, device)
    given["kv_indices"].fill_(-1)
    check(given)
    assert bool((given["key_cache"] == SENTINEL).all())


@pytest.mark.parametrize(
    "tile",
    [
        Tile(block_m=16, block_n=16, block_k=32, stages=3),
        Tile(block_m=16, block_n=32, block_k=32),
        Tile(block_m=16, block_n=32, block_k=32, stages=3, split_k=3),
        Tile(block_m=16, block_n=32, block_k=64, stages=3),
    ],
    ids=str,
)
def test_tiles_that_do_not_fit(device: str, tile: Tile) -> None:
    given = arguments(4, device)
    with pytest.raises(ValueError, match="Tile"):
        qkv_heads(given.pop("x"), given.pop("weight"), tile, Heads(**given))


def test_bad_inputs_are_refused(device: str) -> None:
    """What linear refuses, too: the kernel would read behind a tensor, or rows of others."""
    given = arguments(20, device)
    x, weight = given.pop("x"), given.pop("weight")
    wide = torch.zeros(20, 2 * DEPTH, dtype=DTYPE, device=device)
    few, halves = torch.ones(19, 3, device=device), torch.ones(20, 3, device=device).half()
    cases: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str]] = [
        (x, weight[:, :64].contiguous(), None, "not \\[M, K\\]"),
        (x[:, :64].contiguous(), weight, None, "not \\[M, K\\]"),
        (x, weight.bfloat16(), None, "dtypes"),
        (x, weight.T.contiguous().T, None, "contiguous"),
        (wide[:, ::2], weight, None, "unit stride"),
        (wide[:, 1 : DEPTH + 1], weight, None, "16 bytes"),
        (x, weight, few, "squares"),
        (x, weight, halves, "squares"),
    ]
    for rows, of, squares, says in cases:
        scale = None if squares is None else ScaledRows(squares=squares, eps=1e-6)
        with pytest.raises(ValueError, match=says):
            qkv_heads(rows, of, TILE, Heads(**given), scale=scale)
    assert bool((given["key_cache"] == SENTINEL).all())
