"""validation/: each documented range and default, and each refusal names its field."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from millstream.engine.plan import RunnerInfo
from millstream.engine.request import Request
from millstream.engine.validation.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    resolved_sampling,
)
from millstream.engine.validation.submissions import to_requests
from millstream.rpc.errors import (
    InvalidArgument,
    MillstreamError,
    NeverFits,
    PromptTooLong,
    Unsupported,
)
from millstream.rpc.sampling_params import SamplingParams, to_proto
from millstream.v1 import engine_pb2

INFO = RunnerInfo(
    vocab_size=100,
    eos_token_ids=(2, 7),
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    block_size=4,
    num_blocks=32,
)


def request(
    token_ids: list[int] | None = None,
    info: RunnerInfo = INFO,
    submission: dict[str, Any] | None = None,
    **sampling: Any,
) -> Request:
    message = engine_pb2.Submission(
        token_ids=[1, 2, 3] if token_ids is None else token_ids,
        sampling=engine_pb2.SamplingParams(**sampling),
        **(submission or {}),
    )
    return to_requests(message, key=5, info=info, random_seed=99)[0]


def refused(kind: type[MillstreamError], field: str, **arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        request(**arguments)
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert caught.value.message.startswith(field + ":")
    return caught.value.message


def test_row_2_unset_numbers_take_the_documented_defaults() -> None:
    sampling = request().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (99, 0, False)
    assert sampling.max_tokens == 61
    assert request(temperature=0).sampling.greedy
    assert request(temperature=0).sampling.top_p == 1
    assert request(seed=0).sampling.seed == 0
    assert request(seed=2**64 - 1).sampling.seed == 2**64 - 1


def test_fields_are_carried_over() -> None:
    got = request(
        submission={"request_id": "r", "cache_salt": "s", "timeout_ms": 1},
        stop_token_ids=[9, 5, 9],
        ignore_eos=True,
        min_tokens=2,
        max_tokens=4,
    )
    assert (got.key, got.token_ids, got.request_id, got.cache_salt) == (5, [1, 2, 3], "r", "s")
    assert got.sampling.stop_token_ids == (9, 5)
    assert got.sampling.ignore_eos and got.sampling.min_tokens == 2


def test_row_17_prompt_ids_outside_the_vocabulary() -> None:
    assert request([99]).token_ids == [99]
    for bad in (100, 2**31 - 1, 2**32 - 1):
        message = refused(InvalidArgument, "token_ids", token_ids=[1, bad, 2])
        assert f"not {bad}" in message and "index 1" in message and "0 to 99" in message


def test_row_19_empty_prompt() -> None:
    refused(InvalidArgument, "token_ids", token_ids=[])


def test_a_prompt_beside_the_submission_meets_the_same_checks() -> None:
    """As LLM gives it."""
    message = engine_pb2.Submission(sampling=engine_pb2.SamplingParams(n=2))
    beside = to_requests(message, key=5, info=INFO, random_seed=99, token_ids=[1, 2, 3])
    message.token_ids.extend([1, 2, 3])
    assert beside == to_requests(message, key=5, info=INFO, random_seed=99)
    for kind, bad in (
        (InvalidArgument, []),
        (InvalidArgument, [1, 100]),
        (InvalidArgument, [2**70]),
        (PromptTooLong, [1] * 64),
    ):
        with pytest.raises(kind, match=r"^token_ids: "):
            to_requests(message, key=5, info=INFO, random_seed=99, token_ids=bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
def test_row_18_nan_and_infinity(name: str, value: float) -> None:
    message = refused(InvalidArgument, f"sampling.{name}", **{name: value})
    assert f"not {value}" in message


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 1e-46, 1e-8, 2], [-0.1, 2.0001]),
        ("top_p", [1e-6, 0.9, 1], [0, -0.1, 1.0001]),
        ("min_p", [0, 1], [-0.1, 1.0001]),
        ("presence_penalty", [0, -2, 0.5, 2], [-2.001, 2.001]),
        ("frequency_penalty", [0, -2, 0.5, 2], [-2.001, 2.001]),
        ("repetition_penalty", [1, 1e-6, 0.5, 1e6], [0, -1]),
        ("logprobs", [0, 20], [21, 2**32 - 1]),
        ("prompt_logprobs", [0, 20], [21, 2**32 - 1]),
        ("top_k", [-1, 0, 1, 100, 101, 2**30], [-2, -(2**31)]),
        ("n", [1, 2, 128], [0, 129, 2**32 - 1]),
        ("max_tokens", [1, 61, 2**32 - 1], [0]),
    ],
)
def test_ranges(name: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        request(**{name: value})
    for value in bad:
        refused(InvalidArgument, f"sampling.{name}", **{name: value})


def test_values_are_shown_as_the_user_wrote_them() -> None:
    """A float32 1.1 is 1.10000002384 as a double."""
    assert refused(InvalidArgument, "sampling.top_p", top_p=1.1).endswith(
        "a finite number above 0 to 1, not 1.1"
    )


def test_row_51_top_k_off() -> None:
    for off in (-1, 0, 100, 101, 2**30):
        assert request(top_k=off).sampling.top_k == 0
    assert request(top_k=99).sampling.top_k == 99


@pytest.mark.parametrize("temperature", [0, 1e-46, 1e-8, 9e-6])
def test_row_52_tiny_temperatures_are_greedy(temperature: float) -> None:
    """So nothing is ever divided by them."""
    assert request(temperature=temperature).sampling.greedy
    assert not request(temperature=1e-4).sampling.greedy


def test_row_61_max_tokens() -> None:
    refused(InvalidArgument, "sampling.max_tokens", max_tokens=0)
    assert request(max_tokens=1).sampling.max_tokens == 1
    assert request(max_tokens=1000).sampling.max_tokens == 61
    with pytest.raises(InvalidArgument, match="max_tokens"):
        to_proto(SamplingParams(max_tokens=-1))


def test_row_20_the_context_limit() -> None:
    info = RunnerInfo(
        vocab_size=100,
        eos_token_ids=(),
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        block_size=4,
        num_blocks=32,
    )
    for prompt_tokens, output_tokens in ((14, 2), (15, 1)):
        got = request([1] * prompt_tokens, info, max_tokens=5)
        assert got.sampling.max_tokens == output_tokens
    for prompt_tokens in (16, 17):
        message = refused(PromptTooLong, "token_ids", token_ids=[1] * prompt_tokens, info=info)
        assert "16 tokens" in message


def test_rows_5_and_6_what_never_fits_is_refused_at_once() -> None:
    info = RunnerInfo(
        vocab_size=100,
        eos_token_ids=(),
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        block_size=4,
        num_blocks=3,
    )
    assert request([1] * 10, info, max_tokens=3).sampling.max_tokens == 3  # exactly 12 slots
    refused(NeverFits, "token_ids", token_ids=[1] * 10, info=info, max_tokens=4)
    assert request([1] * 10, info).sampling.max_tokens == 3  # unset: up to what fits
    assert request([1] * 12, info).sampling.max_tokens == 1
    refused(NeverFits, "token_ids", token_ids=[1] * 13, info=info)


def test_min_tokens() -> None:
    refused(InvalidArgument, "sampling.min_tokens", min_tokens=5, max_tokens=4)
    assert request(min_tokens=4, max_tokens=4).sampling.min_tokens == 4
    assert request(min_tokens=1000, max_tokens=1000).sampling.min_tokens == 61  # clamped alike
    assert request(min_tokens=1000).sampling.min_tokens == 61


def test_row_63_stop_token_ids_outside_the_vocabulary() -> None:
    refused(InvalidArgument, "sampling.stop_token_ids", stop_token_ids=[1, 100], min_tokens=1)
    refused(InvalidArgument, "sampling.logit_bias", logit_bias={100: 5.0})
    refused(InvalidArgument, "sampling.logit_bias", logit_bias={1: float("nan")})
    refused(InvalidArgument, "sampling.allowed_token_ids", allowed_token_ids=[100])
    refused(InvalidArgument, "sampling.bad_words", bad_words=words([5], [1, 100]))
    with pytest.raises(InvalidArgument, match="logit_bias"):
        to_proto(SamplingParams(logit_bias={-1: 5.0}))


def words(*token_ids: Sequence[int]) -> list[engine_pb2.TokenSequence]:
    return [engine_pb2.TokenSequence(token_ids=each) for each in token_ids]


def test_fields_that_edit_logits_are_resolved() -> None:
    sampling = request(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: 1000.0, 5: -0.5, 6: -1000.0},
        allowed_token_ids=[9, 3, 9, 5],
        bad_words=words([3, 4], [5], [3, 4]),
        logprobs=3,
        prompt_logprobs=0,
    ).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == ((5, -0.5), (6, -100.0), (7, 100.0)), "clamped"
    assert sampling.allowed_token_ids == (3, 5, 9)
    assert sampling.bad_words == ((3, 4), (5,))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 0)
    plain = request().sampling
    assert not plain.has_penalties and not plain.needs_token_ids
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_bad_words_are_bounded() -> None:
    field = "sampling.bad_words"
    request(bad_words=words([1] * MAX_BAD_WORD_TOKENS))
    refused(InvalidArgument, field, bad_words=words([1] * (MAX_BAD_WORD_TOKENS + 1)))
    refused(InvalidArgument, field, bad_words=words([1], []))
    many = [[i // 90, i % 90] for i in range(MAX_BAD_WORDS + 1)]
    request(bad_words=words(*many[1:]))
    refused(InvalidArgument, field, bad_words=words(*many))


def test_something_is_left_to_sample() -> None:
    every = list(range(100))
    field = "sampling.bad_words"
    refused(InvalidArgument, field, bad_words=words(*([i] for i in every)))
    request(bad_words=words(*([i] for i in every[1:])))
    refused(InvalidArgument, field, allowed_token_ids=[4, 5], bad_words=words([4], [5]))
    request(allowed_token_ids=[4, 5], bad_words=words([4], [5, 5]))
    field = "sampling.allowed_token_ids"
    refused(InvalidArgument, field, allowed_token_ids=[2, 7], min_tokens=1)
    request(allowed_token_ids=[2, 7])
    request(allowed_token_ids=[2, 7], min_tokens=1, ignore_eos=True)
    only = {"allowed_token_ids": [2, 5], "bad_words": words([5])}
    refused(InvalidArgument, field, min_tokens=1, **only)
    field = "sampling.stop_token_ids"
    others = words(*([i] for i in range(50)))
    refused(InvalidArgument, field, stop_token_ids=range(50, 100), min_tokens=1, bad_words=others)


def test_a_bad_word_costs_the_same_of_any_vocabulary() -> None:
    """It is checked on the event loop of the front end."""
    info = replace(INFO, vocab_size=4_000_000)
    begun = time.process_time()
    request(info=info, bad_words=words([5]), allowed_token_ids=[])
    assert time.process_time() - begun < 0.02, "a set of every id takes ten times as long"


def test_stop_token_ids_that_leave_nothing_to_sample() -> None:
    every = [token for token in range(100) if token not in INFO.eos_token_ids]
    request(stop_token_ids=every)
    request(stop_token_ids=every, min_tokens=1, ignore_eos=True)
    refused(InvalidArgument, "sampling.stop_token_ids", stop_token_ids=every, min_tokens=1)


def test_number_of_stop_token_ids_is_bounded() -> None:
    info = RunnerInfo(
        vocab_size=5000,
        eos_token_ids=(),
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        block_size=4,
        num_blocks=32,
    )
    request(info=info, stop_token_ids=range(MAX_STOP_TOKEN_IDS))
    refused(
        InvalidArgument,
        "sampling.stop_token_ids",
        info=info,
        stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1),
    )


def test_timeout_and_priority() -> None:
    refused(InvalidArgument, "timeout_ms", submission={"timeout_ms": 0})
    for priority in (-(2**31), -1, 0, 2**31 - 1):
        assert request(submission={"priority": priority}).priority == priority


def samples(handle: int = 5, **sampling: Any) -> list[Request]:
    message = engine_pb2.Submission(
        handle=handle, token_ids=[1, 2, 3], sampling=engine_pb2.SamplingParams(**sampling)
    )
    return to_requests(message, key=5, info=INFO, random_seed=99, client=3)


def test_samples_differ_in_key_and_seed_alone() -> None:
    first, *others = samples(n=4, seed=2**64 - 2, temperature=0.5, stop_token_ids=[9])
    assert [other.key for other in others] == [6, 7, 8]
    assert [other.sampling.seed for other in others] == [2**64 - 1, 0, 1]
    for other in others:
        like_first = structs.replace(other.sampling, seed=first.sampling.seed)
        assert structs.replace(other, key=5, sampling=like_first) == first
        assert (other.client, other.sampling.n) == (3, 4)
    assert [sample.sampling.seed for sample in samples(n=2)] == [99, 100]
    assert [resolved_sampling(sample.sampling).n for sample in samples(n=2)] == [2, 2]


def test_samples_need_consecutive_handles() -> None:
    assert len(samples(handle=2**32 - 2, n=2)) == 2
    with pytest.raises(InvalidArgument, match="3 samples take") as caught:
        samples(handle=2**32 - 2, n=3)
    assert caught.value.field == "handle"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["x"]),
        ("include_stop", True),
        ("skip_special_tokens", False),
    ],
)
def test_what_the_engine_does_not_do_is_never_ignored(name: str, value: Any) -> None:
    refused(Unsupported, f"sampling.{name}", **{name: value})


def test_neutral_values_of_unsupported_fields_pass() -> None:
    request(
        n=1,
        include_stop=False,
        skip_special_tokens=True,
        json_object=False,
    )


def test_bad_values_win_over_unsupported() -> None:
    refused(InvalidArgument, "sampling.logprobs", logprobs=21)
    refused(InvalidArgument, "sampling.stop", stop=["x", ""])  # row 14


def test_resolved_proto_fills_everything_in_and_passes_again() -> None:
    first = request(
        top_k=200,
        stop_token_ids=[3],
        min_tokens=1000,
        repetition_penalty=1.1,
        logit_bias={9: 1e9, 3: 0.1},
        allowed_token_ids=[8, 3],
        bad_words=words([3, 8]),
        logprobs=0,
        prompt_logprobs=20,
    )
    echoed = resolved_sampling(first.sampling)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"):
        assert echoed.HasField(name)
    assert echoed.logit_bias[9] == 100 and list(echoed.allowed_token_ids) == [3, 8]
    assert echoed.HasField("logprobs") and not resolved_sampling(request().sampling).HasField(
        "logprobs"
    )
    assert (echoed.seed, echoed.max_tokens, echoed.min_tokens, echoed.top_k) == (99, 61, 61, 0)
    again = engine_pb2.Submission(token_ids=first.token_ids, sampling=echoed)
    assert to_requests(again, key=5, info=INFO, random_seed=1) == [first]


# A value that is no default, for every field that Accepted echoes.
ECHOED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": 2**63,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop_token_ids": [9, 5],
    "ignore_eos": True,
    "n": 3,
    "logit_bias": {4: -1.5, 9: 2.0},
    "allowed_token_ids": [3, 4, 5],
    "bad_words": [engine_pb2.TokenSequence(token_ids=[8, 9])],
    "logprobs": 0,
    "prompt_logprobs": 2,
    "json_schema": '{"type":"object"}',
    "json_object": True,
    "regex": "a+",
    "choice": engine_pb2.StringList(values=["a", "b"]),
    "grammar": 'root ::= "a"',
}
TEXT_FIELDS = {"stop", "include_stop", "skip_special_tokens"}  # refused: the tokenizer service's
ALWAYS_ECHOED = ECHOED.keys() - {
    *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"),  # empty is the default
    *("logprobs", "prompt_logprobs"),  # unset is the default
    *("json_schema", "json_object", "regex", "choice", "grammar"),
}


@pytest.mark.parametrize("field", engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
def test_accepted_echoes_every_field(field: str) -> None:
    """A field that is added later needs a value here, and an echo."""
    if field in TEXT_FIELDS:
        return
    asked = engine_pb2.SamplingParams(**{field: ECHOED[field]})
    info = replace(INFO, structured_output=True)
    echoed = resolved_sampling(request(info=info, **{field: ECHOED[field]}).sampling)
    assert getattr(echoed, field) == getattr(asked, field)
    if asked.DESCRIPTOR.fields_by_name[field].has_presence:
        assert echoed.HasField(field)
    unset = resolved_sampling(request().sampling)
    assert (field in {set_field.name for set_field, _ in unset.ListFields()}) == (
        field in ALWAYS_ECHOED
    )


def test_long_prompts_are_checked_quickly() -> None:
    info = RunnerInfo(
        vocab_size=200_000,
        eos_token_ids=(),
        max_model_len=2_000_000,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        block_size=16,
        num_blocks=200_000,
    )
    message = engine_pb2.Submission(token_ids=range(150_000))
    started = time.perf_counter()
    to_requests(message, key=1, info=info, random_seed=0)
    assert time.perf_counter() - started < 0.25  # about 10 ms


@pytest.mark.parametrize("field", ["request_id", "cache_salt"])
def test_names_are_bounded(field: str) -> None:
    assert getattr(request(submission={field: "x" * 1024}), field) == "x" * 1024
    refused(InvalidArgument, field, submission={field: "x" * 1025})
