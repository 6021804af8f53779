"""Lists that are too long are refused by their length, before anything is made of them: one message
of 64 MiB with one request held all streams up for 2 to 14 s."""

from __future__ import annotations

import pytest
from tests.refusals import refusal_at_no_cost
from tests.toy_runner import toy_info

from millstream.engine.validation.submissions import to_requests
from millstream.rpc.errors import InvalidArgument, PromptTooLong
from millstream.v1 import engine_pb2

INFO = toy_info()
COUNT = 300_000  # 2.4 MB as a list


def test_row_88_a_prompt() -> None:
    submission = engine_pb2.Submission(token_ids=[1000] * COUNT)
    error = refusal_at_no_cost(lambda: to_requests(submission, key=1, info=INFO, random_seed=1))
    assert isinstance(error, PromptTooLong) and str(COUNT) in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [1] * COUNT),
        ("allowed_token_ids", [1] * COUNT),
        ("logit_bias", dict.fromkeys(range(COUNT), 1.0)),
        ("bad_words", [engine_pb2.TokenSequence(token_ids=[1])] * COUNT),
        ("stop", ["a"] * COUNT),
        ("choice", engine_pb2.StringList(values=["a"] * COUNT)),
    ],
)
def test_row_88_what_repeats_itself(field: str, value: object) -> None:
    sampling = engine_pb2.SamplingParams(**{field: value})  # type: ignore[arg-type]
    submission = engine_pb2.Submission(token_ids=[1], sampling=sampling)
    error = refusal_at_no_cost(lambda: to_requests(submission, key=1, info=INFO, random_seed=1))
    assert isinstance(error, InvalidArgument)
    assert error.field == f"sampling.{field}" and str(COUNT) in error.message
