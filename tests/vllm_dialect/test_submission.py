"""A vLLM request as a submission: every field is translated, without effect on ids, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from tests.refusals import refusal_at_no_cost

from millstream.engine.vllm_dialect.submission import in_vllm_terms, to_submission
from millstream.rpc import errors
from millstream.v1 import engine_pb2

MAX_MODEL_LEN = 64

# What each field of SamplingParams becomes: (a value for it, our field, our value).
TRANSLATED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.0, "temperature", 0.0),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.25, "min_p", 0.25),
    "frequency_penalty": (-1.5, "frequency_penalty", -1.5),
    "presence_penalty": (1.5, "presence_penalty", 1.5),
    "repetition_penalty": (1.25, "repetition_penalty", 1.25),
    "max_tokens": (0, "max_tokens", 0),
    "min_tokens": (3, "min_tokens", 3),
    "stop_token_ids": ([5, 6], "stop_token_ids", [5, 6]),
    "ignore_eos": (True, "ignore_eos", True),
    "n": (4, "n", 4),
    "logprobs": (0, "logprobs", 0),
    "prompt_logprobs": (2, "prompt_logprobs", 2),
    "seed": (-1, "seed", 2**64 - 1),
    "logit_bias": ({3: 1.5}, "logit_bias", {3: 1.5}),
    "json_schema": ("{}", "json_schema", "{}"),
    "regex": ("a+", "regex", "a+"),
    "grammar": ("root ::= x", "grammar", "root ::= x"),
    "json_object": (True, "json_object", True),
    "choice": (
        vllm.ChoiceConstraint(choices=["a", "b"]),
        "choice",
        engine_pb2.StringList(values=["a", "b"]),
    ),
}
# Looked at in the front end, or said of text alone, or always so.
NOT_SUBMITTED = {
    "stop": ["a"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "grammar_from_first_token": True,
}
REFUSED_PARAMS: dict[str, Any] = {"structural_tag": "{}"}
ELSEWHERE = {"truncate_prompt_tokens"}  # test_truncation_keeps_the_end

REFUSED: dict[str, Callable[[vllm.GenerateRequest], None]] = {
    "text": lambda request: setattr(request, "text", ""),
    "kv_transfer_params": lambda request: request.kv_transfer_params.SetInParent(),
    "kv_transfer_params_json": lambda request: setattr(request, "kv_transfer_params_json", "{}"),
    "mm_inputs": lambda request: request.mm_inputs.SetInParent(),
    "extra_mm_inputs": lambda request: request.extra_mm_inputs.add(),
    "media_refs": lambda request: request.media_refs.SetInParent(),
    "data_parallel_rank": lambda request: setattr(request, "data_parallel_rank", 1),
}
TAKEN = {"request_id", "tokenized", "sampling_params", "stream"}


def request_of(**params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(input_ids=[1, 2, 3], original_text="for reference"),
        sampling_params=vllm.SamplingParams(**params),
    )


def submission_of(**params: Any) -> engine_pb2.Submission:
    return to_submission(request_of(**params), max_model_len=MAX_MODEL_LEN)[0]


def test_no_field_is_forgotten() -> None:
    known = {*TRANSLATED, *NOT_SUBMITTED, *REFUSED_PARAMS, *ELSEWHERE}
    assert set(vllm.SamplingParams.DESCRIPTOR.fields_by_name) == known
    assert set(vllm.GenerateRequest.DESCRIPTOR.fields_by_name) == TAKEN | set(REFUSED)


@pytest.mark.parametrize("name", TRANSLATED)
def test_each_field_is_translated(name: str) -> None:
    value, ours, expected = TRANSLATED[name]
    sampling = submission_of(**{name: value}).sampling
    descriptor = engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name[ours]
    found = getattr(sampling, ours)
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        found = dict(found)
    assert (list(found) if isinstance(expected, list) else found) == expected
    if not descriptor.is_repeated:
        assert sampling.HasField(ours)
    plain = submission_of().sampling
    sampling.ClearField(ours)
    plain.ClearField(ours)
    assert sampling == plain, "nothing else changes"


@pytest.mark.parametrize("name", NOT_SUBMITTED)
def test_fields_about_text_change_nothing_of_the_submission(name: str) -> None:
    assert submission_of(**{name: NOT_SUBMITTED[name]}) == submission_of()


def test_row_2_unset_is_not_zero() -> None:
    sampling = submission_of().sampling
    for name in ("temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "n"):
        assert not sampling.HasField(name), name
    assert not sampling.HasField("logprobs")
    assert submission_of(seed=0).sampling.seed == 0
    assert submission_of(seed=0).sampling.HasField("seed")


def test_the_request_itself() -> None:
    submission = submission_of()
    assert (submission.handle, submission.request_id) == (0, "r")
    assert list(submission.token_ids) == [1, 2, 3]


def test_a_top_k_beyond_every_vocabulary() -> None:
    assert submission_of(top_k=2**32 - 1).sampling.top_k == 2**31 - 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_does_not_have_is_refused_by_name(name: str) -> None:
    request = request_of()
    REFUSED[name](request)
    with pytest.raises(errors.Unsupported) as refusal:
        to_submission(request, max_model_len=MAX_MODEL_LEN)
    assert refusal.value.field == name
    assert refusal.value.message.startswith(f"{name}: ")


def test_rank_0_is_the_one_there_is() -> None:
    request = request_of()
    request.data_parallel_rank = 0
    to_submission(request, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"structural_tag": "{}"}, errors.Unsupported),
        ({"logprobs": -1}, errors.Unsupported),
        ({"prompt_logprobs": -1}, errors.Unsupported),
        ({"logit_bias": {-1: 1.0}}, errors.InvalidArgument),
        ({"stop": ["a", ""]}, errors.InvalidArgument),
        ({"stop": ["x" * 5000]}, errors.InvalidArgument),
        ({"truncate_prompt_tokens": 0}, errors.InvalidArgument),
        ({"truncate_prompt_tokens": -2}, errors.InvalidArgument),
    ],
)
def test_bad_parameters_are_refused_by_name(
    params: dict[str, Any], kind: type[errors.MillstreamError]
) -> None:
    with pytest.raises(kind) as refusal:
        submission_of(**params)
    assert refusal.value.field == f"sampling_params.{next(iter(params))}"


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [2, 3]),
        ({"truncate_prompt_tokens": 3}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN - 2}, [2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN}, [3]),
    ],
)
def test_truncation_keeps_the_end(params: dict[str, int], kept: list[int]) -> None:
    assert list(submission_of(**params).token_ids) == kept


def test_stop_strings_are_the_front_ends() -> None:
    request = request_of(stop=["a", "b"], min_tokens=3, skip_special_tokens=True)
    _, stops = to_submission(request, max_model_len=MAX_MODEL_LEN)
    assert (stops.strings, stops.min_tokens, stops.skip_special_tokens) == (("a", "b"), 3, True)


def test_errors_name_the_fields_of_the_request() -> None:
    error = in_vllm_terms(errors.InvalidArgument("sampling.top_p: no", field="sampling.top_p"))
    assert (error.message, error.field) == ("sampling_params.top_p: no", "sampling_params.top_p")
    error = in_vllm_terms(errors.PromptTooLong("token_ids: no", field="token_ids"))
    assert type(error) is errors.PromptTooLong
    assert (error.message, error.field) == ("tokenized.input_ids: no", "tokenized.input_ids")
    error = errors.QueueFull("wait", retry_after_s=1.0)
    assert in_vllm_terms(error) is error


@pytest.mark.parametrize("truncate", [None, 2**31 - 1])
def test_row_88_a_prompt_that_is_too_long_is_not_copied(truncate: int | None) -> None:
    """One of 30 million ids held all streams up for 14 s."""
    request = request_of(truncate_prompt_tokens=truncate)
    request.tokenized.input_ids[:] = [1000] * 300_000
    refuse = partial(to_submission, request, max_model_len=MAX_MODEL_LEN)
    error = refusal_at_no_cost(refuse)
    assert isinstance(error, errors.PromptTooLong) and "300000 ids" in error.message


@pytest.mark.parametrize("field", ["stop", "logit_bias"])
def test_row_88_long_lists_are_refused_by_their_length(field: str) -> None:
    values: dict[str, Any] = {
        "stop": ["a"] * 300_000,
        "logit_bias": dict.fromkeys(range(2**20 + 1), 1.0),
    }
    request = request_of(**{field: values[field]})
    error = refusal_at_no_cost(partial(to_submission, request, max_model_len=MAX_MODEL_LEN))
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == f"sampling_params.{field}" and str(len(values[field])) in error.message
