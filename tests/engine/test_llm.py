"""The in-process LLM's surface: nano-vllm's, with honest errors."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizers import BYTE_VOCAB_SIZE, byte_ids, make_byte_tokenizer

from millstream.engine import LLM, SamplingParams
from millstream.engine.core import EngineCore
from millstream.hub.errors import ModelNotFound
from millstream.rpc.errors import InvalidArgument, NeverFits, PromptTooLong, Unsupported

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_num_seqs=8)


def test_importing_the_engine_does_not_import_torch() -> None:
    script = (
        "import sys, millstream.engine; from millstream.engine import SamplingParams; "
        "millstream.engine.LLM; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


def test_unknown_options_are_errors(folder: Path) -> None:
    with pytest.raises(TypeError, match="no option 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=4)
    with pytest.raises(ModelNotFound, match="no such folder"):
        LLM("./no/such/folder")


def test_step_by_step(llm: LLM) -> None:
    assert llm.is_finished()
    keys = [
        llm.add_request([1, 2, 3], GREEDY),
        llm.add_request([4, 5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)),
    ]
    ended: dict[int, list[int]] = {}
    sampled = 0
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        ended.update(outputs)
        sampled += num_tokens
    assert list(ended) == keys[::-1]  # the shorter one ends first
    assert [len(ended[key]) for key in keys] == [6, 2]
    assert sampled == 8
    assert llm.step() == ([], 0)


def test_prompts_and_params_in_their_forms(llm: LLM) -> None:
    (one,) = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)  # a flat list is one prompt
    assert one["text"] == "" and len(one["token_ids"]) == 6
    two = llm.generate([[1, 2, 3], (4, 5)], GREEDY, use_tqdm=False)
    assert two[0] == one
    each = llm.generate(
        [[1, 2, 3], [1, 2, 3]],
        [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)],
        use_tqdm=False,
    )
    assert each[0] == one and each[1]["token_ids"] == one["token_ids"][:3]
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    with pytest.raises(ValueError, match="one a prompt"):
        llm.generate([[1], [2]], [GREEDY])


def test_samples_come_with_the_prompts_result(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    one, three = llm.generate(
        [[1, 2, 3], [4, 5, 6]], [replace(params, n=1), params], use_tqdm=False
    )
    assert set(one) == {"text", "token_ids"}, "nano-vllm's form"
    assert three["token_ids"] == three["samples"][0]["token_ids"]
    assert len({tuple(sample["token_ids"]) for sample in three["samples"]}) == 3
    for i, sample in enumerate(three["samples"]):
        alone = replace(params, n=1, seed=5 + i)
        assert llm.generate([4, 5, 6], alone, use_tqdm=False)[0] == sample
    first = llm.add_request([1, 2], replace(params, n=3))
    after = llm.add_request([1, 2], replace(params, n=1))
    ended: set[int] = set()
    while not llm.is_finished():
        ended |= {key for key, _ in llm.step()[0]}
    assert ended == {first, first + 1, first + 2, after}
    assert after == first + 3


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    """As a request's through gRPC: engine_service/test_generation_config.py."""
    folder = make_tiny_model(tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.0}))
    unset = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
    runs = {}
    for source in ("auto", "none"):
        with LLM(folder, device="cpu", generation_config=source) as llm:
            runs[source] = llm.generate([1, 2, 3], unset, use_tqdm=False)
            greedy = llm.generate([1, 2, 3], replace(unset, temperature=0.0), use_tqdm=False)
            hot = llm.generate([1, 2, 3], replace(unset, temperature=1.0), use_tqdm=False)
    assert runs["auto"] == greedy
    assert runs["none"] == hot != greedy
    file.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ValueError, match=r"generation_config.json: temperature"):
        LLM(folder, device="cpu")


def test_max_tokens_unset_runs_to_the_context_limit(folder: Path) -> None:
    with LLM(folder, device="cpu", max_model_len=20) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True)
        (output,) = llm.generate([1] * 15, params, use_tqdm=False)
        assert len(output["token_ids"]) == 5
        (output,) = llm.generate([1] * 19, params, use_tqdm=False)
        assert len(output["token_ids"]) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], {}, InvalidArgument),
        ([256], {}, InvalidArgument),
        ([1] * 512, {}, PromptTooLong),
        ([1], {"temperature": 3}, InvalidArgument),
        ([1], {"max_tokens": 0}, InvalidArgument),
        ([1], {"max_tokens": -1}, InvalidArgument),
        ([1], {"stop": "x"}, Unsupported),
        ("text", {}, Unsupported),
    ],
)
def test_what_is_refused_is_refused_before_anything_runs(
    llm: LLM, prompt: Any, params: dict[str, Any], error: type[Exception]
) -> None:
    steps = llm.stats().steps
    with pytest.raises(error):
        llm.generate([[1, 2], prompt], [GREEDY, SamplingParams(**params)], use_tqdm=False)
    assert llm.is_finished() and llm.stats().steps == steps


