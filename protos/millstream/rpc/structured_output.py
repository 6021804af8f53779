"""What the user says of structured output, as the engine's proto has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millstream.rpc.errors import InvalidArgument
from millstream.rpc.values import check_bool, check_list, check_text, refusal
from millstream.v1 import engine_pb2

STRUCTURED_OUTPUTS = ("json_schema", "json_object", "regex", "choice", "grammar")


def set_structured_output(message: engine_pb2.SamplingParams, given: Mapping[str, object]) -> None:
    """Sets the one of these fields that is not None (or False). Raises InvalidArgument naming a
    field that is wrong, or that comes with another."""
    chosen = [
        name for name in STRUCTURED_OUTPUTS if given[name] is not None and given[name] is not False
    ]
    if len(chosen) > 1:
        first, second, *_ = chosen
        names = ", ".join(STRUCTURED_OUTPUTS)
        raise InvalidArgument(
            f"{second}: only one of {names}, and {first} is given too", field=second
        )
    for name in chosen:
        value = given[name]
        match name:
            case "json_schema":
                message.json_schema = _json_text(value)
            case "json_object":
                message.json_object = check_bool(name, value)
            case "choice":
                texts = check_list(name, value, "a list of strings")
                message.choice.SetInParent()
                message.choice.values.extend(check_text(name, text) for text in texts)
            case _:
                setattr(message, name, check_text(name, value))


def structured_output_of(message: engine_pb2.SamplingParams) -> dict[str, Any]:
    """The field that set_structured_output() sets so, if any."""
    name = message.WhichOneof("structured_output")
    if name is None:
        return {}
    value = getattr(message, name)
    return {name: list(value.values) if name == "choice" else value}


def _json_text(schema: object) -> str:
    """A schema as text; one that is a dict keeps the order of its keys."""
    if not isinstance(schema, Mapping):
        wanted = "JSON text or a dict"
        if not isinstance(schema, str):
            raise refusal("json_schema", wanted, schema)
        return check_text("json_schema", schema)
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"json_schema: no JSON: {error}", field="json_schema") from error
