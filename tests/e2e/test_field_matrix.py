"""Every field of every request message, with every kind of value, against real services.

The fields are read off the protos' descriptors: one that is added later fails here until it has a
rule. What the rules refuse must be refused with the status they say, naming the field; everything
else must be accepted and run to its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tests.field_matrix import engine_rules, tokenizer_rules
from tests.field_matrix.values import (
    Json,
    Rule,
    fields_of,
    is_map,
    placed,
    values_of,
    wrong_types_of,
)

from millstream.client import Client, SamplingParams, launch
from millstream.rpc.errors import (
    InvalidArgument,
    MillstreamError,
    from_rpc_error,
    from_status,
)
from millstream.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

GRPCURL = Path(sys.executable).parent / "grpcurl"
_LONG_PROMPT = 100
VOCAB_SIZE = 49152  # of the default model
MAX_MODEL_LEN = 512
SERVICES = (
    engine_pb2.DESCRIPTOR.services_by_name["Engine"],
    tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"],
)

Errors = list[MillstreamError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method under test. `bases`: by the start of a path, the message around the field."""

    message: type[Any]
    rules: Mapping[str, Rule]
    bases: Mapping[str, Json]
    call: Callable[[grpc.Channel, Any], Errors]
    prefix: str = ""  # of paths, which errors leave out

    def placed(self, path: str, value: Json) -> Json:
        start = max((start for start in self.bases if path.startswith(start)), key=len)
        return placed(self.bases[start], path, value)

    @property
    def fields(self) -> Mapping[str, FieldDescriptor]:
        return dict(fields_of(self.message.DESCRIPTOR))


def _generate(channel: grpc.Channel, request: engine_pb2.GenerateRequest) -> Errors:
    """The errors of a stream's requests. One that is accepted is left after its first tokens; at
    once if its prompt is long."""
    stub: Any = engine_pb2_grpc.EngineStub(channel)
    errors: Errors = []
    waiting = {one.handle for one in request.submit}
    long = {one.handle for one in request.submit if len(one.token_ids) > _LONG_PROMPT}
    call = stub.Generate(iter([request]), timeout=60)
    for message in call:
        errors += [from_status(one.status) for one in message.rejected]
        errors += [from_status(one.status) for one in message.finished if one.HasField("status")]
        assert all(token_id < VOCAB_SIZE for token_id in message.output.token_ids)
        waiting -= {one.handle for one in message.rejected}
        waiting -= {one.handle for one in message.accepted} & long
        waiting -= set(message.output.handles)
        if not waiting:
            break
    call.cancel()
    assert not waiting, "neither refused nor answered"
    return errors


def _encode(channel: grpc.Channel, request: tokenizer_pb2.EncodeRequest) -> Errors:
    stub: Any = tokenizer_pb2_grpc.TokenizerStub(channel)
    assert len(stub.Encode(request, timeout=60).sequences) == len(request.inputs)
    return []


def _decode(channel: grpc.Channel, request: tokenizer_pb2.DecodeRequest) -> Errors:
    stub: Any = tokenizer_pb2_grpc.TokenizerStub(channel)
    assert len(stub.Decode(request, timeout=60).texts) == len(request.sequences)
    return []


def _detokenize(channel: grpc.Channel, request: tokenizer_pb2.DetokenizeRequest) -> Errors:
    stub: Any = tokenizer_pb2_grpc.TokenizerStub(channel)
    (answer,) = stub.Detokenize(iter([request]), timeout=60)
    return [from_status(one.status) for one in answer.failed]


METHODS: Mapping[str, Method] = {
    "Engine.Generate": Method(
        message=engine_pb2.GenerateRequest,
        rules=engine_rules.rules(VOCAB_SIZE, MAX_MODEL_LEN),
        bases={
            "": {},
            "submit.": {
                "submit": [{"handle": 1, "token_ids": [1, 2, 3], "sampling": {"max_tokens": 1}}]
            },
            "submit.sampling.bad_words.": {
                "submit": [{"token_ids": [1], "sampling": {"max_tokens": 1, "bad_words": [{}]}}]
            },
            "submit.sampling.choice.": {
                "submit": [{"token_ids": [1], "sampling": {"max_tokens": 1, "choice": {}}}]
            },
        },
        call=_generate,
        prefix="submit.",
    ),
    "Tokenizer.Encode": Method(
        message=tokenizer_pb2.EncodeRequest,
        rules=tokenizer_rules.encode_rules(),
        bases={
            "": {"inputs": [{"text": "ab"}]},
            "inputs.": {"inputs": [{}]},
            "inputs.chat.": {
                "inputs": [{"chat": {"messages": [{"role": "user", "content": "hi"}]}}]
            },
            # There the two go against each other.
            "inputs.chat.continue_final_message": {
                "inputs": [
                    {
                        "chat": {
                            "messages": [{"role": "user", "content": "hi"}],
                            "add_generation_prompt": False,
                        }
                    }
                ]
            },
        },
        call=_encode,
    ),
    "Tokenizer.Decode": Method(
        message=tokenizer_pb2.DecodeRequest,
        rules=tokenizer_rules.decode_rules(VOCAB_SIZE),
        bases={"": {"sequences": [{"token_ids": [65]}]}},
        call=_decode,
    ),
    "Tokenizer.Detokenize": Method(
        message=tokenizer_pb2.DetokenizeRequest,
        rules=tokenizer_rules.detokenize_rules(VOCAB_SIZE),
        bases={
            "open": {"open": [{"handle": 1}]},
            "tokens": {"open": [{"handle": 1}], "tokens": {"handles": [1], "token_ids": [65]}},
            "tokens.logprobs.": {"tokens": {"logprobs": {}}},
            "close": {"open": [{"handle": 1}]},
        },
        call=_detokenize,
    ),
}


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
