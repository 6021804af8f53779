"""Every field of vLLM's SamplingParams, out of its own descriptor, with extreme values: it is
taken, or refused by its name; the engine goes on."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.fake_runners import EOS_TOKEN_ID
from tests.vllm_dialect.calls import Call, complete, request

from millstream.rpc import errors

_FLOATS = (math.nan, math.inf, -math.inf, -1e30, 1e30, -1.0, 0.0, 1e-30)
_VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_UINT32: (0, 1, 1000, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: ("", "\0", "(", "x" * 100_000),
}
_REFUSALS = (
    *(errors.InvalidArgument, errors.Unsupported, errors.NeverFits),
    errors.NoTokenizer,  # the byte tokenizer is none of this model, which has 1,000 ids
)


def _cases() -> list[tuple[str, Any]]:
    cases: list[tuple[str, Any]] = []
    for field in vllm.SamplingParams.DESCRIPTOR.fields:
        if field.message_type is None:
            values = _VALUES[field.type]
            cases += [(field.name, [value] if field.is_repeated else value) for value in values]
    cases += [("logit_bias", {token_id: 1.0}) for token_id in (-(2**31), -1, 1000, 2**31 - 1)]
    cases += [("logit_bias", {1: value}) for value in _FLOATS]
    cases += [
        ("choice", vllm.ChoiceConstraint(choices=choices)) for choices in ([], [""], ["x"] * 9999)
    ]
    return cases


def test_every_field_is_tried() -> None:
    assert {name for name, _ in _cases()} == set(vllm.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", sorted({name for name, _ in _cases()}))
async def test_an_extreme_value_is_taken_or_refused_by_name(
    stub: vllm_grpc.VllmEngineStub, name: str
) -> None:
    for value in (value for case, value in _cases() if case == name):
        soon = [EOS_TOKEN_ID - 3]
        call = Call(stub, request(soon, **{"max_tokens": 2, name: value}))
        try:
            await call.to_end()
        except grpc.aio.AioRpcError as failure:
            error = errors.from_rpc_error(failure)
            assert isinstance(error, _REFUSALS), f"{name}={value!r:.80}: {error!r}"
            assert error.field == f"sampling_params.{name}", f"{value!r:.80}: {error.message}"
            assert len(error.message) < 1000
    assert list((await complete(stub, [10], max_tokens=2)).output_ids) == [11, 12]
