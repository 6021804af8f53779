"""Ranks that hold a part of the model each compute what one does: as threads, with gloo between.

Processes are tests/engine/ranks/test_ranks.py's matter.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.threaded_ranks import ThreadedRanks
from tests.tiny_models import make_tiny_model

from millstream.engine import LLM, SamplingParams
from millstream.engine.backends.torch_ops import TorchOps
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.hardware import LoadError
from millstream.engine.model_files.model_config import load_model_config
from millstream.engine.model_files.shapes import named_shape
from millstream.engine.models import build_model
from millstream.engine.parallel import share_of, vocab_spans
from millstream.engine.request import FinishReason, Request, Sampling
from millstream.engine.sampling import vocab_block
from millstream.engine.weights import WeightError, init_dummy_weights

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # of the tiny model, all of its KV heads
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "odd vocabulary": {"family": "qwen3", "vocab_size": 1003},  # sampled in blocks of 32
    "odd and tied": {"family": "llama", "vocab_size": 233, "tie_word_embeddings": True},
    "dynamic": {
        "family": "llama",
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 230) for _ in range(n)] for n in (1, 2, 4, 5, 8, 17, 33, 60)]
    shared = prompts[-1]
    return [*prompts, shared[:40], [*shared[:50], 9, 9, 9]]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(root / name.replace(" ", "_"), **options)
        for name, options in MODELS.items()
    }


def generate(
    folder: Path, ranks: int, params: SamplingParams | list[SamplingParams], **options: Any
) -> tuple[list[list[int]], Any]:
    """The outputs' token ids, and the engine's counters."""
    options = {"block_size": BLOCK_SIZE, "device": "cpu", **options}
    runner = "model" if ranks == 1 else "tests.threaded_ranks:create"
    with LLM(folder, tensor_parallel_size=ranks, runner=runner, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.kv_blocks_used == stats.num_requests_running == stats.num_requests_waiting == 0
    return [output["token_ids"] for output in outputs], stats


@pytest.mark.parametrize("model", MODELS)
def test_greedy_equals_one_rank(folders: dict[str, Path], model: str) -> None:
    """Chunked, with prefixes shared; every output differs from the others."""
    expected, _ = generate(folders[model], 1, GREEDY)
    assert len({tuple(output) for output in expected}) > len(PROMPTS) // 2
    outputs, stats = generate(folders[model], 2, GREEDY, max_num_batched_tokens=20)
    assert outputs == expected
    assert (stats.prefix_cache_hits > 0) == (model != "dynamic")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 4), (9, 3, 3), (6, 6, 3)])
def test_row_56_heads(tmp_path: Path, family: str, heads: int, kv_heads: int, ranks: int) -> None:
    """Fewer KV heads than ranks: each is on several."""
    folder = make_tiny_model(
        tmp_path,
        family,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=8 * heads,
    )
    expected, _ = generate(folder, 1, GREEDY)
    assert generate(folder, ranks, GREEDY)[0] == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_row_43_preemption(folders: dict[str, Path], prefix_caching: bool) -> None:
    """A sequence that resumes is recomputed on all ranks, or its next token is of garbage."""
    expected, _ = generate(folders["qwen3"], 1, GREEDY)
    outputs, stats = generate(
        folders["qwen3"],
        2,
        GREEDY,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=30,
        kv_cache_bytes=24 * BLOCK_BYTES // 2,  # a rank has one of the two KV heads
    )
    assert stats.num_preemptions > 0 and outputs == expected


def test_prefix_hits_of_earlier_requests(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": "cpu"}
    expected, _ = generate(folders["llama"], 1, GREEDY)
    runner = "tests.threaded_ranks:create"
    with LLM(folders["llama"], tensor_parallel_size=2, runner=runner, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
        assert llm.stats().prefix_cache_hits > sum(map(len, PROMPTS)) // 2


def sampled(**filters: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=100 + i, max_tokens=16, ignore_eos=True, **filters)
        for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.05}],
    ids=str,
)
def test_seeded_sampling_equals_one_rank(folders: dict[str, Path], filters: dict[str, Any]) -> None:
    """Without filters from three numbers a row, with them from whole rows."""
    model = folders["odd vocabulary"]
    expected, _ = generate(model, 1, sampled(**filters))
    assert generate(model, 2, sampled(**filters))[0] == expected


def test_rows_of_all_kinds_in_one_batch(folders: dict[str, Path]) -> None:
    """min_tokens with an EOS id that would come early, greedy, plain, filtered."""
    model = folders["odd vocabulary"]
    plain, _ = generate(model, 1, GREEDY)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"temperature": 0, "min_tokens": 9, "stop_token_ids": [output[3] for output in plain]},
    ]
    params = [
        SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(PROMPTS))
    ]
    expected, _ = generate(model, 1, params)
    assert min(map(len, expected)) >= 9
    assert generate(model, 2, params)[0] == expected


def test_edited_and_scored_rows_equal_one_rank(folders: dict[str, Path]) -> None:
    """Rank 0 edits and scores whole rows; logits of prompts are gathered piece by piece."""
    model = folders["odd vocabulary"]
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.7},
        {"logit_bias": {250: 3.0, 3: 3.0}, "logprobs": 3, "prompt_logprobs": 3},
        {"bad_words": [[i, 9] for i in range(1003)], "allowed_token_ids": range(5, 1003, 7)},
    ]
    params = [
        SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(PROMPTS))
    ]
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": "cpu"}
    results = []
    for ranks, runner in ((1, "model"), (2, "tests.threaded_ranks:create")):
        options["max_num_batched_tokens"] = 20
        with LLM(model, tensor_parallel_size=ranks, runner=runner, **options) as llm:
            results.append(llm.generate(PROMPTS, params, use_tqdm=False))
    for one, other in zip(*results, strict=True):
        assert one["token_ids"] == other["token_ids"] and one.keys() == other.keys()
        for field in ("logprobs", "prompt_logprobs"):
            for entry, same in zip(one.get(field, []), other.get(field, []), strict=True):
                if entry is None:
                    assert same is None
                else:
                    assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
                    assert entry.top_logprobs == pytest.approx(same.top_logprobs, abs=1e-4)


def test_greedy_and_plain_rows_are_not_gathered(folders: dict[str, Path]) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, max_num_seqs=4)
    runner = ThreadedRanks(config, folders["qwen3"])
    core = EngineCore(runner, prefix_caching=True)
    steps = []
    for key, options in enumerate([{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}]):
        sampling = Sampling(max_tokens=5, ignore_eos=True, **options)  # type: ignore[arg-type]
        core.submit(Request(key=key, token_ids=[5, 6, 7], sampling=sampling))
        while core.has_work:
            core.step()
        steps.append(runner.num_whole)
    core.close()
    assert steps == [0, 0, 5]


def test_cancels_at_any_time_leave_the_others_right(folders: dict[str, Path]) -> None:
    expected, _ = generate(folders["llama"], 1, GREEDY)
    config = EngineConfig(
        device="cpu", tensor_parallel_size=2, block_size=BLOCK_SIZE, max_num_batched_tokens=16
    )
    core = EngineCore(ThreadedRanks(config, folders["llama"]), prefix_caching=True)
    rng = random.Random(3)
    outputs: dict[int, list[int]] = {}
    keys = itertools.count(1000)  # of requests that are cancelled
    live: list[int] = []
    for key, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
        core.submit(Request(key=key, token_ids=prompt, sampling=sampling))
    while core.has_work:
        if rng.random() < 0.3 and len(live) < 20:
            live.append(next(keys))
            prompt = [rng.randrange(230) for _ in range(rng.randint(1, 40))]
            sampling = Sampling(max_tokens=50, temperature=1.0, seed=live[-1], ignore_eos=True)
            core.submit(Request(key=live[-1], token_ids=prompt, sampling=sampling))
        if live and rng.random() < 0.3:
            core.finish([live.pop(rng.randrange(len(live)))], FinishReason.CANCELLED)
        record = core.step()
        for key, token_id in zip(record.keys, record.token_ids, strict=True):
            outputs.setdefault(key, []).append(token_id)
    core.close()
    assert [outputs[key] for key in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_row_55_tied_embeddings(tmp_path: Path, tied: bool, in_file: bool) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=tied)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert ("lm_head.weight" in tensors) != tied
    if tied and in_file:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif not tied and not in_file:
        del tensors["lm_head.weight"]
    save_file(tensors, path)
    if not tied and not in_file:
        with pytest.raises(WeightError, match=r"lm_head.weight \(tie_word_embeddings is false\)"):
            generate(folder, 1, GREEDY)
        return
    assert generate(folder, 2, GREEDY)[0] == generate(folder, 1, GREEDY)[0]


def test_a_tied_head_that_differs_counts_on_every_rank(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    head[200:] = head[200:].flip(0)  # in the second rank's part alone
    save_file({**tensors, "lm_head.weight": head}, path)
    assert generate(folder, 2, GREEDY)[0] == generate(folder, 1, GREEDY)[0]


@pytest.mark.parametrize(
    ("options", "ranks", "says"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
            2,
            r"9 attention heads \(num_attention_heads\) cannot be split over 2 ranks",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
            2,
            r"3 key and value heads \(num_key_value_heads\) can neither be split over 2 ranks nor",
        ),
        ({"intermediate_size": 97}, 2, r"97 columns of the MLP \(intermediate_size\)"),
        (
            {"vocab_size": 40, "num_attention_heads": 8, "intermediate_size": 96},
            8,
            r"a vocabulary of 40 \(vocab_size\) is too small for 8 ranks",
        ),
    ],
)
def test_row_56_impossible_splits(
    tmp_path: Path, options: dict[str, Any], ranks: int, says: str
) -> None:
    config = load_model_config(make_tiny_model(tmp_path, "llama", **options))
    for rank in range(ranks):
        with pytest.raises(LoadError, match=rf"^tensor_parallel_size: {says}"):
            share_of(config, rank, ranks)


@pytest.mark.parametrize(("vocab_size", "ranks"), [(251, 2), (1003, 3), (151_936, 8), (49_152, 7)])
def test_the_vocabulary_is_cut_into_all_of_it(vocab_size: int, ranks: int) -> None:
    spans = vocab_spans(vocab_size, ranks)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert (spans[0].start, spans[-1].stop) == (0, vocab_size)
    assert not any(span.start % vocab_block(vocab_size) for span in spans)
    lengths = [span.length for span in spans]
    assert max(lengths) - min(lengths) < 2 * vocab_block(vocab_size)


class Alone:
    """Rank `rank` of a group that nobody joins."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("shape", ["smollm2-135m", "llama-3.2-1b"])
