"""The methods whose fields are tried: the message around a field, and the call that tries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from tests.field_matrix import engine_rules, tokenizer_rules
from tests.field_matrix.values import Json, Rule, fields_of, placed

from millstream.rpc.errors import MillstreamError, from_status
from millstream.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

VOCAB_SIZE = 49152  # of the default model
MAX_MODEL_LEN = 512  # of the engine that is tried
_LONG_PROMPT = 100

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
        waiting -= {one.handle for one in message.finished}  # maybe without a token: its time is up
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
