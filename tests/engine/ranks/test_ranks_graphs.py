"""Ranks with stand-ins for CUDA graphs, in threads, on the kernels in Triton's interpreter."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engine.backends.test_triton_ops import add_fake_chunk_graphs, add_fake_graphs
from tests.threaded_ranks import ThreadedRanks
from tests.tiny_models import make_tiny_model

from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.request import Request, Sampling
from millstream.engine.runner import create


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter changes its own module while a kernel runs."""
    from triton.runtime.interpreter import GridExecutor

    lock, run = threading.Lock(), GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


def run(runner: Any) -> list[list[int]]:
    core = EngineCore(runner, prefix_caching=True)
    # A budget may cut the third's prompt: it is special before it samples anything.
    plain: list[dict[str, Any]] = [{"temperature": 0.0}, {}]
    outputs: dict[int, list[int]] = {}
    for key, kind in enumerate([*plain, {"logprobs": 1}, {"top_p": 0.8}, *plain]):
        if key == 2:  # at first, batches that need nothing of whole rows
            while core.has_work:
                step(core, outputs)
        max_tokens = 10 if key == 2 else 2 + key % 2  # to the end with decodes alone
        sampling = Sampling(max_tokens=max_tokens, seed=key, ignore_eos=True, **kind)
        core.submit(Request(key=key, token_ids=[5 + key, *range(6, 16)], sampling=sampling))
    while core.has_work:
        step(core, outputs)
    core.close()
    return [outputs[key] for key in sorted(outputs)]


def step(core: EngineCore, outputs: dict[int, list[int]]) -> None:
    record = core.step()
    for key, token_id in zip(record.keys, record.token_ids, strict=True):
        outputs.setdefault(key, []).append(token_id)


@pytest.mark.parametrize("budget", [None, 9])
def test_decodes_and_chunks_in_graphs(
    tmp_path: Path, one_kernel_at_a_time: None, budget: int | None
) -> None:
    """Some are recorded before they are needed. Plain rows are sampled inside; rows with filters or
    log probabilities after the graph, and their chunks run without one on both ranks, also those
    that sample nothing yet."""
    folder = make_tiny_model(tmp_path, num_hidden_layers=1, vocab_size=251)
    options: dict[str, Any] = {"device": "cpu", "block_size": 16, "max_num_seqs": 6}
    options |= {"kv_cache_bytes": 1 << 20, "max_model_len": 64, "max_num_batched_tokens": budget}
    expected = run(create(EngineConfig(attention_backend="torch", **options), folder))
    config = EngineConfig(attention_backend="triton", tensor_parallel_size=2, **options)
    ranks = ThreadedRanks(config, folder)
    ranks.wait_loaded()
    runners = (ranks.first, *ranks.others)
    graphs = [add_fake_graphs(runner) for runner in runners]
    chunk_graphs = [add_fake_chunk_graphs(runner) for runner in runners]
    assert [ranks.prepare_ahead() for _ in range(3)] == [True] * 3
    assert run(ranks) == expected
    sizes = [list(each._graphs) for each in graphs]
    assert len(sizes[0]) > 3 and sizes[0] == sizes[1], "in one order"
    kinds = [{kind.name for _, kind in each._graphs} for each in graphs]
    assert kinds == [{"PLAIN", "LOGITS"}] * 2
    buckets = [sorted(map(str, each._graphs)) for each in chunk_graphs]
    assert buckets[0] and buckets[0] == buckets[1]
