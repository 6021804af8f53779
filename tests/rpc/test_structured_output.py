"""Structured output as the user writes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.rpc.errors import InvalidArgument
from millstream.rpc.sampling_params import SamplingParams, from_proto, to_proto
from millstream.v1 import engine_pb2


def test_a_schema_is_text_or_a_dict_whose_order_stays() -> None:
    schema = {"type": "object", "properties": {"z": {"const": "é"}, "a": {}}}
    assert to_proto(SamplingParams(json_schema='{"a": 1}')).json_schema == '{"a": 1}'
    text = to_proto(SamplingParams(json_schema=schema)).json_schema
    assert list(json.loads(text)["properties"]) == ["z", "a"]
    assert json.loads(text) == schema


def test_the_others() -> None:
    assert to_proto(SamplingParams(json_object=True)).json_object
    assert to_proto(SamplingParams(regex="")).WhichOneof("structured_output") == "regex"
    assert to_proto(SamplingParams(grammar="é")).grammar == "é"
    assert list(to_proto(SamplingParams(choice=("a", ""))).choice.values) == ["a", ""]
    empty = to_proto(SamplingParams(choice=[]))  # the engine refuses it
    assert empty.WhichOneof("structured_output") == "choice"
    nothing = to_proto(SamplingParams(json_object=False, json_schema=None))
    assert nothing == engine_pb2.SamplingParams()


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": "{}"},
        {"json_object": True},
        {"regex": ""},
        {"choice": ["a", ""]},
        {"grammar": "a"},
        {},
    ],
)
def test_resolved_parameters_come_back_as_they_were(given: dict[str, Any]) -> None:
    message = to_proto(SamplingParams(**given))
    back = from_proto(message)
    assert to_proto(back) == message
    assert {name: getattr(back, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"regex": "a", "choice": ["a"]}, "choice", "regex is given too"),
        ({"json_schema": {}, "json_object": True}, "json_object", "json_schema is given too"),
        ({"choice": "a"}, "choice", "list of strings"),
        ({"choice": [1]}, "choice", "string"),
        ({"choice": ["\ud83d"]}, "choice", "surrogate"),
        ({"regex": 1}, "regex", "string"),
        ({"json_object": 1}, "json_object", "True or False"),
        ({"json_schema": True}, "json_schema", "JSON text or a dict"),
        ({"json_schema": {"const": float("nan")}}, "json_schema", "no JSON"),
        ({"json_schema": {"const": object()}}, "json_schema", "no JSON"),
        ({"grammar": "\ud83d"}, "grammar", "surrogate"),
    ],
)
def test_refused_by_name(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        to_proto(SamplingParams(**given))
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_a_schema_that_contains_itself() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidArgument, match="no JSON"):
        to_proto(SamplingParams(json_schema=schema))
