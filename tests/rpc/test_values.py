"""Whatever a user puts into SamplingParams: an error that names the field, or nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millstream.rpc.errors import InvalidArgument, Unsupported
from millstream.rpc.sampling_params import MAX_STOP_CHARS, SamplingParams, to_proto
from millstream.rpc.values import check_ids
from millstream.v1 import engine_pb2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0"),
        ("temperature", True),
        ("temperature", 10**400),  # no float is that large
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", math.nan),
        ("max_tokens", 2**32),
        ("ignore_eos", 1),
        ("json_schema", ["object"]),
        ("regex", "\ud800"),
        ("stop_token_ids", 3),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", b"ab"),
        ("allowed_token_ids", {1}),
        ("logit_bias", [1]),
        ("logit_bias", 3),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "a"}),
        ("bad_words", 3),
        ("bad_words", [3]),
        ("choice", 3),
        ("choice", "abc"),
        ("choice", [3]),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises((InvalidArgument, Unsupported), match=f"^{field}") as caught:
        to_proto(SamplingParams(**{field: value}))
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "stop", [3, "", [""], [3], b"x", {"a"}, "\ud800", ["ok", None], "x" * (MAX_STOP_CHARS + 1)]
)
def test_a_bad_stop_is_an_error_that_names_it(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^stop: "):
        _ = SamplingParams(stop=stop).stop_strings


def test_many_stop_strings_are_refused_not_searched_for() -> None:
    """A hundred thousand of them held up every request of a client, and the tokenizer service."""
    with pytest.raises(InvalidArgument, match=r"^stop: at most 4096 characters"):
        _ = SamplingParams(stop=["x"] * 100_000).stop_strings


def test_none_is_unset_for_every_field() -> None:
    fields = set(SamplingParams.__dataclass_fields__) - {"include_stop", "skip_special_tokens"}
    params = SamplingParams(**dict.fromkeys(fields))
    assert to_proto(params) == engine_pb2.SamplingParams()
    assert params.stop_strings == ()


def test_a_long_bad_value_is_shown_shortened() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_ids("prompt", "a" * 10_000)
    assert len(str(caught.value)) < 300