def test_row_5_what_never_fits(folder: Path) -> None:
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    options: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 8 * block_bytes}
    with LLM(folder, device="cpu", max_model_len=64, **options) as llm:
        with pytest.raises(NeverFits):
            llm.generate([1] * 40, GREEDY, use_tqdm=False)
        (output,) = llm.generate([1] * 4, GREEDY, use_tqdm=False)
        assert len(output["token_ids"]) == 6


def test_row_20_the_limit_that_shrank_to_the_cache_is_the_one_that_holds(folder: Path) -> None:
    """4 blocks of 4 tokens: max_model_len is 16, though the pool has room for a 17th token."""
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    with LLM(folder, device="cpu", block_size=4, kv_cache_bytes=4 * block_bytes) as llm:
        for max_tokens in (1, 5):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            for prompt_len in (14, 15, 16, 17):
                if prompt_len < 16:
                    (output,) = llm.generate([1] * prompt_len, params, use_tqdm=False)
                    assert len(output["token_ids"]) == min(max_tokens, 16 - prompt_len)
                else:
                    with pytest.raises(PromptTooLong, match="16 tokens"):
                        llm.generate([1] * prompt_len, params, use_tqdm=False)
                (output,) = llm.generate([1, 2], GREEDY, use_tqdm=False)
                assert len(output["token_ids"]) == 6
        assert llm.stats().kv_blocks_used == 0


def test_row_51_every_way_to_say_no_top_k_in_one_batch(llm: LLM) -> None:
    vocab_size = 256
    top_k = [None, 0, -1, vocab_size, vocab_size + 1, 2**30, 1]
    params = [
        SamplingParams(top_k=k, seed=5, max_tokens=12, ignore_eos=True, temperature=1.5)
        for k in top_k
    ]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    *off, one, argmax = llm.generate([[1, 2, 3]] * 8, [*params, greedy], use_tqdm=False)
    assert all(output == off[0] for output in off)
    assert one == argmax != off[0]


def test_an_interrupted_generate_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = EngineCore.step, []

    def interrupted(core: EngineCore) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(core)

    monkeypatch.setattr(EngineCore, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    assert llm.is_finished()
    assert llm.stats().kv_blocks_used == llm.stats().num_requests_running == 0
    assert len(llm.generate([1, 2], GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_ctrl_c_in_the_middle_of_a_step(
    llm: LLM, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts between steps: the engine is idle afterwards, and the next call works."""
    expected = llm.generate([1, 2], GREEDY, use_tqdm=False)
    runner = llm._core._runner
    launch, calls = runner.launch, itertools.count()

    def interrupted(plan: Any) -> None:
        if next(calls) == nth:
            signal.raise_signal(signal.SIGINT)
        launch(plan)

    monkeypatch.setattr(runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    assert llm.is_finished()
    assert llm.stats().kv_blocks_used == llm.stats().num_requests_running == 0
    assert llm.generate([1, 2], GREEDY, use_tqdm=False) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "prompts", [None, 3, {"a": 1}, b"ab", [True], [1.0], [-1], [2**32], [1, "a"], [None], "\ud800"]
)
def test_a_wrong_prompt_is_named(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_closed_is_closed() -> None:
    llm = LLM(runner="instant")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", ["x", 3, {"temperature": 0}, [3]])
def test_wrong_sampling_params_are_named(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampling_params: "):
        llm.generate([1, 2], params, use_tqdm=False)


def test_generate_does_not_mix_with_pending_requests(llm: LLM) -> None:
    llm.add_request([1], GREEDY)
    with pytest.raises(RuntimeError, match="pending"):
        llm.generate([1], GREEDY)
    while not llm.is_finished():
        llm.step()


def test_text_in_and_out(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, vocab_size=BYTE_VOCAB_SIZE)
    make_byte_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as llm:
        text, ids = llm.generate(["héllo", byte_ids("héllo")], GREEDY, use_tqdm=False)
        assert text["token_ids"] == ids["token_ids"] and text["text"] == ids["text"]
        assert text["text"]
        # The stop token is among the ids, and in the text only if asked for.
        stop = {"temperature": 0, "stop_token_ids": text["token_ids"][-1:], "ignore_eos": True}
        without, with_stop = llm.generate(
            ["héllo"] * 2,
            [SamplingParams(**stop), SamplingParams(**stop, include_stop=True)],
            use_tqdm=False,
        )
    assert without["token_ids"] == with_stop["token_ids"]
    assert with_stop["text"].startswith(without["text"])
    assert len(with_stop["text"]) > len(without["text"])


@pytest.mark.slow
def test_the_default_model(default_model_dir: Path) -> None:
    """Greedy on the real weights; the chat template's text is the tokenizer's business."""
    with LLM(default_model_dir, device="cpu", max_model_len=256) as llm:
        prompt = (
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        (output,) = llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
        )
    assert "Paris" in output["text"]


def test_llm_takes_the_runner_that_the_options_name() -> None:
    with LLM(runner="instant") as llm:
        (output,) = llm.generate([7], SamplingParams(max_tokens=3), use_tqdm=False)
    assert output == {"text": "", "token_ids": [8, 9, 10]}
