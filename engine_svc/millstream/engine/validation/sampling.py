"""SamplingParams of the wire as Sampling, and back: all checks and defaults of engine.proto's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from millstream.engine.plan import RunnerInfo
from millstream.engine.request import Sampling
from millstream.engine.validation.checks import check_vocabulary, invalid, unsupported
from millstream.engine.validation.structured_output import (
    MAX_GRAMMAR_CHARS,
    resolve_grammar,
    set_grammar,
)
from millstream.rpc.errors import InvalidArgument, NeverFits
from millstream.rpc.integer_ranges import INTEGER_RANGES
from millstream.rpc.sampling_params import MAX_STOP_CHARS
from millstream.v1 import engine_pb2

MAX_LOGIT_BIAS = 100.0
# These bound what a slot of the runner holds.
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 128
_REPEATS = 16  # in which a bad word may come: they count once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Finite numbers from `low` to `high`, and what an unset field means."""

    low: float
    high: float
    default: float
    above: bool = False  # `low` itself is out

    def __contains__(self, value: float) -> bool:
        high_enough = value > self.low if self.above else value >= self.low
        return math.isfinite(value) and high_enough and value <= self.high

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"from {self.low:g}"
        return f"a finite number {low}" + (f" to {self.high:g}" if self.high < math.inf else "")


_Number = Literal[
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
]
_RANGES: Mapping[_Number, _Range] = {
    "temperature": _Range(low=0, high=2, default=1),
    "top_p": _Range(low=0, high=1, default=1, above=True),
    "min_p": _Range(low=0, high=1, default=0),
    "presence_penalty": _Range(low=-2, high=2, default=0),
    "frequency_penalty": _Range(low=-2, high=2, default=0),
    "repetition_penalty": _Range(low=0, high=math.inf, default=1, above=True),
}
_DEFAULTS: Mapping[_Number, float] = {name: each.default for name, each in _RANGES.items()}
_TEXT = "text is the Tokenizer service's business: give it to Detokenize"


def resolve_sampling(
    params: engine_pb2.SamplingParams, *, prompt_tokens: int, info: RunnerInfo, random_seed: int
) -> Sampling:
    """The parameters with every default filled in; `random_seed` (64 bits) serves if they have
    none. Raises InvalidArgument, Unsupported, NoTokenizer or NeverFits (more than the KV pool)."""
    numbers = check_scalars(params)
    lists = _check_lists(params, info)
    _refuse_unsupported(params)
    max_tokens = _max_tokens(params, prompt_tokens, info)
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise invalid(
            "sampling.min_tokens", f"at most max_tokens ({params.max_tokens})", params.min_tokens
        )
    return Sampling(
        max_tokens=max_tokens,
        temperature=numbers["temperature"],
        top_p=numbers["top_p"],
        top_k=params.top_k if 0 < params.top_k < info.vocab_size else 0,
        min_p=numbers["min_p"],
        seed=params.seed if params.HasField("seed") else random_seed,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=lists.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=numbers["presence_penalty"],
        frequency_penalty=numbers["frequency_penalty"],
        repetition_penalty=numbers["repetition_penalty"],
        logit_bias=lists.logit_bias,
        allowed_token_ids=lists.allowed_token_ids,
        bad_words=lists.bad_words,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        n=params.n if params.HasField("n") else 1,
        grammar=resolve_grammar(params, info),
    )


def resolved_sampling(sampling: Sampling) -> engine_pb2.SamplingParams:
    """Resolved parameters as the wire tells them; they resolve to themselves."""
    params = engine_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[engine_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    set_grammar(params, sampling.grammar)
    return params


def check_scalars(params: engine_pb2.SamplingParams) -> dict[_Number, float]:
    """Every float field, its default where it is unset. Raises InvalidArgument for one that is out
    of range, and for an integer that is."""
    numbers = dict(_DEFAULTS)
    for name, allowed in _RANGES.items():
        if params.HasField(name):
            value = numbers[name] = getattr(params, name)
            if value not in allowed:
                raise invalid(f"sampling.{name}", str(allowed), f"{value:.7g}")
    for field, integers in INTEGER_RANGES.items():
        if params.HasField(field) and getattr(params, field) not in integers:
            raise invalid(f"sampling.{field}", str(integers), getattr(params, field))
    return numbers


def check_lengths(params: engine_pb2.SamplingParams, info: RunnerInfo) -> None:
    """Raises InvalidArgument for a list that cannot be right whatever is in it; at no cost, so
    before anything is made of it."""
    for field, most in (
        ("stop", MAX_STOP_CHARS),
        ("stop_token_ids", info.vocab_size),
        ("logit_bias", info.vocab_size),
        ("allowed_token_ids", info.vocab_size),
        ("bad_words", _REPEATS * MAX_BAD_WORDS),
    ):
        if (count := len(getattr(params, field))) > most:
            raise invalid(f"sampling.{field}", f"at most {most} of them", count)
    if (count := len(params.choice.values)) > MAX_GRAMMAR_CHARS:
        raise invalid("sampling.choice", f"at most {MAX_GRAMMAR_CHARS} characters", count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """Fields of Sampling."""

    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


_NO_LISTS = _Lists()


def _check_lists(params: engine_pb2.SamplingParams, info: RunnerInfo) -> _Lists:
    """The fields that hold token ids, checked each alone and then together."""
    if "" in params.stop:
        raise InvalidArgument("sampling.stop: non-empty strings only", field="sampling.stop")
    if not (
        params.stop_token_ids
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens  # must leave an id that ends nothing
    ):
        return _NO_LISTS
    check_vocabulary("sampling.allowed_token_ids", params.allowed_token_ids, info)
    lists = _Lists(
        stop_token_ids=_stop_token_ids(params, info),
        logit_bias=_logit_bias(params, info),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids))),
        bad_words=_bad_words(params, info),
    )
    _check_something_is_left(params, lists, info)
    return lists


