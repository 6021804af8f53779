"""What the user asks for, checked and turned into protobuf, before it is part of any call.

A job is one prompt with its parameters. In a list a bad prompt does not spoil the others: its place
holds the exception.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, overload

from millstream.rpc.errors import InvalidArgument, MillstreamError
from millstream.rpc.sampling_params import SamplingParams, to_proto
from millstream.rpc.values import (
    UINT32_MAX,
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_text,
    refusal,
)
from millstream.v1 import engine_pb2, tokenizer_pb2

_INT32 = (-(2**31), 2**31 - 1)
# A prompt's token takes about a fourth of the time that one of an answer does in a full batch:
# Qwen3-14B on an H200 40 us and 155 (docs/performance.md: prefill, flagship).
PROMPT_LOAD = 0.25
_USUAL_TOKENS = 512  # of an answer whose length nobody bounded
_MAX_SAMPLES = 1024  # handles that a request may take; the engine's own limit is lower

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # "role", "content", and what the chat template knows besides


class RequestOptions(TypedDict, total=False):
    """Keywords of generate, stream, chat and chat_stream."""

    detokenize: bool  # default True; False: token ids only, text stays ""
    # Ends the request with DeadlineExceeded, queueing and waiting for services included; soon after
    # it also when a service says nothing.
    timeout_s: float | None
    cache_salt: str  # prefix-cache blocks are shared only between equal salts
    request_id: str | Sequence[str]  # for logs; one per prompt
    priority: int  # smaller is served first; default 0
    # How often a request that finds the engine's queue full is sent again, each time after the wait
    # that the engine asks for and up to half as long again; then QueueFull is raised. Default:
    # until it has room (or timeout_s) in generate and chat, never in streams.
    max_retries: int | None


class ChatOptions(RequestOptions, total=False):
    """Further keywords of chat and chat_stream."""

    add_generation_prompt: bool  # default True, False with continue_final_message
    continue_final_message: bool  # go on with the last message
    template: str  # one of the model's named templates
    tools: Sequence[Mapping[str, Any]]  # tool definitions for the template
    template_variables: Mapping[str, Any]
    plain_content: bool  # a special token's text inside a message is just text


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One prompt. `submission.token_ids` are empty until `source`, if there is one, is encoded."""

    source: tokenizer_pb2.EncodeInput | None
    submission: engine_pb2.Submission
    detokenize: bool
    timeout_s: float | None
    max_retries: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    bad_words: tuple[str, ...]  # texts whose ids are still to be added to submission.sampling
    cached_tokens: int = 0  # of the prompt, that the engine it goes to has had before

    @property
    def load(self) -> float:
        """What one sample of an encoded job is for its engine, at most, as far as is known: in
        tokens of answers."""
        answer = self.sampling.max_tokens
        prompt = len(self.submission.token_ids) - self.cached_tokens
        return prompt * PROMPT_LOAD + (_USUAL_TOKENS if answer is None else answer)

    @property
    def num_samples(self) -> int:
        """As asked for: the engine has not seen it yet."""
        return max(1, min(self.sampling.n or 1, _MAX_SAMPLES))


def is_one_prompt(prompt: object) -> bool:
    """Whether it is a text or a flat list of ids, not a list of prompts."""
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], numbers.Integral)
    )


def is_one_chat(messages: object) -> bool:
    """Whether it is one conversation, not a list of them."""
    return isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)


def prompt_job(
    prompt: object, params: SamplingParams | None, options: RequestOptions, request_id: str = ""
) -> Job:
    """Raises InvalidArgument or Unsupported naming the bad argument."""
    source: tokenizer_pb2.EncodeInput | None = None
    token_ids: Sequence[int] = ()
    if isinstance(prompt, str):
        source = tokenizer_pb2.EncodeInput(text=check_text("prompt", prompt))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        token_ids = check_ids("prompt", prompt)
    else:
        raise InvalidArgument(
            "prompt: a string, a list of token ids, or a list of those, "
            f"not {type(prompt).__name__}",
            field="prompt",
        )
    return _job(source, token_ids, params, options, request_id)


