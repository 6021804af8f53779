"""Random requests with every sampling field in a small, crowded pool, some of them cancelled: each
gets what it gets alone, from a runner whose scheduler has room for everything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizers import BYTE_VOCAB_SIZE, ENDOFTEXT_ID, IM_END_ID, make_byte_tokenizer

from millstream.engine import LLM, SamplingParams
from millstream.engine.core import EngineCore
from millstream.engine.plan import RunnerInfo, TokenLogprobs
from millstream.engine.records import FinishedRecord
from millstream.engine.request import FinishReason, Request
from millstream.engine.scheduler import Scheduler
from millstream.engine.validation.submissions import to_requests
from millstream.rpc.errors import InvalidArgument
from millstream.rpc.sampling_params import to_proto
from millstream.v1 import engine_pb2

VOCAB_SIZE = BYTE_VOCAB_SIZE + 12  # padded past the tokenizer
NUM_TRAFFICS = 24
MAX_STEPS = 20_000
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-d]{2,9}"},
    {"regex": ""},
    {"json_schema": {"type": "array", "items": {"enum": [1, "ab", None]}, "maxItems": 3}},
    {"json_object": True},
    {"choice": ["tea", "teapot", "te", "日本"]},
    {"grammar": 'root ::= "(" root ")" | [xyz]{1,5}'},
    {"grammar": 'start: /[a-z]+/ "." | start start'},
]


def random_params(rng: random.Random, room: int) -> SamplingParams:
    """Values at the ends of their ranges, and inside; about a quarter of the fields are set."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    few, max_tokens = ids(3), rng.randint(1, room)
    optional: dict[str, Any] = {
        "top_p": rng.choice([1e-6, 0.3, 0.9, 1.0]),
        "top_k": rng.choice([-1, 0, 1, 30, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1]),
        "min_p": rng.choice([1e-9, 0.05, 1]),
        "presence_penalty": rng.choice([-2, 0.5, 2]),
        "frequency_penalty": rng.choice([-2, 0.5, 2]),
        "repetition_penalty": rng.choice([1e-30, 0.5, 1.3, 3e38]),
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": ids(rng.choice([1, 40])),
        "logit_bias": {i: rng.choice([-1e9, -3, 5, 100]) for i in ids(rng.choice([1, VOCAB_SIZE]))},
        "allowed_token_ids": ids(rng.choice([1, 2, 40])),
        "bad_words": [rng.choices(few, k=rng.choice([1, 2, 3])) for _ in range(9)],
        "logprobs": rng.choice([0, 1, 20]),
        "prompt_logprobs": rng.choice([0, 3, 20]),
        "n": rng.randint(2, 3),
    }
    chosen = {name: value for name, value in optional.items() if rng.random() < 0.25}
    return SamplingParams(
        temperature=rng.choice([0, 0, 1e-5, 1e-4, 0.3, 1, 2]),
        seed=rng.choice([0, 2**64 - 1, rng.getrandbits(64)]),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.5,
        **chosen,
        **(rng.choice(GRAMMARS) if rng.random() < 0.3 else {}),
    )


