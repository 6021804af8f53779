"""The user's sampling parameters: what `Client` and `LLM` take. Pure data; None means unset.

Ranges and defaults are the engine's: engine.proto documents them, the engine checks them. Here only
what protobuf itself would refuse, with an unclear message, is caught and named.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.rpc.errors import InvalidArgument, Unsupported
from millstream.v1 import engine_pb2

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample; the field meanings, ranges and defaults are those of engine.proto.

    `stop`, `include_stop` and `skip_special_tokens` are about text: the client hands them to the
    tokenizer service.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    n: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] | Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; InvalidArgument if it is no string or list of non-empty strings."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidArgument(
                f"stop: a non-empty string or a list of them, not {self.stop!r}", field="stop"
            )
        return tuple(stop)


def to_proto(params: SamplingParams) -> engine_pb2.SamplingParams:
    """The engine's part. Raises InvalidArgument or Unsupported naming the Python field."""
    message = engine_pb2.SamplingParams()
    for name, check in _SCALARS.items():
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, check(name, value))
    for name in ("stop_token_ids", "allowed_token_ids"):
        getattr(message, name).extend(_id_list(name, getattr(params, name)))
    for key, bias in (params.logit_bias or {}).items():
        message.logit_bias[_uint32("logit_bias", key)] = _float("logit_bias", bias)
    for word in params.bad_words:
        if isinstance(word, str):
            raise Unsupported("bad_words: only token ids so far", field="bad_words")
        message.bad_words.add(token_ids=_id_list("bad_words", word))
    if params.choice:
        message.choice.values.extend(_text("choice", value) for value in params.choice)
    return message


def _refuse(name: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{name}: {wanted}, not {value!r}", field=name)


def _float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(name, value, "a number")
    return float(value)


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise _refuse(name, value, "a whole number")
        if not low <= int(value) <= high:
            raise _refuse(name, value, f"from {low} to {high}")
        return int(value)

    return check


_uint32 = _integer(0, _UINT32_MAX)


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(name, value, "text without lone surrogates") from None
    return value


def _id_list(name: str, values: object) -> list[int]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise _refuse(name, values, "a list of token ids")
    return [_uint32(name, value) for value in values]


_SCALARS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": _float,
    "top_p": _float,
    "top_k": _integer(-(2**31), 2**31 - 1),
    "min_p": _float,
    "presence_penalty": _float,
    "frequency_penalty": _float,
    "repetition_penalty": _float,
    "seed": _integer(0, _UINT64_MAX),
    "max_tokens": _uint32,
    "min_tokens": _uint32,
    "ignore_eos": _bool,
    "n": _uint32,
    "logprobs": _uint32,
    "prompt_logprobs": _uint32,
    "json_schema": _text,
    "json_object": _bool,
    "regex": _text,
    "grammar": _text,
}