def chat_job(
    messages: object, params: SamplingParams | None, options: ChatOptions, request_id: str = ""
) -> Job:
    """Raises InvalidArgument or Unsupported naming the bad argument."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidArgument("messages: a non-empty list of messages", field="messages")
    chat = tokenizer_pb2.Chat(
        messages=[_message(i, message) for i, message in enumerate(messages)],
        add_generation_prompt=_flag("add_generation_prompt", options),
        continue_final_message=_flag("continue_final_message", options),
        template=check_text("template", options.get("template", "")),
        tools_json=_json("tools", options.get("tools")),
        variables_json=_json("template_variables", options.get("template_variables")),
        plain_content=_flag("plain_content", options),
    )
    return _job(tokenizer_pb2.EncodeInput(chat=chat), (), params, options, request_id)


def jobs_of(
    make: Callable[..., Job],
    items: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: RequestOptions,
) -> Iterator[Job | MillstreamError]:
    """A job for each prompt or chat, or why there is none, made when it is drawn, of what the lists
    have now; `make` is prompt_job or chat_job. Raises InvalidArgument unless params are one for all
    or one for each."""
    all_params = _each("sampling_params", params, len(items), (SamplingParams, type(None)))
    ids = _each("request_id", options.get("request_id", ""), len(items), str)

    def made(
        item: Any, one_params: SamplingParams | None, request_id: str
    ) -> Job | MillstreamError:
        try:
            return make(item, one_params, options, request_id)
        except MillstreamError as error:
            return error

    return map(made, list(items), all_params, ids)


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Raises TypeError for a keyword that the TypedDict `known` does not have."""
    for name in options:
        if name not in known.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")


# ----


def _job(
    source: tokenizer_pb2.EncodeInput | None,
    token_ids: Sequence[int],
    params: SamplingParams | None,
    options: RequestOptions,
    request_id: str,
) -> Job:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise refusal("sampling_params", "SamplingParams", params)
    stop = params.stop_strings
    check_bool("include_stop", params.include_stop)
    check_bool("skip_special_tokens", params.skip_special_tokens)
    max_retries = options.get("max_retries")
    detokenize = _flag("detokenize", options, default=True)
    if stop and not detokenize:
        raise InvalidArgument("stop: stop strings need detokenize=True", field="stop")
    return Job(
        source=source,
        submission=engine_pb2.Submission(
            token_ids=token_ids,
            sampling=to_proto(params),
            request_id=check_text("request_id", request_id),
            cache_salt=check_text("cache_salt", options.get("cache_salt", "")),
            priority=check_int("priority", options.get("priority", 0), *_INT32),
        ),
        detokenize=detokenize,
        timeout_s=_timeout(options.get("timeout_s")),
        max_retries=None
        if max_retries is None
        else check_int("max_retries", max_retries, 0, UINT32_MAX),
        sampling=params,
        stop=stop,
        bad_words=params.bad_word_texts,
    )


def _message(index: int, message: object) -> tokenizer_pb2.ChatMessage:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidArgument(f'{name}: a dict with "role" and "content"', field="messages")
    extra = {k: v for k, v in message.items() if k not in ("role", "content")}
    content = message.get("content")
    return tokenizer_pb2.ChatMessage(
        role=check_text(f"{name}.role", message["role"]),
        content=check_text(f"{name}.content", "" if content is None else content),
        extra_json=_json(name, extra),
    )


def _json(name: str, value: object) -> str:
    if not value:
        return ""
    try:
        return check_text(name, json.dumps(value, allow_nan=False, ensure_ascii=False))
    except InvalidArgument:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: not JSON: {error}", field=name) from None


@overload
def _flag(name: str, options: Mapping[str, Any], default: bool) -> bool: ...
@overload
def _flag(name: str, options: Mapping[str, Any]) -> bool | None: ...
def _flag(name: str, options: Mapping[str, Any], default: bool | None = None) -> bool | None:
    """A keyword that is True or False, or not given (None)."""
    value = options.get(name)
    return default if value is None else check_bool(name, value)


def _timeout(timeout_s: object) -> float | None:
    if timeout_s is None:
        return None
    seconds = check_float("timeout_s", timeout_s)
    if not 0 < seconds <= 2**32 / 1000 - 1:
        raise refusal("timeout_s", "seconds above 0 and below 4 million", timeout_s)
    return seconds


def _each(name: str, value: Any, count: int, kind: Any) -> Sequence[Any]:
    """One value for all, or one for each."""
    if isinstance(value, kind):
        return [value] * count
    if isinstance(value, Sequence):
        if len(value) == count:
            return list(value)
        raise InvalidArgument(f"{name}: {len(value)} for {count} prompts", field=name)
    raise refusal(name, "one for all or a list with one for each", value)
