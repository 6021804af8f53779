"""Penalties, bias, allowed ids, bad words, min_tokens and log probabilities through the whole
engine, on a tiny model in float32: alone, in a crowd, preempted, one step ahead, against
transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.tiny_models import make_tiny_model
from tests.token_grammars import CountingGrammars
from transformers import AutoModelForCausalLM

from millstream.engine import LLM, SamplingParams
from millstream.engine.plan import TokenLogprobs
from millstream.engine.request import GrammarKind, GrammarSpec

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, 256) for _ in range(n)] for n in (1, 3, 5, 8, 17, 33, 40)]
    return [*prompts, prompts[-1][:30], [7, 7, 7, 8, 8, 7, 7]]


PROMPTS = make_prompts()
ENDS = {prompt[-1] for prompt in PROMPTS}
# A request of each kind, plain ones among them; 24 tokens are enough for words to come again.
KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"logit_bias": dict.fromkeys(range(40), 3.0), "logprobs": 3},
    {"top_k": 50},
    {"allowed_token_ids": range(100, 120), "bad_words": [[105], [110, 111], [111, 110, 112]]},
    {"bad_words": [[i, j] for i in range(256) for j in (3, 99, 200)], "presence_penalty": -1.0},
    {"min_tokens": 9, "stop_token_ids": list(range(3, 60)), "logprobs": 0},
    {"prompt_logprobs": 2, "frequency_penalty": 2.0, "repetition_penalty": 0.8},
]


def params_of(temperature: float) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": temperature}
    return [SamplingParams(seed=50 + i, **{**common, **kind}) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, ahead: bool = False, **options: Any) -> LLM:
    llm = LLM(folder, **{"block_size": BLOCK_SIZE, "device": "cpu", **options})
    if ahead:
        core = llm._core
        core.scheduler.info = core.info = replace(core.info, max_in_flight=2)
    return llm


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().kv_blocks_used == 0
    return outputs


def same(got: list[TokenLogprobs | None], wanted: list[TokenLogprobs | None]) -> None:
    """Equal but for rounding, which depends on a batch's shape."""
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "random"])
def alone(
    request: pytest.FixtureRequest, folder: Path
) -> tuple[list[SamplingParams], list[dict[str, Any]]]:
    """Each request by itself."""
    params = params_of(request.param)
    with load(folder, prefix_caching=False) as llm:
        each = zip(PROMPTS, params, strict=True)
        return params, [generate(llm, [prompt], one)[0] for prompt, one in each]


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
@pytest.mark.parametrize("case", ["together", "in chunks", "preempted", "few slots"])
def test_a_request_gets_the_same_alone_and_in_any_crowd(
    folder: Path, alone: tuple[list[SamplingParams], list[dict[str, Any]]], case: str, ahead: bool
) -> None:
    """Plain rows too. Preemption in the middle: penalties, bad words, seeds and log probabilities
    go on, those of prompts do not come twice (rows 45 and 62)."""
    params, wanted = alone
    options: dict[str, dict[str, Any]] = {
        "together": {},
        "in chunks": {"max_num_batched_tokens": 11},
        "preempted": {"kv_cache_bytes": 24 * BLOCK_BYTES, "max_num_batched_tokens": 40},
        "few slots": {"max_num_seqs": 2},
    }
    with load(folder, ahead, **options[case]) as llm:
        outputs = generate(llm, PROMPTS, params)
        assert (llm.stats().num_preemptions > 0) == (case == "preempted")
    for got, want in zip(outputs, wanted, strict=True):
        assert got["token_ids"] == want["token_ids"]
        assert got.keys() == want.keys()
        for field in ("logprobs", "prompt_logprobs"):
            same(got.get(field, []), want.get(field, []))


def test_the_edits_do_something(
    alone: tuple[list[SamplingParams], list[dict[str, Any]]], folder: Path
) -> None:
    params, outputs = alone
    plain = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=each.temperature, seed=each.seed)
        for each in params
    ]
    with load(folder) as llm:
        without = [output["token_ids"] for output in generate(llm, PROMPTS, plain)]
    changed = [got["token_ids"] != other for got, other in zip(outputs, without, strict=True)]
    assert changed[1] and changed[3] and changed[5] and changed[6] and changed[8]
    assert not changed[0]
    penalized = outputs[1]["token_ids"]
    assert len(set(penalized)) > len(set(without[1])) or len(set(penalized)) == 24
    allowed = outputs[5]["token_ids"]
    assert set(allowed) <= set(range(100, 120)) - {105}
    pairs = [tuple(allowed[i : i + 2]) for i in range(23)]
    assert (110, 111) not in pairs
    words = {(word[0], word[1]) for word in KINDS[6]["bad_words"]}
    output = outputs[6]["token_ids"]
    assert not words & {(output[i], output[i + 1]) for i in range(23)}
    early = outputs[7]["token_ids"]
    assert len(early) > 9 and not set(early[:9]) & set(KINDS[7]["stop_token_ids"])


