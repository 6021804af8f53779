"""The one place where a submission becomes a Request: all checks and defaults of engine.proto.

Both the gRPC front end and the in-process LLM come through here, so what the scheduler gets is
never out of range. Errors name the bad field by its proto path ("sampling.top_p", "token_ids").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from millstream.engine.plan import RunnerInfo
from millstream.engine.request import Request, Sampling
from millstream.rpc.errors import InvalidArgument, NeverFits, PromptTooLong, Unsupported
from millstream.v1 import engine_pb2

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024  # bounds what a slot of the runner holds
MAX_NAME_LENGTH = 1024  # of request_id and cache_salt, in characters


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
_NOT_YET: tuple[_Number, ...] = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_TEXT = "text is the Tokenizer service's business: give it to Detokenize"


def to_request(
    submission: engine_pb2.Submission, *, key: int, info: RunnerInfo, random_seed: int
) -> Request:
    """The submission as the scheduler takes it; `random_seed` (64 bits) serves if it sets no seed.

    Raises InvalidArgument (a bad value), Unsupported (a field the engine does not do yet),
    PromptTooLong (no room for output within max_model_len) or NeverFits (larger than the KV pool).
    """
    if submission.priority:
        raise _unsupported("priority", "only 0 so far")
    if submission.HasField("timeout_ms") and submission.timeout_ms == 0:
        raise _invalid("timeout_ms", "at least 1", 0)
    for field in ("request_id", "cache_salt"):
        length = len(getattr(submission, field))
        if length > MAX_NAME_LENGTH:
            raise _invalid(field, f"at most {MAX_NAME_LENGTH} characters", length)
    token_ids = list(submission.token_ids)
    _check_prompt(token_ids, info)
    numbers = _check_numbers(submission.sampling)
    _refuse_unsupported(submission.sampling, numbers, info)
    return Request(
        key=key,
        token_ids=token_ids,
        sampling=_resolve(submission.sampling, numbers, len(token_ids), info, random_seed),
        request_id=submission.request_id,
        cache_salt=submission.cache_salt,
    )


def resolved_proto(request: Request) -> engine_pb2.SamplingParams:
    """The request's parameters with every default filled in, as Accepted tells them."""
    sampling = request.sampling
    return engine_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        n=1,
        presence_penalty=_RANGES["presence_penalty"].default,
        frequency_penalty=_RANGES["frequency_penalty"].default,
        repetition_penalty=_RANGES["repetition_penalty"].default,
    )


def _invalid(field: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{field}: {wanted}, not {value}", field=field)


def _unsupported(field: str, why: str) -> Unsupported:
    return Unsupported(f"{field}: not supported: {why}", field=field)


def _check_prompt(token_ids: list[int], info: RunnerInfo) -> None:
    if not token_ids:
        raise InvalidArgument("token_ids: at least one id, not an empty prompt", field="token_ids")
    if len(token_ids) >= info.max_model_len:
        raise PromptTooLong(
            f"token_ids: {len(token_ids)} ids leave no room for output: prompt and output together "
            f"have at most {info.max_model_len} tokens (max_model_len)",
            field="token_ids",
        )
    _check_vocabulary("token_ids", token_ids, info)


def _check_vocabulary(field: str, token_ids: Collection[int], info: RunnerInfo) -> None:
    if token_ids and max(token_ids) >= info.vocab_size:
        index, bad = next(pair for pair in enumerate(token_ids) if pair[1] >= info.vocab_size)
        raise InvalidArgument(
            f"{field}: ids from 0 to {info.vocab_size - 1}, not {bad} (at index {index})",
            field=field,
        )


def _check_numbers(params: engine_pb2.SamplingParams) -> dict[_Number, float]:
    """Every float field, checked; its default where it is unset."""
    numbers: dict[_Number, float] = {}
    for name, allowed in _RANGES.items():
        value: float = getattr(params, name) if params.HasField(name) else allowed.default
        if value not in allowed:
            raise _invalid(f"sampling.{name}", str(allowed), f"{value:.7g}")
        numbers[name] = value
    return numbers


def _refuse_unsupported(
    params: engine_pb2.SamplingParams, numbers: Mapping[_Number, float], info: RunnerInfo
) -> None:
    """Raises for every field that the engine would otherwise ignore; bad values come first."""
    if "" in params.stop:
        raise InvalidArgument("sampling.stop: non-empty strings only", field="sampling.stop")
    if params.HasField("n") and params.n == 0:
        raise _invalid("sampling.n", "at least 1", 0)
    if params.HasField("logprobs") and params.logprobs > MAX_LOGPROBS:
        raise _invalid("sampling.logprobs", f"from 0 to {MAX_LOGPROBS}", params.logprobs)
    _check_vocabulary("sampling.logit_bias", params.logit_bias.keys(), info)
    if not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        raise InvalidArgument("sampling.logit_bias: finite numbers", field="sampling.logit_bias")
    _check_vocabulary("sampling.allowed_token_ids", params.allowed_token_ids, info)

    structured = params.WhichOneof("structured_output")
    if structured == "json_object" and not params.json_object:
        structured = None
    refused: dict[str, tuple[bool, str]] = {
        **{name: (numbers[name] != _RANGES[name].default, "not yet") for name in _NOT_YET},
        "stop": (bool(params.stop), _TEXT + " and cancel on a match"),
        "include_stop": (params.include_stop, _TEXT),
        "skip_special_tokens": (
            params.HasField("skip_special_tokens") and not params.skip_special_tokens,
            _TEXT,
        ),
        "n": (params.n > 1, "only 1 so far"),
        "logit_bias": (bool(params.logit_bias), "not yet"),
        "allowed_token_ids": (bool(params.allowed_token_ids), "not yet"),
        "bad_words": (bool(params.bad_words), "not yet"),
        "logprobs": (params.HasField("logprobs"), "not yet"),
        "prompt_logprobs": (params.HasField("prompt_logprobs"), "not yet"),
        structured or "structured_output": (structured is not None, "not yet"),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise _unsupported(f"sampling.{name}", why)


def _resolve(
    params: engine_pb2.SamplingParams,
    numbers: Mapping[_Number, float],
    prompt_tokens: int,
    info: RunnerInfo,
    random_seed: int,
) -> Sampling:
    if params.top_k < -1:
        raise _invalid("sampling.top_k", "-1 or 0 (off), or at least 1", params.top_k)
    max_tokens = _max_tokens(params, prompt_tokens, info)
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise _invalid(
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
        stop_token_ids=_stop_token_ids(params, info),
        ignore_eos=params.ignore_eos,
    )


def _max_tokens(params: engine_pb2.SamplingParams, prompt_tokens: int, info: RunnerInfo) -> int:
    """Output tokens: what was asked for, clamped so that prompt + output <= max_model_len."""
    if params.HasField("max_tokens") and params.max_tokens == 0:
        raise _invalid("sampling.max_tokens", "at least 1", 0)
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


def _stop_token_ids(params: engine_pb2.SamplingParams, info: RunnerInfo) -> tuple[int, ...]:
    field = "sampling.stop_token_ids"
    _check_vocabulary(field, params.stop_token_ids, info)
    stop_token_ids = tuple(dict.fromkeys(params.stop_token_ids))
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid(field, f"at most {MAX_STOP_TOKEN_IDS} ids", len(stop_token_ids))
    ends = {*stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
    if params.min_tokens and len(ends) >= info.vocab_size:
        raise InvalidArgument(
            f"{field}: every token would end the request, so min_tokens leaves none to sample",
            field=field,
        )
    return stop_token_ids