def random_requests(rng: random.Random, info: RunnerInfo, most: int) -> list[Request]:
    """Prompts of which some begin alike."""
    families = [[rng.randrange(VOCAB_SIZE) for _ in range(info.max_model_len)] for _ in range(2)]
    requests: list[Request] = []
    refused: list[str] = []
    for _ in range(most):
        length = rng.randint(1, info.max_model_len - 1)
        shared = rng.choice([0, info.block_size, length // 2, length])
        prompt = rng.choice(families)[:shared][:length]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        params = random_params(rng, info.max_model_len - length)
        submission = engine_pb2.Submission(
            sampling=to_proto(params),
            priority=rng.choice([0, 0, 5, -(2**31), 2**31 - 1]),
            cache_salt=rng.choice(["", "", "a"]),
        )
        try:
            requests += to_requests(
                submission,
                key=len(requests),
                info=info,
                random_seed=7,
                token_ids=prompt,
                client=rng.randrange(3),
            )
        except InvalidArgument as error:
            refused.append(error.field)
    assert all(name.startswith("sampling.") for name in refused)
    return requests


@dataclass(slots=True)
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: FinishedRecord | None = None

    @property
    def end(self) -> tuple[int, int | None, str]:
        assert self.finished is not None, "lost"
        return self.finished.reason, self.finished.stop_token_id, self.finished.message


def run(
    core: EngineCore, requests: list[Request], rng: random.Random, arrival: float, cancel: float
) -> dict[int, Outcome]:
    outcomes = {request.key: Outcome() for request in requests}
    arriving = list(reversed(requests))
    for _ in range(MAX_STEPS):
        while arriving and (rng.random() < arrival or not core.has_work):
            core.submit(arriving.pop())
        if rng.random() < cancel:
            core.finish([rng.choice(requests).key, 1 << 40], FinishReason.CANCELLED)
        note(core, outcomes)
        core.scheduler.check_invariants()
        if not arriving and not core.has_work:
            break
    stats = core.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.kv_blocks_used == 0 and not core._followed
    return outcomes


def note(core: EngineCore, outcomes: dict[int, Outcome]) -> None:
    record = core.step()
    logprobs = record.logprobs or [None] * len(record.keys)
    for key, token_id, entry in zip(record.keys, record.token_ids, logprobs, strict=True):
        outcomes[key].token_ids.append(token_id)
        outcomes[key].logprobs.append(entry)
    for piece in record.prompt_logprobs:
        outcomes[piece.key].prompt_logprobs += piece.logprobs
    for finished in record.finished:
        assert outcomes[finished.key].finished is None, "ended twice"
        outcomes[finished.key].finished = finished


def numbers(entries: list[Any]) -> list[float]:
    """Of log probabilities; 1 stands for none."""
    return [
        number
        for entry in entries
        for number in ((1.0,) if entry is None else (entry.logprob, *entry.top_logprobs))
    ]


def check(got: Outcome, alone: Outcome) -> None:
    """The same, or its beginning where it was cancelled; log probabilities but for rounding."""
    count, scored = len(got.token_ids), len(got.prompt_logprobs)
    if got.end[0] != FinishReason.CANCELLED:
        assert got.end == alone.end
        assert (count, scored) == (len(alone.token_ids), len(alone.prompt_logprobs))
    assert got.token_ids == alone.token_ids[:count]
    for ours, theirs in (
        (got.logprobs, alone.logprobs[:count]),
        (got.prompt_logprobs, alone.prompt_logprobs[:scored]),
    ):
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=3e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    eos = [ENDOFTEXT_ID, IM_END_ID]
    make_tiny_model(path, vocab_size=VOCAB_SIZE, eos_token_id=eos, max_position_embeddings=128)
    return make_byte_tokenizer(path)


@pytest.fixture(params=[("torch", 4, NUM_TRAFFICS), ("triton", 16, 1)], ids=lambda param: param[0])
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[LLM, int]]:
    backend, block_size, num_traffics = request.param
    with LLM(
        folder,
        attention_backend=backend,
        block_size=block_size,
        device="cpu",
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_bytes=1 << 21,
    ) as llm:
        yield llm, num_traffics


@pytest.mark.slow
def test_all_fields_in_a_crowd_give_what_they_give_alone(loaded: tuple[LLM, int]) -> None:
    llm, num_traffics = loaded
    core, info, seen = llm._core, llm.info, Counter[str]()
    size = info.block_size
    for seed in range(num_traffics):
        rng = random.Random(seed)
        num_blocks = rng.randint(-(-24 // size), -(-60 // size))
        core.info = small = replace(
            info,
            num_blocks=num_blocks,
            max_model_len=min(rng.choice([24, 64]), num_blocks * size + 1),
            max_num_seqs=rng.randint(2, 8),
            max_num_batched_tokens=rng.choice([1, 2, 3, 7, 16, 64]),
            max_in_flight=rng.choice([1, 2]),
        )
        core.scheduler = Scheduler(small, prefix_caching=rng.random() < 0.8)
        most = rng.randint(4, 10) if num_traffics > 1 else 3  # the interpreter is slow
        requests = random_requests(rng, small, most)
        grammars = {request.sampling.grammar for request in requests} - {None}
        for grammar in grammars:
            core.prepare_grammar(grammar).result(60)
        outcomes = run(core, requests, rng, rng.choice([0.3, 1.0]), rng.choice([0.0, 0.05]))
        seen += Counter(
            preempted=core.stats().num_preemptions, cached=core.stats().prefix_cache_hits
        )
        seen.update(FinishReason(outcome.end[0]).name for outcome in outcomes.values())
        core.info = info
        for request in requests:
            core.scheduler = Scheduler(info, prefix_caching=False)
            check(outcomes[request.key], run(core, [request], rng, 1.0, 0.0)[request.key])
        for grammar in grammars:
            core.forget_grammar(grammar)
    assert not seen["ERROR"]
    if num_traffics == NUM_TRAFFICS:  # worth something only while it meets all of these
        assert min(seen[each] for each in ("preempted", "cached", "STOP", "LENGTH")) > 10, seen
        assert seen["CANCELLED"], seen