@torch.inference_mode()
def model_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[n - 1, V]: of what follows each token, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(dim=-1)


def check(entry: TokenLogprobs | None, row: torch.Tensor, token_id: int, count: int) -> None:
    assert entry is not None
    assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-3)
    top = row.topk(count)
    assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)
    assert row[entry.top_token_ids].tolist() == pytest.approx(entry.top_logprobs, abs=1e-3)


def test_row_65_log_probabilities_are_transformers_whatever_the_sampling(folder: Path) -> None:
    """Temperature, filters, penalties and masks change which tokens come, not what is said of
    them."""
    params = [
        SamplingParams(max_tokens=12, logprobs=20, ignore_eos=True, seed=i, **kind)
        for i, kind in enumerate(
            [
                {"temperature": 0.0},
                {"temperature": 0.5, "top_p": 0.5},
                {"temperature": 2.0, "repetition_penalty": 1.5, "logit_bias": {5: 50.0}},
                {"temperature": 1.0, "allowed_token_ids": [9, 10]},
            ]
        )
    ]
    with load(folder) as llm:
        outputs = generate(llm, PROMPTS[2:6], params)
    for prompt, output in zip(PROMPTS[2:6], outputs, strict=True):
        token_ids = output["token_ids"]
        assert len(output["logprobs"]) == len(token_ids) == 12
        rows = model_logprobs(folder, prompt + token_ids)[len(prompt) - 1 :]
        for entry, row, token_id in zip(output["logprobs"], rows, token_ids, strict=True):
            check(entry, row, token_id, 20)


@pytest.mark.parametrize("budget", [5, 16, None])
def test_row_67_prompt_log_probabilities_whatever_is_cached(
    folder: Path, budget: int | None
) -> None:
    """33 tokens of B = 16, cold and warm: identical; the second position is the first that has
    any. The third request reads what they left."""
    prompt = PROMPTS[5]
    assert len(prompt) == 33
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5)
    with load(folder, block_size=16, max_num_batched_tokens=budget) as llm:
        first, second = (generate(llm, [prompt], params)[0] for _ in range(2))
        hits = llm.stats().prefix_cache_hits
        generate(llm, [prompt], SamplingParams(max_tokens=1))
        assert hits == 0 and llm.stats().prefix_cache_hits == 32
    assert first == second
    assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == 33
    rows = model_logprobs(folder, prompt)
    for entry, row, token_id in zip(first["prompt_logprobs"][1:], rows, prompt[1:], strict=True):
        check(entry, row, token_id, 5)


def test_a_prompt_of_one_token_has_no_log_probabilities(folder: Path) -> None:
    with load(folder) as llm:
        (output,) = generate(llm, [[5]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert output["prompt_logprobs"] == [None]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"sequence_bias": [[[5], 4.0], [[9], -50.0], [[200], 3.5]]},
        # No word that could begin in a prompt: transformers counts that too.
        {"bad_words_ids": [[i, 29] for i in range(256) if i not in ENDS] + [[200]]},
        {"min_new_tokens": 10, "eos_token_id": list(range(60))},
    ],
    ids=["repetition", "bias", "bad words", "min_tokens"],
)
@torch.inference_mode()
def test_greedy_equals_transformers(folder: Path, options: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    keywords = {"eos_token_id": None, "max_new_tokens": 20, "pad_token_id": 0, **options}
    ours: dict[str, Any] = {
        "repetition_penalty": options.get("repetition_penalty"),
        "logit_bias": {ids[0]: bias for ids, bias in options.get("sequence_bias", [])},
        "bad_words": options.get("bad_words_ids", ()),
        "min_tokens": options.get("min_new_tokens"),
        "stop_token_ids": options.get("eos_token_id", ()),
    }
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **ours)
    with load(folder) as llm:
        outputs = [output["token_ids"] for output in generate(llm, PROMPTS, params)]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = model.generate(torch.tensor([prompt]), do_sample=False, **keywords)
        assert output == want[0, len(prompt) :].tolist()


