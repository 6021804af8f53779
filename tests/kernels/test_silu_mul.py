"""silu_mul against its oracle: on the CPU in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from millstream.kernels import reference
from millstream.kernels.silu_mul import silu_mul

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8), (3, 1024), (2, 1500), (5, 1), (0, 64)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def packed(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens * 31 + size)
    return (torch.randn(num_tokens, 2 * size, generator=generator) * 4).to(device, dtype)


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the exponential's last bits, which now and then move a rounding."""
    step = 1e-6 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
    cuts = actual.device.type == "cpu" and actual.dtype == torch.bfloat16  # instead of rounding
    torch.testing.assert_close(actual, expected, rtol=(2 if cuts else 1.01) * step, atol=1e-7)
    if not cuts and actual.dtype != torch.float32 and actual.numel():
        assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_equals_the_oracle(device: str, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    gate_up = packed(num_tokens, size, dtype, device)
    before = gate_up.clone()
    check_close(silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 3072), (256, 3072), (70_000, 3072), (9, 17408)]
)
def test_sizes_of_real_models(device: str, num_tokens: int, size: int) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    gate_up = torch.randn(num_tokens, 2 * size, dtype=torch.bfloat16, device=device)
    check_close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_rounds_as_transformers_does(device: str, dtype: torch.dtype) -> None:
    gate_up = packed(4, 256, dtype, device)
    gate, up = gate_up.chunk(2, dim=-1)
    check_close(reference.silu_mul(gate_up), F.silu(gate) * up)


def test_extreme_gates(device: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, -90.0, 2.0, 3.0, 4.0, 5.0]], device=device)
    assert silu_mul(gate_up).tolist()[0][:3] == [0.0, 3e4, 0.0]
    assert silu_mul(gate_up).isfinite().all()


def test_rows_may_lie_apart(device: str) -> None:
    wide = packed(6, 128, torch.float32, device)
    rows = wide[::2, 16:116]
    check_close(silu_mul(rows), reference.silu_mul(rows))


def test_bad_inputs_are_refused(device: str) -> None:
    cases = [
        (torch.ones(4, device=device), "shape"),
        (torch.ones(4, 3, device=device), "shape"),
        (torch.ones(4, 0, device=device), "shape"),
        (torch.ones(4, 4, device=device).int(), "floating"),
        (torch.ones(4, 4, device=device).T, "unit stride"),
    ]
    for gate_up, says in cases:
        with pytest.raises(ValueError, match=says):
            silu_mul(gate_up)
