"""The engine on its Triton kernels: in the interpreter on a CPU, natively under -m gpu."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tiny_models import make_tiny_model
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.engine.backends.triton_ops import TritonOps
from millstream.engine.chunk_graphs import ChunkGraphs, decode_sizes, token_sizes
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.graphs import DecodeGraphs, Kind, batch_sizes, stand_ins
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.shapes import named_shape
from millstream.engine.plan import Chunk, Plan, SlotStart
from millstream.engine.request import Request, Sampling
from millstream.engine.runner import ModelRunner, create
from millstream.kernels import linear_configs
from millstream.kernels.linear_configs import Config, Tile

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9] * 17, list(range(3, 40)), [100], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def load(folder: Path, **options: Any) -> ModelRunner:
    options = {"device": "cpu", "block_size": 16, "max_num_seqs": 6, **options}
    options.setdefault("kv_cache_bytes", 1 << 22)
    return create(EngineConfig(**options), folder)


def run(
    runner: ModelRunner, prompts: list[list[int]], sampling: Sampling | list[Sampling]
) -> list[list[int]]:
    """Outputs, through an EngineCore."""
    core = EngineCore(runner, prefix_caching=True)
    outputs: list[list[int]] = [[] for _ in prompts]
    for key, prompt in enumerate(prompts):
        each = sampling[key] if isinstance(sampling, list) else sampling
        core.submit(Request(key=key, token_ids=prompt, sampling=each))
    while core.has_work:
        record = core.step()
        for key, token_id in zip(record.keys, record.token_ids, strict=True):
            outputs[key].append(token_id)
    return outputs


class FakeGraph:
    """Computes when it is replayed."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        step()  # as when a graph is recorded
        self.step = step
        self.output = torch.empty(0)
        self.replays = 0

    def replay(self) -> None:
        self.output = self.step()
        self.replays += 1

    def micros(self) -> int:
        self.replay()
        return 1


def add_fake_graphs(runner: ModelRunner) -> DecodeGraphs:
    with torch.inference_mode():
        runner._steps.graphs = DecodeGraphs(
            runner._steps.decode,
            FakeGraph,
            sizes=runner._resolved.batch_sizes,
            kernels_of=runner._steps._ops.on_slots.kernels_of,
            padding_slot=runner._steps.slots.padding_slot,
            device=CPU,
        )
    return runner._steps.graphs


def add_fake_chunk_graphs(runner: ModelRunner, max_tokens: int = 64) -> ChunkGraphs:
    runner._steps.chunk_graphs = ChunkGraphs(
        runner._steps.chunks,
        FakeGraph,
        max_tokens=max_tokens,
        max_chunks=4,
        max_decodes=runner._resolved.max_num_seqs,
        padding_slot=runner._steps.slots.padding_slot,
        device=CPU,
    )
    return runner._steps.chunk_graphs


GREEDY = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [None, 10])
def test_triton_gives_torchs_tokens(family: str, budget: int | None, tmp_path: Path) -> None:
    """Chunks, decodes and both in one step."""
    model_dir = make_tiny_model(tmp_path, family, seed=3, num_hidden_layers=1)
    expected = run(load(model_dir, max_num_batched_tokens=budget), PROMPTS, GREEDY)
    triton = load(model_dir, attention_backend="triton", max_num_batched_tokens=budget)
    assert run(triton, PROMPTS, GREEDY) == expected


def test_seeded_sampling_is_torchs(folder: Path) -> None:
    """Greedy and random rows by slot in the kernel; as soon as one has a filter, all by torch."""
    samplings = [
        Sampling(max_tokens=4 + i, temperature=0.7 * (i % 3), seed=i, ignore_eos=True)
        for i in range(4)
    ]
    samplings.append(Sampling(max_tokens=3, temperature=1.0, top_k=20, seed=9, ignore_eos=True))
    expected = run(load(folder), PROMPTS, samplings)
    triton = load(folder, attention_backend="triton")
    assert run(triton, PROMPTS, samplings) == expected
    add_fake_graphs(triton)
    assert run(triton, PROMPTS, samplings) == expected