def _stop_token_ids(params: engine_pb2.SamplingParams, info: RunnerInfo) -> tuple[int, ...]:
    field = "sampling.stop_token_ids"
    check_vocabulary(field, params.stop_token_ids, info)
    stop_token_ids = tuple(dict.fromkeys(params.stop_token_ids))
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(field, f"at most {MAX_STOP_TOKEN_IDS} ids", len(stop_token_ids))
    return stop_token_ids


def _logit_bias(
    params: engine_pb2.SamplingParams, info: RunnerInfo
) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    check_vocabulary(field, params.logit_bias.keys(), info)
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise invalid(field, "finite numbers", f"{bias} (of id {token_id})")
    return tuple(
        (token_id, max(-MAX_LOGIT_BIAS, min(bias, MAX_LOGIT_BIAS)))
        for token_id, bias in sorted(params.logit_bias.items())
    )


def _bad_words(params: engine_pb2.SamplingParams, info: RunnerInfo) -> tuple[tuple[int, ...], ...]:
    field = "sampling.bad_words"
    words = tuple(dict.fromkeys(tuple(word.token_ids) for word in params.bad_words))
    if len(words) > MAX_BAD_WORDS:
        raise invalid(field, f"at most {MAX_BAD_WORDS}", len(words))
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise invalid(field, f"1 to {MAX_BAD_WORD_TOKENS} ids each", len(word))
        check_vocabulary(field, word, info)
    return words


def _check_something_is_left(
    params: engine_pb2.SamplingParams, lists: _Lists, info: RunnerInfo
) -> None:
    """What holds for every token leaves some id; what comes and goes gives way (engine.proto)."""
    never = {word[0] for word in lists.bad_words if len(word) == 1}
    allowed = set(lists.allowed_token_ids)
    if allowed <= never if allowed else len(never) >= info.vocab_size:
        raise InvalidArgument(
            "sampling.bad_words: they leave no id to sample", field="sampling.bad_words"
        )
    if not params.min_tokens:
        return
    ends = {*lists.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
    if allowed:
        if ends >= allowed - never:
            raise InvalidArgument(
                "sampling.allowed_token_ids: each of them would end the request, so min_tokens "
                "leaves none to sample",
                field="sampling.allowed_token_ids",
            )
    elif len(ends | never) >= info.vocab_size:
        raise InvalidArgument(
            "sampling.stop_token_ids: every token would end the request, so min_tokens leaves none "
            "to sample",
            field="sampling.stop_token_ids",
        )


def _refuse_unsupported(params: engine_pb2.SamplingParams) -> None:
    """Raises for every field that the engine would otherwise ignore; bad values come first."""
    if params.stop:
        raise unsupported("sampling.stop", _TEXT + " and cancel on a match")
    if params.include_stop:
        raise unsupported("sampling.include_stop", _TEXT)
    if params.HasField("skip_special_tokens") and not params.skip_special_tokens:
        raise unsupported("sampling.skip_special_tokens", _TEXT)


def _max_tokens(params: engine_pb2.SamplingParams, prompt_tokens: int, info: RunnerInfo) -> int:
    """Output tokens: what was asked for, clamped so that prompt + output <= max_model_len."""
    context_room = info.max_model_len - prompt_tokens
    # The last sampled token's KV is never written: P + N tokens need P + N - 1 slots of the pool.
    pool_tokens = info.num_blocks * info.block_size
    pool_room = pool_tokens + 1 - prompt_tokens
    asked = params.max_tokens if params.HasField("max_tokens") else pool_room
    wanted = min(asked, context_room)
    if not 1 <= wanted <= pool_room:
        raise NeverFits(
            f"token_ids: {prompt_tokens} prompt and {max(wanted, 1)} output tokens never fit in "
            f"the KV cache, which holds {pool_tokens} tokens",
            field="token_ids",
        )
    return wanted
