"""What each field of the Engine service's requests takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.field_matrix.values import Json, Rule, anything, each, shorter_than, within

from millstream.engine.validation.structured_output import MAX_GRAMMAR_CHARS
from millstream.engine.validation.submissions import MAX_NAME_LENGTH
from millstream.rpc.errors import (
    DeadlineExceeded,
    DuplicateHandle,
    InvalidArgument,
    MillstreamError,
    PromptTooLong,
    Unsupported,
)

_PENALTY = Rule(good=within(-2, 2), more=[-2.01, 2.01, -2, 2, 0.5])
_NAME = Rule(good=shorter_than(MAX_NAME_LENGTH + 1))
_MAX_LOGPROBS = 20


def rules(vocab_size: int, max_model_len: int) -> Mapping[str, Rule]:
    """Of GenerateRequest's fields, by path."""

    def known(token_id: Json) -> bool:
        return 0 <= int(token_id) < vocab_size

    def too_long(value: Json) -> type[MillstreamError]:
        return PromptTooLong if len(value) >= max_model_len else InvalidArgument

    ids = Rule(good=each(known), more=[[vocab_size - 1], [vocab_size]])
    return {
        "cancel": Rule(good=anything),
        "submit": Rule(  # the second one of a handle hears of that
            good=lambda value: value == [],
            kind=lambda value: (InvalidArgument, DuplicateHandle),
            fields=("token_ids", "handle"),
        ),
        "submit.handle": Rule(good=anything),
        "submit.token_ids": Rule(
            good=lambda value: 0 < len(value) < max_model_len and all(map(known, value)),
            kind=too_long,
            more=[[vocab_size - 1], [vocab_size], [1] * max_model_len],
        ),
        "submit.request_id": _NAME,
        "submit.cache_salt": _NAME,
        "submit.timeout_ms": Rule(good=within(1, 2**32 - 1), later=DeadlineExceeded),
        "submit.priority": Rule(good=anything),
        "submit.sampling": Rule(good=anything),
        **{f"submit.sampling.{name}": rule for name, rule in _scalars().items()},
        **{f"submit.sampling.{name}": rule for name, rule in _structured_output().items()},
        "submit.sampling.stop_token_ids": ids,
        "submit.sampling.allowed_token_ids": ids,
        "submit.sampling.stop": Rule(
            good=lambda value: value == [], kind=_text_kind, more=[["x", ""]]
        ),
        "submit.sampling.logit_bias": Rule(
            good=lambda value: all(known(key) and finite(bias) for key, bias in value.items()),
            more=[{str(vocab_size - 1): -100}, {str(vocab_size): 1.0}],
        ),
        "submit.sampling.logit_bias.key": Rule(good=anything),  # tried with the map
        "submit.sampling.logit_bias.value": Rule(good=anything),
        "submit.sampling.bad_words": Rule(good=lambda value: value == []),
        "submit.sampling.bad_words.token_ids": Rule(
            good=lambda value: 1 <= len(value) <= 128 and all(map(known, value)),
            fields=("sampling.bad_words",),
        ),
    }


finite = within(-3.5e38, 3.5e38)


def _scalars() -> Mapping[str, Rule]:
    logprobs = Rule(good=within(0, _MAX_LOGPROBS), more=[20, 21])
    return {
        "temperature": Rule(good=within(0, 2), more=[2, 2.01, 1e-5]),
        "top_p": Rule(good=within(0, 1, above=True), more=[1.01]),
        "top_k": Rule(good=within(-1, 2**31 - 1)),
        "min_p": Rule(good=within(0, 1), more=[1.01]),
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "repetition_penalty": Rule(good=within(0, 3.5e38, above=True)),
        "seed": Rule(good=anything),
        "max_tokens": Rule(good=within(1, 2**32 - 1)),
        "min_tokens": Rule(good=within(0, 1)),  # max_tokens is 1
        "ignore_eos": Rule(good=anything),
        "include_stop": Rule(good=lambda value: not value, kind=Unsupported),
        "skip_special_tokens": Rule(good=bool, kind=Unsupported),
        "n": Rule(good=within(1, 128), more=[2, 129]),
        "logprobs": logprobs,
        "prompt_logprobs": logprobs,
    }


def _structured_output() -> Mapping[str, Rule]:
    bounded: Callable[[Json], bool] = shorter_than(MAX_GRAMMAR_CHARS)
    return {
        "json_schema": Rule(
            good=lambda value: value == '{"type":"integer"}',
            more=['{"type":"integer"}', "[]", '{"type":"unheard of"}', "[" * 100_000],
        ),
        "json_object": Rule(good=anything),
        "regex": Rule(good=lambda value: bounded(value) and value != "(", more=["(", "a*"]),
        "choice": Rule(good=lambda value: bool(value.get("values"))),
        "choice.values": Rule(
            good=lambda value: value != [] and bounded("".join(value)), fields=("sampling.choice",)
        ),
        "grammar": Rule(
            good=lambda value: value == 'start: "a"',
            more=['start: "a"', 'start: "a', "start: NONE"],
        ),
    }


def _text_kind(stop: Json) -> type[MillstreamError]:
    return InvalidArgument if "" in stop else Unsupported