def test_a_rank_holds_its_part_alone(shape: str) -> None:
    config = named_shape(shape)
    assert config is not None
    ranks = 3 if shape.startswith("smollm2") else 4
    with torch.device("meta"):
        counts = []
        for group in (None, *(Alone(rank, ranks) for rank in range(ranks))):
            model = build_model(
                config,
                dtype=torch.bfloat16,
                device=torch.device("meta"),
                max_model_len=8,
                ops=TorchOps(config),
                group=group,  # type: ignore[arg-type]
            )
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sum(counts[1:]) < 1.01 * counts[0]  # only the norms are everywhere
    assert max(counts[1:]) < 1.01 * counts[0] / ranks


def test_dummy_weights_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_model(tmp_path, attention_bias=True, vocab_size=251))

    def parts(rank: int, ranks: int) -> dict[str, torch.Tensor]:
        model = build_model(
            config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=8,
            ops=TorchOps(config),
            group=None if ranks == 1 else Alone(rank, ranks),  # type: ignore[arg-type]
        )
        model.pack = lambda: None  # type: ignore[method-assign]
        init_dummy_weights(model, 5)
        return dict(model.named_parameters())

    whole = parts(0, 1)
    halves = [parts(rank, 2) for rank in range(2)]
    layer = "model.layers.1"
    for name, dim in (
        ("lm_head.weight", 0),
        (f"{layer}.self_attn.o_proj.weight", 1),
        (f"{layer}.mlp.down_proj.weight", 1),
    ):
        assert torch.equal(whole[name], torch.cat([half[name] for half in halves], dim=dim))
    gates = whole[f"{layer}.mlp.gate_up_proj.weight"].chunk(4)
    assert torch.equal(
        torch.cat((gates[1], gates[3])), halves[1][f"{layer}.mlp.gate_up_proj.weight"]
    )
