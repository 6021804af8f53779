"""The slot table's batches against a naive reading of the plans, and the runner's life."""

from __future__ import annotations

import gc
import json
import logging
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec import structs
from tests.tiny_models import make_tiny_model

from millstream.engine.attention import KVCache
from millstream.engine.batch import ForwardBatch
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.request import Request, Sampling
from millstream.engine.runner import ModelRunner, create
from millstream.engine.sampling import SamplingRows
from millstream.engine.scheduler import Scheduler
from millstream.engine.slots import SlotTable
from millstream.engine.startup.runner_parts import warm_up_plan
from millstream.engine.stepping.batch_layout import BatchLayout
from millstream.engine.stepping.results import CpuResults
from millstream.kernels.prefill_configs import choose_config

CPU = torch.device("cpu")
BLOCK_BYTES = 2 * 2 * 4 * 2 * 16 * 4  # of the tiny model, for blocks of 4 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(folder: Path | None, **options: Any) -> ModelRunner:
    return create(EngineConfig(device="cpu", **{"block_size": 4, **options}), folder)


class NaiveSlots:
    """What the slots hold according to the plans, token by token, in plain Python."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def check(self, plan: Plan, batch: ForwardBatch) -> list[int]:
        """Compares a batch with its plan; returns the slots that sample, in order."""
        for start in plan.starts:
            self.tables[start.slot] = list(start.block_ids)
            self.computed[start.slot] = start.num_computed_tokens
        for slot, block_id in plan.block_appends:
            self.tables[slot].append(block_id)
        work = [(chunk.slot, list(chunk.token_ids), chunk.samples) for chunk in plan.chunks]
        work += [(slot, [self.last[slot]], True) for slot in plan.decode_slots]
        token_ids, positions, kv_indices, contexts, sample_rows = [], [], [], [], []
        for slot, ids, samples in work:
            for token_id in ids:
                position = self.computed[slot]
                block = self.tables[slot][position // self.block_size]
                token_ids.append(token_id)
                positions.append(position)
                kv_indices.append(block * self.block_size + position % self.block_size)
                self.computed[slot] += 1
            contexts.append(self.computed[slot])
            if samples:
                sample_rows.append(len(token_ids) - 1)
        lens = [len(ids) for _, ids, _ in work]
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.kv_indices.tolist() == kv_indices
        assert batch.context_lens.tolist() == contexts == list(batch.contexts)
        assert batch.sample_rows.tolist() == sample_rows
        assert batch.query_starts.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
        assert list(batch.query_lens) == lens
        assert batch.num_decodes == len(plan.decode_slots)
        assert batch.slots.tolist() == [slot for slot, _, _ in work]
        for row, (slot, _, _) in enumerate(work):
            used = -(-contexts[row] // self.block_size)
            assert batch.block_tables[slot, :used].tolist() == self.tables[slot][:used]
        assert {t.dtype for t in (batch.token_ids, batch.kv_indices)} == {torch.int64}
        assert {t.dtype for t in (batch.block_tables, batch.context_lens)} == {torch.int32}
        return [slot for slot, _, samples in work if samples]


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_what_the_plans_say(seed: int) -> None:
    """Random requests through the real scheduler, with preemption and one step ahead."""
    generator = random.Random(seed)
    info = RunnerInfo(
        vocab_size=50,
        eos_token_ids=(0,),
        max_model_len=40,
        max_num_seqs=5,
        max_num_batched_tokens=generator.choice([3, 8, 30]),
        block_size=4,
        num_blocks=14,
        max_in_flight=generator.choice([1, 2]),
    )

    class CheckingRunner:
        """Samples at random, and checks each batch when it is launched."""

        def __init__(self) -> None:
            self.info = info
            self.slots = SlotTable(
                max_num_seqs=5, max_model_len=40, block_size=4, device=CPU, dynamic_rope=True
            )
            self.naive = NaiveSlots(4)
            self.results: list[StepResult] = []

        def launch(self, plan: Plan) -> None:
            layout = self.slots.apply(plan)
            batch = self.slots.batch(layout)
            slots = self.naive.check(plan, batch)
            token_ids = [generator.randrange(50) for _ in slots]
            self.naive.last.update(zip(slots, token_ids, strict=True))
            sampled = torch.tensor(token_ids, dtype=torch.int64)
            self.slots.advance(batch, layout.sample_slots, sampled)
            self.slots.note_advance(layout)
            self.results.append(StepResult(step=plan.step, token_ids=token_ids))

        def collect(self) -> StepResult:
            return self.results.pop(0)

        def close(self) -> None:
            pass

    core = EngineCore(CheckingRunner(), prefix_caching=True, clock=lambda: 0.0)
    for key in range(30):
        prompt = [generator.randrange(3) for _ in range(generator.randint(1, 30))]
        max_tokens = generator.randint(1, 40 - len(prompt))
        core.submit(Request(key=key, token_ids=prompt, sampling=Sampling(max_tokens=max_tokens)))
        for _ in range(generator.randint(0, 4)):
            core.step()
    while core.has_work:
        core.step()
    assert core.stats().requests_finished == 30


def start_decoding(table: SlotTable, sampling: list[Sampling], min_tokens: int = 0) -> Scheduler:
    """One request a slot, each with a prompt of 3 tokens, computed and ready to decode."""
    info = RunnerInfo(
        vocab_size=50,
        eos_token_ids=(7,),
        max_model_len=64,
        max_num_seqs=len(sampling),
        max_num_batched_tokens=512,
        block_size=16,
        num_blocks=64,
    )
    scheduler = Scheduler(info, False)
    for key, each in enumerate(sampling):
        each = structs.replace(each, min_tokens=min_tokens)
        scheduler.add(Request(key=key, token_ids=[1, 2, 3], sampling=each), 0.0)
    step(scheduler, table)
    return scheduler


def step(scheduler: Scheduler, table: SlotTable) -> tuple[BatchLayout, SamplingRows]:
    """One step whose samples are all 5; returns its layout and how its rows sample."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    layout = table.apply(plan)
    rows = table.sampling_rows(layout)
    count = len(layout.sample_slots)
    table.advance(table.batch(layout), layout.sample_slots, torch.full((count,), 5))
    table.note_advance(layout)
    scheduler.apply(StepResult(step=plan.step, token_ids=[5] * count), 0.0)
    return layout, rows


