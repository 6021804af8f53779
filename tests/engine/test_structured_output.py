"""Structured output in the engine: batches, preemption, what wins over what, how it ends."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tests.compiling_threads import watch_compiling
from tests.structured_schemas import ORDER, ORDER_MAX_TOKENS
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizers import (
    BYTE_VOCAB_SIZE,
    ENDOFTEXT_ID,
    IM_END_ID,
    byte_ids,
    make_byte_tokenizer,
)
from tests.toy_runner import toy_info, toy_request

from millstream.engine import LLM, SamplingParams
from millstream.engine.grammars import compiled
from millstream.engine.grammars.errors import GrammarError
from millstream.engine.grammars.grammar import GrammarState, MaskRow
from millstream.engine.plan import Plan, StepResult
from millstream.engine.request import FinishReason, GrammarKind, GrammarSpec, Sampling
from millstream.engine.scheduler import Scheduler
from millstream.rpc.errors import EngineFault, InvalidArgument, NoTokenizer, QueueFull

EOS = [ENDOFTEXT_ID, IM_END_ID]
VOCAB_SIZE = BYTE_VOCAB_SIZE + 12  # padded past the tokenizer
BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, K and V, tokens, KV heads, head_dim, float
PROMPT = byte_ids("an order: ")
KINDS: tuple[dict[str, Any], ...] = (
    {"json_schema": ORDER},
    {"json_schema": {"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 4}},
    {"regex": r"[a-c]{5,12}|日+x"},
    {"choice": ["tea", "teapot", "te", "日本茶"]},
    {"grammar": 'root ::= "(" root ")" | [xyz]{1,5}'},
    {},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured")
    make_tiny_model(path, vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=EOS)
    return make_byte_tokenizer(path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=16, block_size=BLOCK_SIZE) as loaded:
        yield loaded


def one(llm: LLM, prompt: list[int] = PROMPT, **params: Any) -> dict[str, Any]:
    return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]


def crowd(seed: int, count: int, most_tokens: int = ORDER_MAX_TOKENS) -> list[SamplingParams]:
    """Requests of all kinds, some equal but for their seed."""
    rng = random.Random(seed)
    return [
        SamplingParams(
            temperature=rng.uniform(0.1, 2),
            seed=rng.getrandbits(32),
            max_tokens=most_tokens if kind else 40,
            top_k=rng.choice([0, 0, 20]),
            **kind,
        )
        for kind in rng.choices(KINDS, k=count)
    ]


def check(output: dict[str, Any], params: SamplingParams) -> None:
    text: str = output["text"]
    if params.json_schema is not None:
        jsonschema.validate(json.loads(text), params.json_schema)
    elif params.regex is not None:
        assert re.fullmatch(params.regex, text)
    elif params.choice is not None:
        assert text in params.choice
    elif params.grammar is not None:
        assert re.fullmatch(r"\(*[xyz]{1,5}\)*", text) and text.count("(") == text.count(")")
    if params.json_schema or params.regex or params.choice or params.grammar:
        assert output["token_ids"][-1] in EOS


# ---- one and many


def test_every_kind_in_one_batch_gives_what_each_gives_alone(llm: LLM) -> None:
    params = crowd(1, 24)
    for name in KIND_NAMES:  # some of each kind, and of none
        assert 0 < sum(getattr(each, name) is not None for each in params) < len(params) / 2
    together = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for output, each in zip(together, params, strict=True):
        check(output, each)
        assert output == one(llm, **_fields(each))


def test_more_grammars_in_one_call_than_are_kept_for_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread compiles none of them, however long it is since they were prepared."""
    threads = watch_compiling(monkeypatch)
    params = [SamplingParams(regex=f"[xy]z{{{i}}}", max_tokens=2) for i in range(1, 151)]
    outputs = llm.generate([PROMPT] * 150, params, use_tqdm=False)
    assert all(re.fullmatch("[xy]z", output["text"]) for output in outputs)
    assert threads == {"grammars"}
    assert not llm._core._prepared and not llm._core._followed


