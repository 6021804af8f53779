"""qk_norm_rope_store against its oracle: in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from millstream.kernels import reference_attention
from millstream.kernels.heads import Heads
from millstream.kernels.qk_norm_rope_store import qk_norm_rope_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-2  # large enough to be missed
MAX_LEN = 50
SENTINEL = 9.0

pytestmark = pytest.mark.parametrize("device", DEVICES)


def inputs(
    num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str, *, norm: bool
) -> dict[str, Any]:
    """Keyword arguments, with caches full of a sentinel and every third token a padding row."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    table = random(MAX_LEN, head_dim)
    kv_indices = torch.randperm(2 * num_tokens + 16, generator=generator)[:num_tokens]
    kv_indices[2::3] = -1
    shape = (-(-(2 * num_tokens + 16) // 16), 16, num_kv_heads, head_dim)
    return {
        "qkv": random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim),
        "q_weight": random(head_dim) if norm else None,
        "k_weight": random(head_dim) if norm else None,
        "eps": EPS,
        "cos": table[:, : head_dim // 2],
        "sin": table[:, head_dim // 2 :],
        "positions": torch.randint(MAX_LEN, (num_tokens,), generator=generator).to(device),
        "kv_indices": kv_indices.to(device),
        "key_cache": torch.full(shape, SENTINEL, dtype=dtype, device=device),
        "value_cache": torch.full(shape, SENTINEL, dtype=dtype, device=device),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }


def run(arguments: dict[str, Any]) -> torch.Tensor:
    rest = {name: value for name, value in arguments.items() if name != "qkv"}
    return qk_norm_rope_store(arguments["qkv"], Heads(**rest))


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of the norm's sum, which now and then moves a rounding."""
    step = torch.finfo(actual.dtype).eps
    if actual.device.type == "cpu" and actual.dtype == torch.bfloat16:
        # The interpreter cuts bfloat16 off where the GPU rounds: a step at each rounding.
        torch.testing.assert_close(actual, expected, rtol=0, atol=32 * step)
        return
    rtol = 1e-5 if actual.dtype == torch.float32 else step
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * 8)
    if actual.dtype != torch.float32:
        assert (actual == expected).float().mean() > 0.98


def check(arguments: dict[str, Any]) -> None:
    names = ("key_cache", "value_cache")
    copies = {name: arguments[name].clone() for name in names}
    expected = reference_attention.qk_norm_rope_store(**{**arguments, **copies})
    actual = run(arguments)
    check_close(actual, expected)
    for name in names:
        check_close(arguments[name], copies[name])
        # what no token owns is untouched, to the bit
        assert torch.equal(arguments[name] == SENTINEL, copies[name] == SENTINEL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [(6, 2, 32), (4, 4, 16), (9, 3, 64), (5, 1, 24), (20, 4, 16)])
def test_equals_the_oracle(
    device: str, dtype: torch.dtype, norm: bool, heads: tuple[int, int, int]
) -> None:
    for num_tokens in (1, 7):
        check(inputs(num_tokens, heads, dtype, device, norm=norm))


def test_many_tokens(device: str) -> None:
    """And none at all."""
    check(inputs(80, (4, 2, 32), torch.float32, device, norm=True))
    assert run(inputs(0, (4, 2, 32), torch.float32, device, norm=True)).numel() == 0


def test_a_row_of_cos_and_sin_for_each_token(device: str) -> None:
    """Without positions, as models with dynamic RoPE give them."""
    arguments = inputs(7, (4, 2, 32), torch.float32, device, norm=True)
    for name in ("cos", "sin"):
        arguments[name] = arguments[name][arguments["positions"]]
    check({**arguments, "positions": None})


def test_rows_of_qkv_may_lie_apart(device: str) -> None:
    arguments = inputs(7, (4, 2, 32), torch.float16, device, norm=True)
    wide = torch.randn(7, 400).to(device, torch.float16)
    wide[:, 8:264] = arguments["qkv"]
    check({**arguments, "qkv": wide[:, 8:264]})


def test_row_42_padding_rows_write_nothing(device: str) -> None:
    """Row 42: a negative index is a padding row; not even the last block is written."""
    arguments = inputs(5, (4, 2, 32), torch.float32, device, norm=True)
    arguments["kv_indices"].fill_(-1)
    run(arguments)
    for name in ("key_cache", "value_cache"):
        assert bool((arguments[name] == SENTINEL).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_is_hugging_faces(device: str, dtype: torch.dtype) -> None:
    arguments = inputs(7, (6, 2, 32), dtype, device, norm=True)
    arguments["kv_indices"] = torch.arange(7, device=device)
    positions = arguments["positions"]
    heads = arguments["qkv"].view(7, -1, 32)
    both = []
    for part, weight in ((heads[:, :6], "q_weight"), (heads[:, 6:8], "k_weight")):
        norm = Qwen3RMSNorm(32, EPS).to(device, dtype)
        norm.weight.data.copy_(arguments[weight])
        with torch.no_grad():
            both.append(norm(part).transpose(0, 1)[None])
    cos, sin = (torch.cat([arguments[name][positions]] * 2, -1)[None] for name in ("cos", "sin"))
    query, key = apply_rotary_pos_emb(*both, cos, sin)
    actual = reference_attention.qk_norm_rope_store(**arguments)
    assert torch.equal(actual, query[0].transpose(0, 1))
    stored = arguments["key_cache"].view(-1, 2, 32)[:7]
    assert torch.equal(stored, key[0].transpose(0, 1))
    stored = arguments["value_cache"].view(-1, 2, 32)[:7]
    assert torch.equal(stored, heads[:, 8:])


def test_bad_inputs_are_refused(device: str) -> None:
    good = inputs(4, (4, 2, 32), torch.float32, device, norm=True)
    for changes, says in (
        ({"qkv": good["qkv"][:, 1:]}, "qkv is .* wide"),
        ({"num_heads": 5}, "qkv is .* wide"),
        ({"num_kv_heads": 4}, "KV heads"),
        ({"key_cache": good["key_cache"][1:]}, "caches have shapes"),
        ({"k_weight": None}, "both be None"),
        ({"q_weight": good["q_weight"][:8]}, "must have shape"),
        ({"cos": good["cos"][:3], "sin": good["sin"][:3], "positions": None}, "cos, sin"),
        ({"sin": good["sin"][:, :8]}, "cos, sin"),
        ({"sin": good["sin"].contiguous()}, "distance"),
        ({"kv_indices": good["kv_indices"][:3]}, "one entry"),
        ({"kv_indices": good["kv_indices"].float()}, "int32 or int64"),
        ({"qkv": good["qkv"].half()}, "dtypes"),
    ):
        with pytest.raises(ValueError, match=says):
            run({**good, **changes})
    assert bool((good["key_cache"] == SENTINEL).all())
