"""The user's sampling parameters: what `Client` and `LLM` take. Pure data; None means unset.

Ranges and defaults are the engine's: engine.proto documents them, the engine checks them. Here only
what protobuf itself would refuse, with an unclear message, is caught and named.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from millstream.rpc.errors import InvalidArgument
from millstream.rpc.integer_ranges import INTEGER_RANGES, IntegerField
from millstream.rpc.structured_output import (
    STRUCTURED_OUTPUTS,
    set_structured_output,
    structured_output_of,
)
from millstream.rpc.values import (
    A_TOKEN_ID,
    UINT32_MAX,
    UINT64_MAX,
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_list,
    check_text,
    refusal,
)
from millstream.v1 import engine_pb2

# Of one request's stop strings together: what is made to look for them all at once is bounded.
MAX_STOP_CHARS = 4096


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
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    n: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = ()
    # Texts (which the tokenizer service encodes) or token ids.
    bad_words: Sequence[str | Sequence[int]] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # At most one of these; a JSON schema as text, or as what json.loads makes of it.
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; InvalidArgument if it is no string or list of non-empty strings, or
        too long."""
        stop = (
            (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        )
        wanted = "a non-empty string or a list of them"
        texts = tuple(check_text("stop", text) for text in check_list("stop", stop, wanted))
        if "" in texts:
            raise refusal("stop", wanted, self.stop)
        if (size := sum(map(len, texts))) > MAX_STOP_CHARS:
            raise InvalidArgument(
                f"stop: at most {MAX_STOP_CHARS} characters together, not {size}", field="stop"
            )
        return texts

    @property
    def bad_word_texts(self) -> tuple[str, ...]:
        """What is to be encoded, without special tokens, for the texts among `bad_words`: each as
        it begins a text, and as it follows a space. InvalidArgument for an empty one."""
        texts = []
        for word in check_list("bad_words", self.bad_words or (), _BAD_WORDS):
            if isinstance(word, str):
                text = check_text("bad_words", word).lstrip()
                if not text:
                    raise refusal("bad_words", "texts that are not empty", word)
                texts += [text, " " + text]
        return tuple(texts)


def to_proto(params: SamplingParams) -> engine_pb2.SamplingParams:
    """The engine's part: all but stop strings and bad words that are texts. Raises InvalidArgument
    naming the Python field."""
    message = engine_pb2.SamplingParams()
    for name, check in _SCALARS.items():
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, check(name, value))
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(params, name)
        if value is not None:
            getattr(message, name).extend(check_ids(name, value))
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, Mapping):
            raise refusal("logit_bias", "a dict of token ids and numbers", params.logit_bias)
        for key, bias in params.logit_bias.items():
            token_id = check_int("logit_bias", key, 0, UINT32_MAX, wanted=A_TOKEN_ID)
            message.logit_bias[token_id] = check_float("logit_bias", bias)
    for word in check_list("bad_words", params.bad_words or (), _BAD_WORDS):
        if not isinstance(word, str):
            message.bad_words.add(token_ids=check_ids("bad_words", word))
    set_structured_output(message, {name: getattr(params, name) for name in STRUCTURED_OUTPUTS})
    return message


def from_proto(message: engine_pb2.SamplingParams) -> SamplingParams:
    """The parameters that to_proto makes this of; a field that is not set stays unset."""
    values: dict[str, Any] = {
        descriptor.name: _as_written(value) if isinstance(value, float) else value
        for descriptor, value in message.ListFields()
        if descriptor.name in _SCALARS
    }
    return SamplingParams(
        **values,
        **structured_output_of(message),
        stop_token_ids=list(message.stop_token_ids),
        allowed_token_ids=list(message.allowed_token_ids),
        logit_bias={i: _as_written(bias) for i, bias in message.logit_bias.items()} or None,
        bad_words=[list(word.token_ids) for word in message.bad_words],
    )


def _as_written(value: float) -> float:
    """The number that a user writes for this float32: 0.6, not 0.6000000238418579."""
    short = float(f"{value:.7g}")
    return short if struct.unpack("f", struct.pack("f", short))[0] == value else value


_BAD_WORDS = "a list of texts, or of lists of token ids"


def _integer(
    field: IntegerField, low: int = 0, high: int = UINT32_MAX
) -> Callable[[str, Any], int]:
    """The check of an integer that the wire can carry from `low` to `high`. One beyond is told the
    range of its field; the engine checks the others."""
    return partial(check_int, low=low, high=high, wanted=str(INTEGER_RANGES[field]))


_SCALARS: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": check_float,
    "top_p": check_float,
    "top_k": _integer("top_k", low=-(2**31), high=2**31 - 1),
    "min_p": check_float,
    "presence_penalty": check_float,
    "frequency_penalty": check_float,
    "repetition_penalty": check_float,
    "seed": _integer("seed", high=UINT64_MAX),
    "max_tokens": _integer("max_tokens"),
    "min_tokens": _integer("min_tokens"),
    "ignore_eos": check_bool,
    "n": _integer("n"),
    "logprobs": _integer("logprobs"),
    "prompt_logprobs": _integer("prompt_logprobs"),
}
