"""--attention-backend flash-attn: a stand-in for the package on a CPU, itself on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engine.backends.test_triton_ops import GREEDY, PROMPTS, add_fake_graphs, load, run
from tests.engine.test_gpu import GREEDY as GREEDY_ON_GPU
from tests.engine.test_gpu import SHAPE, count_ties, generate, make_prompts
from tests.engine.test_gpu import load as load_gpu
from tests.paged_kv import check_rows, paged_kv, starts_of
from tests.tiny_models import make_tiny_model

from millstream.engine.backends.step_attention import FlashAttention, FlashModule, load_flash
from millstream.engine.batch import ForwardBatch
from millstream.engine.config import EngineConfig
from millstream.engine.hardware import LoadError, detect, resolve
from millstream.engine.model_files.shapes import named_shape
from millstream.kernels import reference_attention


class FakeFlash(ModuleType):
    """Computes by the oracle, and checks what flash-attn does of its arguments."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.longest: list[int] = []

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        query_lens, lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
        assert query_lens.max() <= max_seqlen_q and lens.max() <= max_seqlen_k
        self.longest.append(max_seqlen_q)
        return self._attend(q, k, v, block_table, cu_seqlens_q, lens)

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        causal: bool,
    ) -> torch.Tensor:
        assert causal and q.shape[1] == 1 and cache_seqlens.dtype == torch.int32
        starts = torch.arange(len(q) + 1)
        out = self._attend(q[:, 0], k_cache, v_cache, block_table, starts, cache_seqlens)
        return out[:, None]

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
    ) -> torch.Tensor:
        assert keys.shape[1] % 256 == 0 and keys.stride(-1) == values.stride(-1) == 1
        assert tables.shape[0] == len(lens) == len(starts) - 1 and tables.dtype == torch.int32
        assert starts.is_contiguous() and lens.is_contiguous() and tables.stride(-1) == 1
        rows = torch.arange(len(lens))
        out = reference_attention.paged_attention(query, keys, values, tables, rows, starts, lens)
        return out.to(query.dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    return fake


def test_an_engine_on_flash_attn(flash: FakeFlash, tmp_path: Path) -> None:
    """Chunks, decodes, both in one step, and decodes in graphs, against torch."""
    make_tiny_model(tmp_path, num_hidden_layers=1)
    options = {"dtype": "float32", "max_num_batched_tokens": 10, "block_size": 256}
    expected = run(load(tmp_path, **options), PROMPTS, GREEDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millstream.engine.hardware._flash_problem", lambda *arguments: "")
        runner = load(tmp_path, attention_backend="flash-attn", **options)
    assert runner._resolved.attention_backend == "flash-attn"
    assert run(runner, PROMPTS, GREEDY) == expected
    assert len(set(flash.longest)) > 1 and max(flash.longest) <= 10, "exact where they are known"
    add_fake_graphs(runner)
    assert run(runner, PROMPTS, GREEDY) == expected


def test_bounds_where_the_host_knows_no_lengths(flash: FakeFlash) -> None:
    """As in the graph of a bucket: what the batch's shape allows, and a chunk that is empty."""
    paged = paged_kv(
        [300, 1, 40], num_kv_heads=1, head_dim=16, block_size=256, dtype=torch.float32, device="cpu"
    )
    query = torch.randn(60, 2, 16)
    attention = attention_of(flash, paged, [50, 0, 4], num_decodes=0)
    out = attention.prefill(query, paged.key_cache, paged.value_cache)
    rest = paged.block_tables, paged.slots, starts_of([50, 0, 4], "cpu"), paged.context_lens
    check_rows(
        out[:54],
        reference_attention.paged_attention(query, paged.key_cache, paged.value_cache, *rest)[:54],
    )
    assert flash.longest == [60]


def attention_of(
    flash: FlashModule, paged: Any, query_lens: list[int], *, num_decodes: int
) -> FlashAttention:
    nothing = torch.empty(0)
    batch = ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        kv_indices=nothing,
        query_starts=starts_of(query_lens, str(paged.key_cache.device)),
        context_lens=paged.context_lens,
        block_tables=paged.block_tables,
        slots=paged.slots.long(),
        sample_rows=nothing,
        num_decodes=num_decodes,
        query_lens=(),
        contexts=(),
    )
    return FlashAttention(flash, batch, 4096)


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cpu = named_shape("qwen3-0.6b"), detect("cpu")
    assert model is not None

    def refused(says: str, **options: Any) -> None:
        config = EngineConfig(attention_backend="flash-attn", **{"dtype": "float16", **options})
        with pytest.raises(LoadError, match=f"^attention_backend: .*{says}"):
            resolve(config, cpu, model)

    refused("bfloat16 or float16, not float32", dtype="float32")
    refused("block_size of 256, not 64", block_size=64)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    refused("flash-attn is not installed")
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    refused("flash_attn unknown has no flash_attn_varlen_func")
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlash())
    config = EngineConfig(attention_backend="flash-attn", dtype="float16")
    resolved = resolve(config, cpu, model)
    assert (resolved.attention_backend, resolved.block_size) == ("flash-attn", 256)
    with pytest.raises(LoadError, match=r"batch_invariant: .*not flash-attn"):
        resolve(
            EngineConfig(attention_backend="flash-attn", dtype="float16", batch_invariant=True),
            cpu,
            model,
        )


# ---- the package itself


def real_flash() -> FlashModule:
    pytest.importorskip("flash_attn", exc_type=ImportError)
    return load_flash()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (4, 4, 64)], ids=str)
def test_against_the_oracle(heads: tuple[int, int, int]) -> None:
    """Two chunks, one of them with a prefix, one empty, and decodes; padding behind the chunks."""
    flash = real_flash()
    num_heads, num_kv_heads, head_dim = heads
    contexts, query_lens = [1000, 1, 300, 1, 2000, 257], [400, 0, 300, 1, 1, 1]
    paged = paged_kv(
        contexts,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=256,
        dtype=torch.bfloat16,
        device="cuda",
    )
    paged.block_tables.clamp_(min=0)  # as the engine's: every entry is some block
    query = torch.randn(703, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    caches = paged.key_cache.nan_to_num_(0.0), paged.value_cache.nan_to_num_(0.0)
    attention = attention_of(flash, paged, query_lens, num_decodes=3)
    padded = torch.cat((query[:700], query[:68]))
    out = torch.empty_like(query)
    out[:700] = attention.prefill(padded, *caches)[:700]
    assert attention.decode(query[700:], *caches, out=out[700:]) is not None
    rest = paged.block_tables, paged.slots, starts_of(query_lens, "cuda"), paged.context_lens
    check_rows(out, reference_attention.paged_attention(query, *caches, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_engine_up_to_ties(enforce_eager: bool, tmp_path: Path) -> None:
    """Chunks, mixed steps, prefix hits; from the second time on chunks are in graphs, too."""
    real_flash()
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    make_tiny_model(tmp_path, seed=1, dtype=torch.bfloat16, **{**SHAPE, **heads})
    prompts = make_prompts(30)
    options = {"attention_backend": "flash-attn", "block_size": 256, "dtype": "bfloat16"}
    options |= {"enforce_eager": enforce_eager, "max_num_batched_tokens": 300}
    with load_gpu(tmp_path, **options) as llm:
        for _ in range(3):
            outputs = generate(llm, prompts, GREEDY_ON_GPU)
            count_ties(tmp_path, prompts, outputs)
