"""A model over real processes: what they compute, and that they end whenever one of them does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_processes import alive
from tests.rank_processes import all_end, rank_pids, shared_memory, wait_for_ranks
from tests.tiny_models import make_tiny_model

from millstream.engine import LLM, SamplingParams
from millstream.engine.hardware import LoadError
from millstream.engine.ranks.children import RankLost
from millstream.engine.ranks.collectives import GlooGroup

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=251)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    drawn = [[rng.randrange(3, 250) for _ in range(n)] for n in (1, 3, 9, 20, 60)]
    return [*drawn, drawn[-1][:40]]


def generate(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [each["token_ids"] for each in llm.generate(prompts(), params, use_tqdm=False)]


def test_processes_compute_what_one_does(folder: Path) -> None:
    """Preempted, from the prefix cache, sampled with filters and without; a plan longer than the
    ring is in test_ring.py."""
    params = [
        SamplingParams(seed=i, max_tokens=24, ignore_eos=True, top_p=1.0 if i % 2 else 0.8)
        for i in range(len(prompts()))
    ]
    with LLM(folder, **OPTIONS) as llm:
        greedy, sampled = generate(llm, GREEDY), generate(llm, params)
    block_bytes = 2 * 2 * 4 * 1 * 16 * 4  # of a rank, which has one KV head
    options = {**OPTIONS, "kv_cache_bytes": 24 * block_bytes}
    before, num_threads = shared_memory(), torch.get_num_threads()
    with LLM(folder, tensor_parallel_size=2, **options) as llm:
        assert generate(llm, GREEDY) == greedy
        assert not llm._core.prepare_ahead(), "on a GPU all ranks record graphs"
        assert generate(llm, params) == sampled
        assert generate(llm, GREEDY) == greedy
        stats = llm.stats()
        assert stats.num_preemptions and stats.prefix_cache_hits
        ranks = rank_pids(os.getpid())
        assert len(ranks) == 1
    assert not any(map(alive, ranks))
    assert shared_memory() <= before
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(
    ("ranks", "heads", "head_dim"), [(2, (4, 2), 64), (8, (64, 8), 128)], ids=["2", "qwen3-32b, 8"]
)
def test_the_kernels_of_gpus_over_ranks(
    tmp_path: Path, ranks: int, heads: tuple[int, int], head_dim: int
) -> None:
    """In Triton's interpreter: products that are parts of sums, samples from shards of logits."""
    folder = make_tiny_model(
        tmp_path,
        vocab_size=251,
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
    )
    common: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "seed": 3}
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_p": 0.8, "logprobs": 1}]
    params = [SamplingParams(**common, **kind) for kind in kinds]
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 3, "max_model_len": 64}
    with LLM(folder, attention_backend="torch", **options) as llm:
        expected = llm.generate(prompts()[1:4], params, use_tqdm=False)
    with LLM(folder, attention_backend="triton", tensor_parallel_size=ranks, **options) as llm:
        outputs = llm.generate(prompts()[1:4], params, use_tqdm=False)
    for one, two in zip(expected, outputs, strict=True):
        assert one["token_ids"] == two["token_ids"]


def test_the_default_model_over_three_ranks(default_model_dir: Path) -> None:
    """Nine heads and three KV heads."""
    params = SamplingParams(temperature=0, max_tokens=8)
    question = "The capital of France is"
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    with LLM(default_model_dir, **options) as llm:
        expected = llm.generate(question, params, use_tqdm=False)
    assert "Paris" in expected[0]["text"]
    with LLM(default_model_dir, tensor_parallel_size=3, **options) as llm:
        assert llm.generate(question, params, use_tqdm=False) == expected


@pytest.mark.parametrize("ranks", [4, 8])
def test_many_processes_compute_what_one_does(tmp_path: Path, ranks: int) -> None:
    """A head and a KV head for each of eight; 64 tokens of each prompt."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    folder = make_tiny_model(tmp_path, vocab_size=251, hidden_size=64, head_dim=8, **heads)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(folder, **OPTIONS) as llm:
        expected = generate(llm, params)
    with LLM(folder, tensor_parallel_size=ranks, **OPTIONS) as llm:
        assert generate(llm, params) == expected


def test_row_56_a_split_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    with pytest.raises(LoadError, match=r"^tensor_parallel_size: 9 attention heads"):
        LLM(folder, tensor_parallel_size=2, **OPTIONS)
    assert not rank_pids(os.getpid())


@pytest.mark.parametrize(("ranks", "idle"), [(2, True), (4, False)])
def test_a_rank_that_dies_raises_and_ends_the_others(folder: Path, ranks: int, idle: bool) -> None:
    """Idle, or in the middle of steps, when the others fail too: an LLM's user is told which it
    was, and can close it."""
    llm = LLM(folder, tensor_parallel_size=ranks, max_model_len=500, **OPTIONS)
    victim = wait_for_ranks(os.getpid(), ranks - 1)[-1]
    if idle:
        os.kill(victim, signal.SIGKILL)
        assert all_end([victim], 1)
    else:
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    started = time.monotonic()
    says = rf"^rank {ranks - 1} of {ranks} was killed by SIGKILL$"
    with pytest.raises(RankLost, match=says):
        llm.generate(prompts() * 100, endless, use_tqdm=False)
    assert time.monotonic() - started < 5
    with pytest.raises(RankLost, match=says):  # and not that requests are pending
        generate(llm, GREEDY)
    llm.close()
    assert not rank_pids(os.getpid())


def test_row_26_a_rank_that_stops_and_dies_is_told(folder: Path) -> None:
    """Rank 0 waits for it in a collective until then."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        (victim,) = wait_for_ranks(os.getpid(), 1)
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(RankLost, match=r"^rank 1 of 2 was killed by SIGKILL$"):
            llm.generate(prompts(), GREEDY, use_tqdm=False)


def test_row_26_a_collective_that_never_ends_does_not_hold_the_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's without one of its ranks: no error comes of it, whatever waits."""
    waits = threading.Event()

    def hang(group: GlooGroup, x: torch.Tensor) -> torch.Tensor:
        waits.set()
        threading.Event().wait()
        return x

    llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
    generate(llm, GREEDY)
    (victim,) = wait_for_ranks(os.getpid(), 1)
    monkeypatch.setattr(GlooGroup, "all_reduce", hang)

    def kill_it_then() -> None:
        waits.wait()
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill_it_then).start()
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        generate(llm, GREEDY)
    with pytest.raises(RankLost):
        llm.step()
    with pytest.raises(RankLost):
        generate(llm, GREEDY)
    llm.close()
    assert time.monotonic() - started < 5
    assert not rank_pids(os.getpid())


def test_a_rank_that_dies_while_loading_is_why_the_start_fails(folder: Path) -> None:
    def kill_first() -> None:
        os.kill(wait_for_ranks(os.getpid(), 3)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_first)
    killer.start()
    with pytest.raises(LoadError, match=r"^rank 1 of 4 was killed by SIGKILL$"):
        LLM(folder, tensor_parallel_size=4, **OPTIONS)
    killer.join()
    assert not rank_pids(os.getpid())