def make_table(max_num_seqs: int, **options: Any) -> SlotTable:
    return SlotTable(
        max_num_seqs=max_num_seqs, max_model_len=64, block_size=16, device=CPU, **options
    )


def test_steady_decode_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(4)
    scheduler = start_decoding(table, [Sampling(max_tokens=40, temperature=0.5)] * 4)
    first = step(scheduler, table)
    monkeypatch.setattr(table, "_upload", None)
    for _ in range(10):
        again = step(scheduler, table)
        assert again[0] is first[0] and again[1] is first[1]
        assert not again[0].host.special


def test_parameters_of_a_mixed_batch_go_to_their_rows() -> None:
    table = make_table(5)
    samplings = [
        Sampling(max_tokens=9, temperature=0.0),
        Sampling(max_tokens=9, temperature=0.5, top_k=3, seed=2**64 - 1),
        Sampling(max_tokens=9, temperature=1e-6),
        Sampling(max_tokens=9, temperature=1.5, top_p=0.5, min_p=0.25, seed=2**63),
        Sampling(max_tokens=9, temperature=1.0, top_k=7, top_p=0.75, seed=3),
    ]
    scheduler = start_decoding(table, samplings)
    _, rows = step(scheduler, table)
    assert rows.random is not None and rows.random.tolist() == [1, 3, 4]
    assert rows.temperatures.tolist() == [0.5, 1.5, 1.0]
    assert rows.seeds.tolist() == [-1, -(2**63), 3]
    assert rows.top_k_rows.tolist() == [0, 2] and rows.top_k.tolist() == [3, 7]
    assert rows.max_top_k == 7
    assert rows.top_p_rows.tolist() == [1, 2] and rows.top_p.tolist() == [0.5, 0.75]
    assert rows.min_p.tolist() == [0.0, 0.25, 0.0]
    greedy = make_table(2)
    scheduler = start_decoding(greedy, [Sampling(max_tokens=9, temperature=0.0)] * 2)
    assert step(scheduler, greedy)[1].random is None


def test_dynamic_rope_is_told_the_prompt_length() -> None:
    table = make_table(1, dynamic_rope=True)
    scheduler = start_decoding(table, [Sampling(max_tokens=20)], min_tokens=2)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    batch = table.batch(table.apply(plan))
    assert batch.rope_lens is not None and batch.rope_lens.tolist() == [4]


# ---- the runner