def test_edited_batches_are_torchs_and_end_in_graphs_of_their_own(folder: Path) -> None:
    """Steps with chunks, then graphs that end with the logits while some row is edited or scored,
    then plain graphs: rows without edits get the same tokens throughout, padded or not."""
    common: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0}
    samplings = [
        Sampling(max_tokens=5, seed=1, presence_penalty=1.0, repetition_penalty=1.3, **common),
        Sampling(max_tokens=9, seed=2, **common),
        Sampling(max_tokens=5, seed=3, bad_words=tuple((i, 9) for i in range(256)), **common),
        Sampling(max_tokens=6, seed=4, allowed_token_ids=(7, 8, 9), logprobs=2, **common),
        Sampling(max_tokens=4, seed=5, logit_bias=((5, 4.0),), top_k=30, **common),
    ]
    expected = run(load(folder), PROMPTS, samplings)
    assert set(expected[3]) <= {7, 8, 9}
    triton = load(folder, attention_backend="triton")
    assert run(triton, PROMPTS, samplings) == expected
    graphs = add_fake_graphs(triton)
    assert run(triton, PROMPTS, samplings) == expected
    kinds = {kind for _, kind in graphs._graphs}
    assert {Kind.LOGITS, Kind.PLAIN} <= kinds
    assert triton._steps._logits is not None and len(triton._steps._logits) == 6
    alone = run(load(folder), PROMPTS[1:2], samplings[1:2])
    assert expected[1] == alone[0]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5])
