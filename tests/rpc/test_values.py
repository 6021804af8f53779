"""Whatever a user puts into SamplingParams: an error that names the field, or nothing."""

from __future__ import annotations

import enum
import fractions
import math
from typing import Any

import numpy as np
import pytest

from millstream.rpc.errors import InvalidArgument, Unsupported
from millstream.rpc.integer_ranges import INTEGER_RANGES
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
        pytest.param("max_tokens", 10**5000, id="max_tokens-an int that has no repr"),
        pytest.param("bad_words", [[1, 10**5000]], id="bad_words-an int that has no repr"),
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


def test_a_bad_value_is_told_as_it_came() -> None:
    with pytest.raises(InvalidArgument, match=r"not np\.int64\(-1\)$"):
        to_proto(SamplingParams(seed=np.int64(-1)))


@pytest.mark.parametrize(
    "stop", [3, "", [""], [3], b"x", {"a"}, "\ud800", ["ok", None], "x" * (MAX_STOP_CHARS + 1)]
)
def test_a_bad_stop_is_an_error_that_names_it(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^stop: "):
        _ = SamplingParams(stop=stop).stop_strings


_INTEGERS = {
    field.name: 64 if field.cpp_type == field.CPPTYPE_UINT64 else 32
    for field in engine_pb2.SamplingParams.DESCRIPTOR.fields
    if not field.is_repeated
    and field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
}


def test_every_integer_has_a_range() -> None:
    assert set(INTEGER_RANGES) == set(_INTEGERS)


@pytest.mark.parametrize("name", _INTEGERS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_number_that_cannot_be_sent_is_told_its_fields_own_range(name: str, sign: int) -> None:
    """Not that of protobuf's type: n=-1 was told "from 0 to 4294967295"."""
    value = sign * 2 ** _INTEGERS[name]
    with pytest.raises(InvalidArgument) as caught:
        to_proto(SamplingParams(**{name: value}))
    assert str(caught.value) == f"{name}: {INTEGER_RANGES[name]}, not {value}"


def test_the_words_of_a_range_are_its_bounds() -> None:
    for allowed in INTEGER_RANGES.values():
        assert str(allowed.low) in str(allowed)
        assert str(allowed.high) in str(allowed)


def test_a_bias_of_no_token_id() -> None:
    with pytest.raises(InvalidArgument, match=r"^logit_bias: a token id of 0 or more"):
        to_proto(SamplingParams(logit_bias={-1: 1.0}))


def test_many_stop_strings_are_refused_not_searched_for() -> None:
    """A hundred thousand of them held up every request of a client, and the tokenizer service."""
    with pytest.raises(InvalidArgument, match=r"^stop: at most 4096 characters"):
        _ = SamplingParams(stop=["x"] * 100_000).stop_strings


def test_none_is_unset_for_every_field() -> None:
    fields = set(SamplingParams.__dataclass_fields__) - {"include_stop", "skip_special_tokens"}
    params = SamplingParams(**dict.fromkeys(fields))
    assert to_proto(params) == engine_pb2.SamplingParams()
    assert params.stop_strings == ()


def test_numbers_of_other_types_become_what_protobuf_takes() -> None:
    class Whole(enum.IntEnum):
        TWO = 2

    params = SamplingParams(temperature=fractions.Fraction(1, 2), top_p=1, max_tokens=Whole.TWO)
    assert to_proto(params) == engine_pb2.SamplingParams(temperature=0.5, top_p=1, max_tokens=2)
    with pytest.raises(InvalidArgument, match=r"^max_tokens: a whole number, not True"):
        to_proto(SamplingParams(max_tokens=True))


def test_a_long_bad_value_is_shown_shortened() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_ids("prompt", "a" * 10_000)
    assert len(str(caught.value)) < 300