def run(runner: ModelRunner, prompts: list[list[int]], max_tokens: int = 12) -> list[list[int]]:
    """Greedy outputs, through an EngineCore."""
    core = EngineCore(runner, prefix_caching=True)
    outputs: list[list[int]] = [[] for _ in prompts]
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for key, prompt in enumerate(prompts):
        core.submit(Request(key=key, token_ids=prompt, sampling=sampling))
    while core.has_work:
        record = core.step()
        for key, token_id in zip(record.keys, record.token_ids, strict=True):
            outputs[key].append(token_id)
    return outputs


PROMPTS = [[5, 6, 7], [9] * 17, list(range(3, 60)), [100]]


@pytest.mark.parametrize("kv_blocks", [None, 20])
def test_one_step_ahead_gives_the_same_tokens(folder: Path, kv_blocks: int | None) -> None:
    expected = run(load(folder), PROMPTS)
    ahead = load(folder, kv_cache_bytes=None if kv_blocks is None else kv_blocks * BLOCK_BYTES)
    ahead.info = replace(ahead.info, max_in_flight=2)
    assert run(ahead, PROMPTS) == expected


def test_row_42_what_the_cache_held_before_never_leaks(folder: Path) -> None:
    """Memory for the cache is not cleared: it may hold anything, NaN too."""
    expected = run(load(folder), PROMPTS)
    dirty = load(folder, max_num_batched_tokens=10)
    with torch.inference_mode():
        dirty._steps.kv_cache.data.fill_(float("nan"))
    assert run(dirty, PROMPTS) == expected
    written = dirty._steps.kv_cache.data[0, 0].isfinite().all(dim=(1, 2, 3)).nonzero().flatten()
    assert len(written) <= 1 + sum(-(-(len(p) + 12) // 4) for p in PROMPTS)


def test_two_models_in_one_process(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, "llama", seed=5)
    expected = [run(load(each), PROMPTS) for each in (folder, other)]
    runners = [load(folder), load(other)]
    assert [run(runner, PROMPTS) for runner in runners] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_cpu(folder: Path, dtype: str) -> None:
    runner = load(folder, dtype=dtype)
    assert runner._steps.kv_cache.data.dtype is getattr(torch, dtype)
    assert [len(output) for output in run(runner, PROMPTS)] == [12] * 4


def test_info(folder: Path) -> None:
    info = load(folder, max_num_seqs=3, kv_cache_bytes=130 * BLOCK_BYTES).info
    assert info == RunnerInfo(
        vocab_size=256,
        eos_token_ids=(2,),
        max_model_len=512,
        max_num_seqs=3,
        max_num_batched_tokens=2048,
        block_size=4,
        num_blocks=130,
    )


def test_rows_5_and_20_a_limit_that_nobody_asked_for_shrinks_to_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = load(folder, kv_cache_bytes=16 * BLOCK_BYTES + 5).info
    assert (info.num_blocks, info.max_model_len) == (16, 64)
    assert "max_model_len is 64 instead of the model's 512" in caplog.text


def test_row_5_a_limit_that_was_asked_for_stays(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = load(folder, kv_cache_bytes=16 * BLOCK_BYTES, max_model_len=100).info
    assert (info.num_blocks, info.max_model_len) == (16, 100)
    assert "holds 64 tokens, fewer than max_model_len (100)" in caplog.text


def test_dynamic_rope_turns_prefix_sharing_off(folder: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    make_tiny_model(tmp_path, "llama", rope_parameters=rope)
    assert load(folder).info.prefix_sharing
    assert not load(tmp_path).info.prefix_sharing


def test_dummy_weights_need_no_folder() -> None:
    runner = load(None, model="smollm2-135m", load_format="dummy", kv_cache_bytes=1 << 24, seed=3)
    assert runner.info.vocab_size == 49152
    runner.close()


def test_close_frees_everything_at_once(folder: Path) -> None:
    """Also what holds each other, as steps and graphs do: a GPU's memory is for the next process,
    whenever the garbage collector comes by."""
    triton: dict[str, Any] = {"attention_backend": "triton", "block_size": 16}
    runner = load(folder, kv_cache_bytes=64 * BLOCK_BYTES, **triton)
    run(runner, PROMPTS[:1])
    steps = runner._steps
    steps.use_graphs(lambda step: pytest.fail("nothing is to be recorded"))
    kept = [weakref.ref(each) for each in (steps, steps.model, steps.kv_cache.layers[0][0])]
    del steps
    gc.disable()
    try:
        runner.close()
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()


def test_dummy_weights_of_a_folder_without_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert run(one, PROMPTS) == run(same, PROMPTS) != run(other, PROMPTS)
    with pytest.raises(ValueError, match=r"safetensors"):
        load(tmp_path)


def test_progress_counts_the_bytes_of_the_weights(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(device="cpu")
    ModelRunner(config, folder, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "gguf"}, "load_format: one of"),
        ({"dtype": "int8"}, "dtype: one of"),
        ({"max_model_len": 513}, "max_model_len: the model has 512 positions"),
        ({"kv_cache_bytes": 10}, "no room for a KV cache"),
    ],
)
def test_settings_that_cannot_be_served(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="model: a folder, or with load_format dummy one of"):
        load(None, model="no-such-shape", load_format="dummy")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "bert"}))
    with pytest.raises(ValueError, match="model_type"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_model_len"),
    [(16, 4, 512), (16, 4, 5), (4, 4, 512), (1, 1, 2), (100, 3, 20), (2, 9, 2)],
)
def test_warm_up_plan(folder: Path, num_tokens: int, num_seqs: int, max_model_len: int) -> None:
    """As many tokens as asked for, or as all sequences have; nothing outside the scratch block."""
    runner = load(folder, max_num_seqs=num_seqs, max_model_len=max_model_len)
    plan = warm_up_plan(runner._resolved, num_tokens)
    seqs = min(num_seqs, num_tokens)
    assert len(plan.starts) == len(plan.chunks) + len(plan.decode_slots) == seqs
    assert plan.num_tokens == min(num_tokens, seqs * (max_model_len - 1))
    table = SlotTable(max_num_seqs=num_seqs, max_model_len=max_model_len, block_size=4, device=CPU)
    batch = table.batch(table.apply(plan))
    assert set(batch.kv_indices.tolist()) <= set(range(4))


