"""add_rms_norm against its oracle: on the CPU in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from millstream.kernels import reference
from millstream.kernels.add_rms_norm import MAX_HIDDEN, add_rms_norm, rms_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 576), (7, 1), (2, 1000), (5, 4096), (0, 64)]
EPS = 1e-5

pytestmark = pytest.mark.parametrize("device", DEVICES)


def inputs(
    num_tokens: int, hidden: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 31 + hidden)
    x, residual, weight = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((num_tokens, hidden), (num_tokens, hidden), (hidden,))
    )
    return x, residual * 3, weight


def check_close(actual: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    """Equal but for the order of a sum, which now and then moves a rounding to the next value."""
    step = torch.finfo(actual.dtype).eps
    if actual.device.type == "cpu" and actual.dtype == torch.bfloat16:
        # The interpreter cuts bfloat16 off where the GPU rounds: a step at each rounding.
        torch.testing.assert_close(actual, expected, rtol=roundings * step, atol=1e-6)
        return
    rtol = 1e-5 if actual.dtype == torch.float32 else 2 * step
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)
    if actual.dtype != torch.float32 and actual.numel():
        assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_equals_the_oracle(device: str, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x, residual, weight = inputs(num_tokens, hidden, dtype, device)
    before = x.clone()
    expected, total = reference.add_rms_norm(x, residual, weight, EPS)
    actual = add_rms_norm(x, residual, weight, EPS)
    check_close(residual, total, roundings=1)
    check_close(actual, expected, roundings=3)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_without_a_residual(device: str, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x, _, weight = inputs(num_tokens, hidden, dtype, device)
    before = x.clone()
    check_close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), roundings=2)
    assert torch.equal(x, before)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 5120, 8192])
@pytest.mark.parametrize("num_tokens", [1, 64, 256, 5000])
def test_sizes_of_real_models(device: str, num_tokens: int, hidden: int) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    x, residual, weight = inputs(num_tokens, hidden, torch.bfloat16, device)
    expected, total = reference.add_rms_norm(x, residual, weight, EPS)
    alone = rms_norm(total, weight, EPS)
    actual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total) and torch.equal(actual, alone)
    check_close(actual, expected, roundings=3)


def test_a_rows_norm_does_not_depend_on_the_batch(device: str) -> None:
    x, _, weight = inputs(33, 1024, torch.bfloat16, device)
    together = rms_norm(x, weight, EPS)
    assert torch.equal(together[17:18], rms_norm(x[17:18], weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_is_hugging_faces(device: str, dtype: torch.dtype) -> None:
    x, residual, weight = inputs(4, 576, dtype, device)
    norm = LlamaRMSNorm(576, EPS).to(device, dtype)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        assert torch.equal(reference.add_rms_norm(x, residual, weight, EPS)[0], norm(x + residual))


def test_rows_may_lie_apart(device: str) -> None:
    """Slices of wider buffers; what lies between the rows stays."""
    wide_x, wide_residual, _ = inputs(6, 256, torch.float16, device)
    weight = torch.ones(100, dtype=torch.float16, device=device)
    kept = wide_residual[:, 100:].clone()
    x, residual = wide_x[::2, 28:128], wide_residual[::2, :100]
    expected, total = reference.add_rms_norm(x, residual, weight, EPS)
    actual = add_rms_norm(x, residual, weight, EPS)
    check_close(actual, expected, roundings=3)
    assert torch.equal(residual, total) and torch.equal(wide_residual[:, 100:], kept)


def test_extreme_values_do_not_overflow(device: str) -> None:
    """The squares of large float16 values exceed float16's range, not float32's."""
    x = torch.full((2, 64), 3e4, dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    assert torch.equal(add_rms_norm(x, torch.zeros_like(x), weight, EPS), torch.ones_like(x))
    zeros = torch.zeros_like(x)
    assert torch.equal(add_rms_norm(zeros, zeros.clone(), weight, EPS), zeros)


def test_bad_inputs_are_refused_and_nothing_is_written(device: str) -> None:
    x, residual, weight = inputs(4, 64, torch.float32, device)
    before = residual.clone()
    wide = torch.ones(1, MAX_HIDDEN + 1, device=device)
    cases = [
        ((x[0], residual[0], weight), "shapes"),
        ((x, residual[:2], weight), "shapes"),
        ((x, residual, weight[:32]), "shapes"),
        ((x[:, :0], residual[:, :0], weight[:0]), "hidden is 0"),
        ((wide, wide.clone(), wide[0].clone()), "hidden is 32769"),
        ((x, residual.bfloat16(), weight), "dtypes"),
        ((x.int(), residual.int(), weight.int()), "dtypes"),
        ((torch.empty(4, 64, device="meta"), residual, weight), "devices"),
        ((x.T.contiguous().T, residual, weight), "unit stride"),
        ((x[:, ::2], residual[:, ::2], weight[::2]), "unit stride"),
    ]
    for tensors, says in cases:
        with pytest.raises(ValueError, match=says):
            add_rms_norm(*tensors, EPS)
    assert torch.equal(residual, before)