def test_row_40_every_batch_size_is_served(folder: Path, max_num_seqs: int) -> None:
    """From the largest batch down to one, by graphs of 1, 2, 4 and the largest."""
    samplings = [
        Sampling(max_tokens=2 + i, temperature=0.0, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    expected = run(load(folder), PROMPTS, samplings)
    triton = load(folder, attention_backend="triton", max_num_seqs=max_num_seqs)
    graphs = add_fake_graphs(triton)
    assert run(triton, PROMPTS, samplings) == expected
    assert sum(graph.replays for graph in graphs._graphs.values()) >= 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("largest", [1, 2, 3, 17, 20, 33, 250, 256, 300, 1024])
def test_row_40_the_largest_batch_has_a_size(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes)) and sizes[0] == 1
    for batch in range(1, largest + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch < (2 if batch <= 4 else 8 if batch <= 256 else 16)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-14b", "llama-3.2-1b"])
def test_sizes_that_stand_in_for_each_other_launch_the_same_kernels(
    model: str, invariant: bool
) -> None:
    """Products as many tiles of one configuration, attention with one."""
    config, sizes = named_shape(model), batch_sizes(1024)
    assert config is not None
    ops = TritonOps(
        config,
        batch_sizes=sizes,
        block_size=64,
        max_model_len=4096,
        dtype=torch.bfloat16,
        device=CPU,
        invariant=invariant,
    )
    launched = {size: launches(ops, config, size) for size in sizes}
    for size in sizes:
        for other in stand_ins(size, sizes, ops.kernels_of):
            assert launched[other] == launched[size], (size, other)
    assert len({*launched.values()}) > 2


def launches(ops: TritonOps, config: ModelConfig, size: int) -> tuple[Any, ...]:
    """Configurations of a decode step's kernels, None where cuBLAS multiplies, and tiles of M."""
    found: list[Config | None] = []
    for weight in (*config.layer_products.values(), (config.vocab_size, config.hidden_size)):
        layer: Any = SimpleNamespace(weight=torch.empty(weight, device="meta"), bias=None)
        x = torch.empty(size, weight[1], dtype=torch.bfloat16, device="meta")
        found += ops.products.config_for(x, layer), ops.products.heads_tile(x, layer)
    attention = ops.decode_for(size)
    ops._decodes.clear()  # its workspaces
    tiles = [-(-size // each.block_m) if isinstance(each, Tile) else 0 for each in found]
    return *found, *tiles, attention.config


def test_row_42_padding_rows_touch_nothing_but_scratch(folder: Path) -> None:
    """A batch of 3 in a graph of 6, the cache full of NaN: 50 steps write the sequences' own tokens
    and the scratch block; the padding slot stays at position 0."""
    runner = load(folder, attention_backend="triton")
    graphs = add_fake_graphs(runner)
    prompts = PROMPTS[:3]
    sampling = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)
    expected = run(load(folder), prompts, sampling)
    with torch.inference_mode():
        runner._steps.kv_cache.data.fill_(float("nan"))
    assert run(runner, prompts, sampling) == expected
    assert [*graphs._graphs] == [(6, Kind.PLAIN)]
    written = runner._steps.kv_cache.data.isfinite().flatten(2, 3).all(-1).all(-1)
    per_block = written.all(0).all(0).view(-1, 16).sum(1).tolist()
    assert written.any(0).any(0).sum() == sum(per_block), "a token has both key and value"
    assert per_block[0] == 1, "the padding slot is at position 0 of the scratch block"
    assert sum(per_block[1:]) == sum(len(prompt) + 50 - 1 for prompt in prompts)
    padding = runner._steps.slots.padding_slot
    assert runner._steps.slots._computed[padding] == runner._steps.slots._last_tokens[padding] == 0
    assert not runner._steps.slots._block_tables[padding].any()


@pytest.mark.parametrize("budget", [20, 4])
def test_chunks_in_graphs_give_the_same_tokens(folder: Path, budget: int) -> None:
    """Prompts in chunks beside decodes, greedy and seeded; as many tokens as chunks, too."""
    prompts = [[5, 6, 7], list(range(3, 30))]
    samplings = [
        Sampling(max_tokens=2, temperature=0.6 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options = {"max_num_batched_tokens": budget, "attention_backend": "triton", "max_num_seqs": 2}
    runner = load(folder, **options)
    expected = run(runner, prompts, samplings)
    graphs = add_fake_chunk_graphs(runner, budget)
    run(runner, [[1, *prompt] for prompt in prompts], samplings)  # other slots, other blocks
    assert run(runner, prompts, samplings) == expected
    assert sum(graph.replays for _, graph in graphs._graphs.values()) > 1  # type: ignore[attr-defined]


def test_row_42_padding_of_chunks_touches_nothing_but_scratch(folder: Path) -> None:
    """As with decodes: the cache full of NaN, three prompts in a bucket for 31."""
    runner = load(folder, attention_backend="triton")
    add_fake_graphs(runner)
    graphs = add_fake_chunk_graphs(runner)
    prompts, sampling = PROMPTS[:3], Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    expected = run(load(folder), prompts, sampling)
    with torch.inference_mode():
        graphs.record_largest()
        bucket = next(key for key, _ in graphs._graphs)
        graphs.choose = lambda host: bucket if len(host.plan.chunks) else None  # type: ignore[method-assign]
        runner._steps.kv_cache.data.fill_(float("nan"))
    assert run(runner, prompts, sampling) == expected
    written = runner._steps.kv_cache.data.isfinite().flatten(2, 3).all(-1).all(-1)
    per_block = written.all(0).all(0).view(-1, 16).sum(1).tolist()
    assert per_block[0] == 1, "the padding slot is at position 0 of the scratch block"
    assert sum(per_block[1:]) == sum(len(prompt) + 3 - 1 for prompt in prompts)
    padding = runner._steps.slots.padding_slot
    assert runner._steps.slots._computed[padding] == runner._steps.slots._last_tokens[padding] == 0


@pytest.mark.parametrize("largest", [64, 65, 100, 2048, 8192, 9000])
def test_a_bucket_wastes_a_quarter_at_most(largest: int) -> None:
    sizes = token_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes))
    for smaller, size in itertools.pairwise(sizes):
        assert size <= 1.25 * smaller
    assert decode_sizes(8) == [0, 8] and decode_sizes(256) == [0, 16, 64, 256]


def test_a_steady_batch_writes_the_graphs_input_once(folder: Path) -> None:
    runner = load(folder, attention_backend="triton")
    graphs = add_fake_graphs(runner)
    layouts = []
    call = graphs.__call__

    def spy(layout: Any, kind: Kind) -> torch.Tensor:
        layouts.append(layout)
        return call(layout, kind)

    runner._steps.graphs = spy  # type: ignore[assignment]
    run(runner, PROMPTS[:2], GREEDY)
    assert len(layouts) == 4 and len(set(map(id, layouts))) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_few_rows_of_float16_take_the_gemm_kernels(family: str, tmp_path: Path) -> None:
    """A decode of one sequence: logits of both ops, rounding apart. (The interpreter multiplies no
    bfloat16 matrices.)"""
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    make_tiny_model(tmp_path, family, dtype=torch.float16, **shape, **heads)
    logits = {name: logits_of_two_steps(load_float16(tmp_path, name)) for name in BACKENDS}
    assert (logits["triton"] - logits["torch"]).abs().max() < 0.05 * logits["torch"].std()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_products_in_tiles_hand_on_the_squares_of_rows(
    family: str, options: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for several rows, with norms that are part of the products, and what is done with
    the heads as a part of QKV's; the products of layers with a bias are cuBLAS's, their weights
    have the norms in them all the same."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tile = Tile(block_m=16, block_n=16, block_k=32, stages=3)
    products = [(256, 64), (64, 128)]  # qkv and gate_up; o and down
    monkeypatch.setattr(linear_configs, "_MEASURED", dict.fromkeys(products, ((64, tile),)))
    heads_tile = Tile(block_m=16, block_n=32, block_k=32, stages=3)
    monkeypatch.setattr(linear_configs, "_HEADS", {(256, 64): ((64, heads_tile),)})
    make_tiny_model(tmp_path, family, dtype=torch.float16, **shape, **heads, **options)
    logits = {}
    for name in BACKENDS:
        runner = load_float16(tmp_path, name)
        layers = runner._steps.model.model.layers
        assert all(layer.post_attention_layernorm.folded == (name == "triton") for layer in layers)
        logits[name] = logits_of_two_steps(runner)
    assert (logits["triton"] - logits["torch"]).abs().max() < 0.02 * logits["torch"].std()


@pytest.mark.parametrize(
    ("options", "folded"),
    [
        ({"dtype": "float16"}, True),
        ({"dtype": "float16", "batch_invariant": True}, False),
        ({"dtype": "float32"}, False),
    ],
    ids=str,
)
def test_norms_are_folded_where_squares_are_handed_on(
    options: dict[str, Any], folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a token's values are the same bits in any batch: another tile sums up squares in
    another order. The final norm stays: what is behind it may be the embedding."""
    tile = Tile(block_m=16, block_n=16, block_k=32, stages=3)
    monkeypatch.setattr(linear_configs, "_MEASURED", {(256, 64): ((64, tile),)})
    make_tiny_model(tmp_path, intermediate_size=128)
    model = load(tmp_path, attention_backend="triton", **options)._steps.model.model
    norms = [norm for layer in model.layers for norm in norms_of(layer)]
    assert [norm.folded for norm in norms] == [folded] * 4
    assert [bool((norm.weight == 1).all()) for norm in norms] == [folded] * 4
    assert not model.norm.folded and not bool((model.norm.weight == 1).all())


def test_a_gpu_without_a_copy_engine_loads_no_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Hopper loops over boxes would wait for each: cuBLAS multiplies, norms are apart."""
    tile = Tile(block_m=16, block_n=16, block_k=32, stages=3)
    products = [(256, 64), (64, 128)]
    monkeypatch.setattr(linear_configs, "_MEASURED", dict.fromkeys(products, ((64, tile),)))
    monkeypatch.setattr(linear_configs, "_HEADS", {(256, 64): ((64, tile),)})
    monkeypatch.setattr("millstream.kernels.boxes.are_copied", lambda device: False)
    monkeypatch.setattr(TensorDescriptor, "from_tensor", lambda *_: pytest.fail("a box"))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    make_tiny_model(tmp_path, intermediate_size=128, **heads)
    torchs, tritons = (load_float16(tmp_path, name) for name in BACKENDS)
    assert not tritons._steps.model.model.layers[0].input_layernorm.folded
    expected, logits = logits_of_two_steps(torchs), logits_of_two_steps(tritons)
    assert (logits - expected).abs().max() < 0.02 * expected.std()


def norms_of(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


BACKENDS = ("torch", "triton")


def load_float16(folder: Path, backend: str) -> ModelRunner:
    return load(folder, dtype="float16", attention_backend=backend)


def logits_of_two_steps(runner: ModelRunner) -> torch.Tensor:
    """Of a prompt's last token and the token after it."""
    table = runner._steps.slots
    starts = (
        SlotStart(
            slot=2,
            sampling=GREEDY,
            min_position=0,
            banned_token_ids=(),
            num_computed_tokens=0,
            block_ids=(3, 5),
        ),
    )
    chunk = Chunk(slot=2, start=0, token_ids=tuple(range(3, 23)), samples=True)
    with torch.inference_mode():
        layout = table.apply(Plan(step=1, starts=starts, chunks=(chunk,)))
        batch = table.batch(layout)
        first = runner._steps.model(batch, runner._steps.kv_cache)
        table.advance(batch, layout.sample_slots, torch.tensor([77]))
        table.note_advance(layout)
        batch = table.batch(table.apply(Plan(step=2, decode_slots=(2,))))
        return torch.cat((first, runner._steps.model(batch, runner._steps.kv_cache))).float()
