"""Every field of every request message, with every kind of value, against real services.

The fields are read off the protos' descriptors: one that is added later fails here until it has a
rule. What the rules refuse must be refused with the status they say, naming the field; everything
else must be accepted and run to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tests.field_matrix.methods import MAX_MODEL_LEN, METHODS, Errors, Method
from tests.field_matrix.values import Json, Rule, fields_of, is_map, values_of, wrong_types_of

from millstream.client import Client, SamplingParams, launch
from millstream.rpc.errors import InvalidArgument, from_rpc_error
from millstream.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2

GRPCURL = Path(sys.executable).parent / "grpcurl"
SERVICES = (
    engine_pb2.DESCRIPTOR.services_by_name["Engine"],
    tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"],
)


@pytest.fixture(scope="module")
def client(default_model_dir: Path) -> Iterator[Client]:
    """Of services of their own, in which a step is short and so is the longest prompt."""
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 256, "max_num_seqs": 256}
    with launch(str(default_model_dir), **limits) as running:
        yield running


def _channels(client: Client) -> dict[str, str]:
    return {"Engine": str(client.engine_target), "Tokenizer": str(client.tokenizer_target)}


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    for service in SERVICES:
        for method in service.methods:
            name = f"{service.name}.{method.name}"
            fields = {path for path, _ in fields_of(method.input_type)}
            rules = set(METHODS[name].rules) if name in METHODS else set()
            assert fields == rules, f"{name}: give each field a rule in tests/field_matrix"


_EVERY_FIELD = [(name, path) for name, method in METHODS.items() for path in method.rules]


@pytest.mark.parametrize(("name", "path"), _EVERY_FIELD)
def test_values(client: Client, name: str, path: str) -> None:
    method = METHODS[name]
    rule, field = method.rules[path], method.fields[path]
    if _inside_a_map(path, method):
        pytest.skip("tried with the map")
    target = _channels(client)[name.split(".")[0]]
    with grpc.insecure_channel(target, options=[("grpc.max_send_message_length", -1)]) as channel:
        for value in [*values_of(field), *rule.more]:
            request = json_format.ParseDict(method.placed(path, value), method.message())
            errors = _errors(lambda: method.call(channel, request))  # noqa: B023 (called at once)
            shown = f"{path} = {str(value)[:80]}"
            if rule.good(value):
                _check_good(errors, rule, shown)
            else:
                _check_bad(errors, rule, value, path.removeprefix(method.prefix), shown)


def _errors(call: Callable[[], Errors]) -> Errors:
    try:
        return call()
    except grpc.RpcError as error:
        return [from_rpc_error(error)]


def _check_good(errors: Errors, rule: Rule, shown: str) -> None:
    errors = [error for error in errors if type(error) is not rule.later]
    assert not errors, f"{shown}: {errors[0]!r}"


def _check_bad(errors: Errors, rule: Rule, value: Json, path: str, shown: str) -> None:
    assert errors, f"{shown}: accepted"
    for error in errors:
        assert type(error) in rule.kinds_of(value), f"{shown}: {error!r}"
        assert error.field in (rule.fields or (path,)), f"{shown}: {error!r} names {error.field}"
        assert error.message.startswith(f"{error.field}: "), f"{shown}: {error!r}"


@pytest.mark.parametrize("name", METHODS)
def test_wrong_types_never_become_a_message(name: str) -> None:
    """JSON readers name the field, and send nothing."""
    for path, value, message in _wrong_messages(METHODS[name]):
        with pytest.raises(json_format.ParseError) as caught:
            json_format.ParseDict(message, METHODS[name].message())
        assert path.rpartition(".")[2] in str(caught.value), f"{path} = {value}"


@pytest.mark.parametrize("name", ["Engine.Generate", "Tokenizer.Encode"])
def test_grpcurl_sends_no_wrong_types(client: Client, name: str) -> None:
    """One of each field, as a person would."""
    target = _channels(client)[name.split(".")[0]]
    tried = set()
    for path, value, message in _wrong_messages(METHODS[name]):
        if path not in tried:
            tried.add(path)
            done = _grpcurl(target, f"millstream.v1.{name.replace('.', '/')}", message)
            assert done.returncode != 0, f"{path} = {value}: {done.stdout}"
            assert "error getting request data" in done.stderr


def test_grpcurl_sends_numbers_that_are_none(client: Client) -> None:
    """NaN, infinity and what is too large for a float reach the engine, which names the field."""
    method = METHODS["Engine.Generate"]
    floats = [
        path
        for path, field in method.fields.items()
        if field.type == FieldDescriptor.TYPE_FLOAT and not _inside_a_map(path, method)
    ]
    assert len(floats) >= 6
    for path in floats:
        for value in ("NaN", "-Infinity", 1e39):
            message = method.placed(path, value)
            done = _grpcurl(str(client.engine_target), "millstream.v1.Engine/Generate", message)
            assert '"rejected"' in done.stdout, f"{path} = {value}"
            assert f'"field":"{path.removeprefix("submit.")}"' in done.stdout.replace(": ", ":")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((name, b"\xff\xff\xff") for name in METHODS),
        # Not UTF-8: a request_id, a text, a stop string.
        ("Engine.Generate", b"\x0a\x04\x22\x02\xff\xfe"),
        ("Tokenizer.Encode", b"\x0a\x04\x0a\x02\xff\xfe"),
        ("Tokenizer.Detokenize", b"\x0a\x04\x22\x02\xff\xfe"),
    ],
)
def test_bytes_that_are_no_message(client: Client, name: str, data: bytes) -> None:
    path = f"/millstream.v1.{name.replace('.', '/')}"
    is_stream = name in ("Engine.Generate", "Tokenizer.Detokenize")
    with grpc.insecure_channel(_channels(client)[name.split(".")[0]]) as channel:

        def call() -> Errors:
            if is_stream:
                list(channel.stream_stream(path)(iter([data]), timeout=60))
            else:
                channel.unary_unary(path)(data, timeout=60)
            return []

        (error,) = _errors(call)
    assert type(error) is InvalidArgument
    assert "no such message, or a text is not UTF-8" in error.message


def test_others_never_notice(client: Client) -> None:
    """Last: nothing of all this is left in the engine, and it answers as before."""
    greedy = SamplingParams(temperature=0, max_tokens=2)
    assert client.generate([504, 3575, 282, 4649, 314], greedy).token_ids == [7042, 30]
    with grpc.insecure_channel(str(client.engine_target)) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        stats = stub.GetStats(engine_pb2.GetStatsRequest())
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.kv_blocks_used == 0


def _inside_a_map(path: str, method: Method) -> bool:
    above = method.fields.get(path.rpartition(".")[0])
    return above is not None and is_map(above)


def _wrong_messages(method: Method) -> Iterable[tuple[str, Json, Json]]:
    for path, field in method.fields.items():
        if not _inside_a_map(path, method):
            for value in wrong_types_of(field):
                yield path, value, method.placed(path, value)


def _grpcurl(target: str, method: str, message: Json) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GRPCURL), "-plaintext", "-d", json.dumps(message), target, method],
        capture_output=True,
        text=True,
        timeout=60,
    )