def test_a_warm_up_takes_its_tokens_to_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first request waits for no kernel of that way; nothing of it is left behind."""
    way = CpuResults()
    put = mock.Mock(wraps=way.put)
    monkeypatch.setattr(way, "put", put)
    monkeypatch.setattr("millstream.engine.runner.CpuResults", lambda: way)
    load(folder)
    put.assert_called_once()
    assert not way._steps


def test_the_scratch_block_alone_is_enough_for_a_warm_up(folder: Path) -> None:
    runner = load(folder)
    shape = list(runner._steps.kv_cache.data.shape)
    shape[2] = 1
    runner._steps.kv_cache = KVCache.of(torch.zeros(shape))
    runner._steps.slots = SlotTable(max_num_seqs=256, max_model_len=512, block_size=4, device=CPU)
    for short in (False, True):
        plan = warm_up_plan(runner._resolved, 300, short=short)
        with torch.inference_mode():
            token_ids = runner._steps.run(runner._steps.take(plan)).token_ids
        assert len(token_ids) == (1 if short else 256)


@pytest.mark.parametrize("max_num_batched_tokens", [4096, 4100, 5000, 16_384])
@pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(4, 4096), (64, 101), (1024, 4096)])
def test_a_warm_up_of_short_prompts(
    folder: Path, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> None:
    """Where a step of short prompts can be so large that they take their own tiles, this one is;
    none is longer than those, none scored."""
    resolved = replace(
        load(folder)._resolved, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    plan = warm_up_plan(resolved, max_num_batched_tokens, short=True)
    lens = [len(chunk.token_ids) for chunk in plan.chunks]
    shape = torch.bfloat16, 2, 128
    tiles = choose_config(*shape, num_tokens=sum(lens), longest=max(lens))
    assert tiles != choose_config(*shape)
    assert plan.num_tokens <= max_num_batched_tokens and len(plan.starts) <= max_num_seqs
    assert max(lens) < max_model_len and not plan.has_targets


def test_a_warm_up_of_short_prompts_is_as_large_as_their_tiles_ask_for(folder: Path) -> None:
    """And not as large as any step: that is the other warm-up."""
    resolved = replace(load(folder)._resolved, max_num_seqs=8, max_model_len=4096)
    lens = [len(chunk.token_ids) for chunk in warm_up_plan(resolved, 16_384, short=True).chunks]
    shape = torch.bfloat16, 2, 128
    tiles = choose_config(*shape, num_tokens=sum(lens), longest=max(lens))
    assert tiles != choose_config(*shape) and sum(lens) == 4096
    for missed in (
        {"num_tokens": 4095, "longest": max(lens)},
        {"num_tokens": 4200, "longest": 1025},
    ):
        assert choose_config(*shape, **missed) == choose_config(*shape)