class _FixedModel:
    """Logits that stay whatever the tokens are."""

    def __init__(self, vocab_size: int, logits: dict[int, float]) -> None:
        self._row = torch.full((vocab_size,), -30.0)
        for token_id, logit in logits.items():
            self._row[token_id] = logit

    def __call__(self, batch: Any, kv_cache: Any) -> torch.Tensor:
        return self.logits(None, batch.sample_rows)

    def hidden(self, batch: Any, kv_cache: Any) -> None:
        return None

    def logits(self, hidden: None, rows: torch.Tensor) -> torch.Tensor:
        return self._row.expand(len(rows), -1).clone()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 5, 5]),
        ({"presence_penalty": 2.0}, [5, 6, 5]),
        ({"frequency_penalty": 2.0}, [5, 6, 5]),
        ({"repetition_penalty": 2.0}, [6, 5, 5]),
    ],
)
def test_row_62_penalties_are_on_the_right_tokens(
    folder: Path, options: dict[str, Any], expected: list[int]
) -> None:
    """Prompt A A A, A slightly above B: presence and frequency count the output alone, repetition
    the prompt too."""
    with load(folder) as llm:
        llm._core._runner._steps.model = _FixedModel(256, {5: 1.0, 6: 0.9})  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=3, temperature=0, **options)
        (output,) = generate(llm, [[5, 5, 5]], params)
    assert output["token_ids"] == expected


def test_row_65_one_meaning(folder: Path) -> None:
    """Logits 2, 1, 0, temperature 0.5, top_p 0.5: log_softmax of the raw ones."""
    with load(folder) as llm:
        llm._core._runner._steps.model = _FixedModel(256, {7: 2.0, 8: 1.0, 9: 0.0})  # type: ignore[attr-defined]
        params = SamplingParams(max_tokens=1, temperature=0.5, top_p=0.5, logprobs=2)
        (output,) = generate(llm, [[5]], params)
    wanted = torch.tensor([2.0, 1.0, 0.0]).log_softmax(0).tolist()
    (entry,) = output["logprobs"]
    assert output["token_ids"] == entry.top_token_ids[:1] == [7]
    assert entry.logprob == pytest.approx(wanted[0], abs=1e-6)
    assert entry.top_logprobs == pytest.approx(wanted[:2], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_63_a_bias_on_every_id_leaves_things_as_they_were(
    folder: Path, temperature: float
) -> None:
    """-100, on every id, with the same seed. A mask on top decides all the same."""
    common: dict[str, Any] = {"max_tokens": 8, "temperature": temperature, "seed": 3}
    bias = dict.fromkeys(range(256), -100.0)
    params = [
        SamplingParams(**common),
        SamplingParams(logit_bias=bias, logprobs=1, **common),
        SamplingParams(logit_bias={**bias, 9: 100.0}, allowed_token_ids=[8], **common),
    ]
    with load(folder) as llm:
        plain, biased, masked = generate(llm, [PROMPTS[3]] * 3, params)
    assert biased["token_ids"] == plain["token_ids"]
    assert all(entry.logprob > -50 for entry in biased["logprobs"])
    assert masked["token_ids"] == [8] * 8


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
def test_a_grammar_is_followed_token_by_token(folder: Path, ahead: bool) -> None:
    """The seam for structured output: a toy that counts up to its end, in three requests beside a
    plain one, preempted or not."""
    spec = GrammarSpec(kind=GrammarKind.REGEX, text="10 18")
    outputs = []
    for blocks in (100, 12):
        with load(folder, ahead, kv_cache_bytes=blocks * BLOCK_BYTES) as llm:
            llm._core._runner._steps.edits._grammars = CountingGrammars()  # type: ignore[attr-defined]
            samples = [
                llm._samples(PROMPTS[i], SamplingParams(max_tokens=12, seed=i, temperature=1.0))[0]
                for i in range(4)
            ]
            requests = [
                structs.replace(sample, sampling=structs.replace(sample.sampling, grammar=spec))
                if i
                else sample
                for i, sample in enumerate(samples)
            ]
            llm._submit(requests)
            got = {}
            while not llm.is_finished():
                got.update(dict(llm.step()[0]))
            outputs.append([got[request.key] for request in requests])
    assert outputs[0] == outputs[1]
    for output in outputs[0][1:]:
        assert output[:9] == list(range(10, 19))