def test_grammars_for_which_there_is_no_room_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As through the service: they are not bad, and fit one after another."""
    params = [SamplingParams(regex=f"[xy]z{{{i}}}", max_tokens=1) for i in range(1500, 1520)]
    spec = GrammarSpec(kind=GrammarKind.REGEX, text=str(params[0].regex))
    size = llm._core.prepare_grammar(spec).result().kept_bytes
    llm._core.forget_grammar(spec)
    monkeypatch.setattr(compiled, "_MAX_BYTES", 4 * size)
    with pytest.raises(QueueFull, match="together already") as refused:
        llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert refused.value.field == "sampling.regex"
    assert not llm._core._followed
    for each in params:
        llm.generate([PROMPT], each, use_tqdm=False)


def test_n_samples_follow_one_grammar(llm: LLM) -> None:
    output = one(llm, n=4, seed=3, temperature=2.0, json_schema=ORDER, max_tokens=ORDER_MAX_TOKENS)
    for sample in output["samples"]:
        jsonschema.validate(json.loads(sample["text"]), ORDER)
    assert len({sample["text"] for sample in output["samples"]}) == 4


def test_preemption_restores_the_grammar(folder: Path, llm: LLM) -> None:
    most_tokens = 160  # a few are cut there
    params = crowd(2, 16, most_tokens)
    prompts = [PROMPT] * len(params)
    expected = llm.generate(prompts, params, use_tqdm=False)
    num_blocks = -(-(len(PROMPT) + most_tokens) // BLOCK_SIZE) + 2
    with LLM(
        str(folder),
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_model_len=len(PROMPT) + most_tokens,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
    ) as small:
        assert small.generate(prompts, params, use_tqdm=False) == expected
        assert small.stats().num_preemptions > 5


def test_over_two_ranks(folder: Path, llm: LLM) -> None:
    params = crowd(3, 6, 60)
    prompts = [PROMPT] * len(params)
    expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(folder), tensor_parallel_size=2, device="cpu", block_size=BLOCK_SIZE) as spread:
        assert spread.generate(prompts, params, use_tqdm=False) == expected


def _fields(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "seed", "max_tokens", "top_k", *KIND_NAMES)
    return {name: getattr(params, name) for name in names}


KIND_NAMES = ("json_schema", "regex", "choice", "grammar")


# ---- how it ends


def test_an_end_ends_it_even_with_ignore_eos(llm: LLM) -> None:
    output = one(llm, choice=["tea"], ignore_eos=True, max_tokens=50)
    assert output["text"] == "tea"
    assert len(output["token_ids"]) == 4 and output["token_ids"][-1] in EOS


def test_min_tokens_give_way_to_a_text_that_is_complete(llm: LLM) -> None:
    output = one(llm, choice=["tea"], min_tokens=20, max_tokens=50)
    assert output["text"] == "tea" and len(output["token_ids"]) == 4
    for seed in range(5):  # while it can go on, it does
        output = one(llm, regex="a{1,9}", min_tokens=6, max_tokens=50, seed=seed)
        assert len(output["token_ids"]) >= 7
    text = one(llm, choice=["te", "tea", "teapot"], min_tokens=4, max_tokens=50)["text"]
    assert text == "teapot"


def test_max_tokens_may_cut_it(llm: LLM) -> None:
    output = one(llm, regex="(ab){50}", max_tokens=7)
    assert output["text"] == "abababa"


def test_an_empty_text(llm: LLM) -> None:
    assert one(llm, regex="", max_tokens=5)["text"] == ""
    assert one(llm, choice=[""], max_tokens=5)["token_ids"][0] in EOS


def test_stop_token_ids_cut_it_too(llm: LLM) -> None:
    (stop,) = byte_ids("b")
    output = one(llm, regex="a{3}b{3}", stop_token_ids=[stop], max_tokens=20)
    assert output["token_ids"] == byte_ids("aaab")


def test_other_masks_give_way_and_bias_cannot_break_it(llm: LLM) -> None:
    never = byte_ids("z")
    output = one(llm, choice=["tea"], allowed_token_ids=never, bad_words=[byte_ids("ea")])
    assert output["text"] == "tea"
    biased = dict.fromkeys([*byte_ids("tea"), *EOS], -100.0)
    output = one(llm, choice=["tea"], logit_bias=biased, temperature=2, max_tokens=10)
    assert output["text"] == "tea"
    both = one(llm, regex="[a-z]{4}", allowed_token_ids=byte_ids("qw"), max_tokens=9)["text"]
    assert re.fullmatch("[qw]{4}", both)


def test_padding_ids_are_never_sampled(llm: LLM) -> None:
    liked = dict.fromkeys(range(BYTE_VOCAB_SIZE, VOCAB_SIZE), 100.0)
    output = one(llm, regex="(?s:.*)", logit_bias=liked, temperature=2, max_tokens=30)
    assert all(token_id < BYTE_VOCAB_SIZE for token_id in output["token_ids"])


# ---- what goes wrong


def test_refusals_name_the_field(llm: LLM) -> None:
    for given, message in (
        ({"regex": "("}, r"^sampling\.regex: .*unclosed"),
        ({"json_schema": {"uniqueItems": True}}, r"^sampling\.json_schema: .*uniqueItems"),
        ({"grammar": "start: x"}, r"^sampling\.grammar: .*x"),
        ({"choice": []}, r"^sampling\.choice: at least one"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            one(llm, **given)
    assert one(llm, choice=["tea"])["text"] == "tea"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with LLM(str(make_tiny_model(tmp_path))) as bare:
        with pytest.raises(NoTokenizer, match=r"sampling\.regex"):
            one(bare, regex="a")
        assert len(one(bare, max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_a_tokenizer_that_the_library_cannot_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, vocab_size=100)  # fewer rows than the tokenizer has tokens
    broken = LLM(str(make_byte_tokenizer(tmp_path)))
    with broken, pytest.raises(NoTokenizer, match="too small"):
        one(broken, [1, 2], regex="a")


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    expected = one(llm, temperature=0, max_tokens=12, ignore_eos=True)
    original = getattr(GrammarState, method)
    calls = 0

    def failing(state: GrammarState, argument: MaskRow | int) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise GrammarError("too complex")
        original(state, argument)

    llm.generate([PROMPT], SamplingParams(regex="[ab]{9}"), use_tqdm=False)  # compiled
    monkeypatch.setattr(GrammarState, method, failing)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bad = SamplingParams(regex="[ab]{9}", max_tokens=30)
    with pytest.raises(EngineFault, match="too complex"):
        llm.generate([PROMPT, PROMPT], [bad, free], use_tqdm=False)
    monkeypatch.undo()
    assert one(llm, temperature=0, max_tokens=12, ignore_eos=True) == expected
    assert llm.stats().num_requests_running == llm.stats().kv_blocks_used == 0


def test_a_grammar_whose_masks_take_ever_longer_ends_alone(
    default_model_dir: Path, tmp_path: Path
) -> None:
    """All requests wait for them. Long before the library's limit."""
    make_tiny_model(tmp_path, vocab_size=49152, eos_token_id=2)
    (tmp_path / "tokenizer.json").symlink_to(default_model_dir / "tokenizer.json")
    ambiguous = 'start: start start | /[a-z ]/ | ""'
    with LLM(str(tmp_path), device="cpu") as llm:
        free = llm.add_request([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
        no_end = {2: -100.0}
        llm.add_request([1, 2, 3], SamplingParams(grammar=ambiguous, logit_bias=no_end, seed=1))
        ended: list[tuple[int, list[int]]] = []

        def run() -> None:
            while not llm.is_finished():
                ended.extend(llm.step()[0])

        with pytest.raises(EngineFault, match="following it takes more than"):
            run()
        run()
    ((key, token_ids),) = ended
    assert (key, len(token_ids)) == (free, 60)


def test_the_scheduler_ends_a_row_with_a_problem_and_drops_its_token() -> None:
    scheduler = Scheduler(toy_info(max_in_flight=2), True)
    for key in (1, 2):
        scheduler.add(toy_request(key, [5, 6, 7]), 0.0)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    results = [_result(plan) for plan in plans]
    bad = StepResult(step=results[0].step, token_ids=results[0].token_ids, problems={0: "oh no"})
    record = scheduler.apply(bad, 1.0)
    assert (record.keys, len(record.token_ids)) == ([2], 1)
    (ended,) = record.finished
    assert (ended.key, ended.reason, ended.message) == (1, FinishReason.ERROR, "oh no")
    assert ended.output_tokens == 0
    assert scheduler.apply(results[1], 2.0).keys == [2]
    scheduler.check_invariants()


def test_the_problem_of_a_row_that_was_cancelled_meanwhile_is_nobodys() -> None:
    scheduler = Scheduler(toy_info(max_in_flight=2), True)
    scheduler.add(toy_request(1, [5, 6, 7]), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.finish(1, FinishReason.CANCELLED, 0.5) is not None
    scheduler.add(toy_request(1, [8]), 0.6)  # the key lives again
    result = StepResult(step=plan.step, token_ids=[5], problems={0: "oh no"})
    record = scheduler.apply(result, 1.0)
    assert not record.keys and not record.finished
    scheduler.check_invariants()
    assert scheduler.num_waiting == 1


def test_the_scheduler_takes_an_end_before_min_tokens_only_with_a_grammar() -> None:
    info = toy_info(eos_token_ids=(3,))
    grammar = GrammarSpec(kind=GrammarKind.REGEX, text="a")
    for ignore_eos in (False, True):
        scheduler = Scheduler(info, True)
        scheduler.add(toy_request(1, [5], min_tokens=4, grammar=grammar, ignore_eos=ignore_eos), 0)
        scheduler.add(toy_request(2, [5], min_tokens=4, ignore_eos=ignore_eos), 0)
        plan = scheduler.schedule(0)
        record = scheduler.apply(StepResult(step=plan.step, token_ids=[3, 3]), 0)
        assert [(end.key, end.reason, end.stop_token_id) for end in record.finished] == [
            (1, FinishReason.STOP, 3)
        ]


def _result(plan: Plan | None) -> StepResult:
    assert plan is not None
    count = sum(chunk.samples for chunk in plan.chunks) + len(plan.decode_slots)
    return StepResult(step=plan.step, token_ids=[9] * count)


def test_sampling_records_travel_with_their_grammar() -> None:
    spec = GrammarSpec(kind=GrammarKind.CHOICE, text='["é"]')
    sampling = Sampling(max_tokens=1, grammar=spec)
    packed = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(packed, type=Sampling) == sampling
