"""Every field of this protocol's requests, out of their descriptors, with extreme values: it is
taken, or refused by its name; the engine goes on. Those of SamplingParams: test_bad_values.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.fake_runners import VOCAB_SIZE
from tests.field_matrix.values import (
    Json,
    Rule,
    anything,
    fields_of,
    placed,
    shorter_than,
    values_of,
)
from tests.vllm_dialect.calls import complete
from tests.vllm_dialect.conftest import MAX_MODEL_LEN

from millstream.engine.validation.submissions import MAX_NAME_LENGTH
from millstream.rpc.errors import (
    CursorExpired,
    InvalidArgument,
    MillstreamError,
    PromptTooLong,
    Unsupported,
    from_rpc_error,
)

_SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
_NEVER = Rule(good=lambda value: False, kind=Unsupported)
_ONLY_ZERO = Rule(good=lambda value: value == 0, kind=Unsupported)

# What is inside these is not looked at: they are refused whole, or tried elsewhere.
_WHOLE: Mapping[str, Rule] = {
    "kv_transfer_params": _NEVER,
    "mm_inputs": _NEVER,
    "extra_mm_inputs": Rule(good=lambda value: value == [], kind=Unsupported),
    "media_refs": _NEVER,
    "sampling_params": Rule(good=anything),
}
_INSIDE_WHOLE = tuple(f"{path}." for path in _WHOLE)
_RULES: Mapping[str, Mapping[str, Rule]] = {
    "Generate": {
        **_WHOLE,
        "request_id": Rule(good=shorter_than(MAX_NAME_LENGTH + 1)),
        "tokenized": Rule(good=lambda value: False, fields=("tokenized.input_ids",)),
        "tokenized.original_text": Rule(good=anything),
        "tokenized.input_ids": Rule(
            good=lambda value: 0 < len(value) < MAX_MODEL_LEN and max(value) < VOCAB_SIZE,
            kind=lambda value: PromptTooLong if len(value) >= MAX_MODEL_LEN else InvalidArgument,
            more=[[VOCAB_SIZE - 2], [VOCAB_SIZE]],
        ),
        "text": _NEVER,
        "stream": Rule(good=anything),
        "kv_transfer_params_json": _NEVER,
        "data_parallel_rank": _ONLY_ZERO,
    },
    "Abort": {"request_ids": Rule(good=anything)},
    "GetLoads": {"dp_rank": _ONLY_ZERO, "include": Rule(good=anything)},
    "SubscribeKvEvents": {
        "start_sequence_number": Rule(good=lambda value: value == 0, kind=CursorExpired),
        "load_records_before_first_batch": Rule(good=anything),
    },
}
_REFUSED_METHODS = ("Embed", "FlushCache", "StartProfile", "StopProfile")
_TOKENIZED = {"tokenized": {"input_ids": [10]}}
_BASES: Mapping[str, Json] = {
    "Generate": {**_TOKENIZED, "sampling_params": {"max_tokens": 1}},
    "Embed": _TOKENIZED,
}


def _fields(method: str) -> Mapping[str, FieldDescriptor]:
    """What is to have a rule, by path."""
    fields = fields_of(_SERVICE.methods_by_name[method].input_type)
    return {path: field for path, field in fields if not path.startswith(_INSIDE_WHOLE)}


def _message(method: str, path: str, value: Json) -> Any:
    """A request with one field set; where it is one of several forms, the others give way."""
    base = _BASES.get(method, {})
    oneof = _fields(method)[path].containing_oneof
    if oneof is not None:
        base = {name: base[name] for name in base if name not in {f.name for f in oneof.fields}}
    message = GetMessageClass(_SERVICE.methods_by_name[method].input_type)()
    return json_format.ParseDict(placed(base, path, value), message)


async def _error(
    stub: vllm_grpc.VllmEngineStub, method: str, request: Any
) -> MillstreamError | None:
    """What a call ends with; a subscription is left after its first message."""
    call = getattr(stub, method)(request, timeout=30)
    try:
        if not _SERVICE.methods_by_name[method].server_streaming:
            await call
            return None
        async for _ in call:
            if method == "SubscribeKvEvents":
                break
        return None
    except grpc.aio.AioRpcError as failure:
        return from_rpc_error(failure)
    finally:
        call.cancel()


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    for method in _SERVICE.methods:
        if method.name not in _REFUSED_METHODS:
            assert set(_fields(method.name)) == set(_RULES.get(method.name, {})), method.name


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, rules in _RULES.items() for path in rules]
)
async def test_a_value_is_taken_or_refused_by_name(
    stub: vllm_grpc.VllmEngineStub, method: str, path: str
) -> None:
    rule = _RULES[method][path]
    for value in [*values_of(_fields(method)[path]), *rule.more]:
        error = await _error(stub, method, _message(method, path, value))
        shown = f"{path} = {value!r:.80}: {error!r}"
        if rule.good(value):
            assert error is None, shown
        else:
            assert type(error) in rule.kinds_of(value), shown
            assert error is not None and error.field in (rule.fields or (path,)), shown
            assert error.message.startswith(f"{error.field}: ") and len(error.message) < 1000
    assert list((await complete(stub, [10], max_tokens=2)).output_ids) == [11, 12]


@pytest.mark.parametrize("method", _REFUSED_METHODS)
async def test_a_refused_method_is_refused_whatever_is_asked(
    stub: vllm_grpc.VllmEngineStub, method: str
) -> None:
    for path, field in _fields(method).items():
        for value in values_of(field):
            error = await _error(stub, method, _message(method, path, value))
            assert isinstance(error, Unsupported), f"{path} = {value!r:.80}: {error!r}"
            assert error.message.startswith(f"{method}: ")
