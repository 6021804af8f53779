"""What a caller of LLM gives, told apart and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import numbers
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from millstream.engine.config import EngineConfig
from millstream.rpc.sampling_params import SamplingParams
from millstream.rpc.values import UINT32_MAX, check_ids, check_list

Prompt = str | Sequence[int]
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=UINT32_MAX)]]


def engine_config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in known or name == "model":
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"LLM() has no option {name!r}{hint}")
    return EngineConfig(model=model, **options)


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    wanted = "a text, a list of token ids, or a list of those"
    items: Sequence[Any] = check_list("prompts", prompts, wanted)
    is_one = len(items) > 0 and isinstance(items[0], numbers.Integral)
    return [items] if is_one else list(items)


def prompt_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt's token ids as plain ints, in a list of its own. Raises as check_ids does."""
    if isinstance(prompt, list | tuple):
        with contextlib.suppress(msgspec.ValidationError):  # check_ids knows what to say
            return msgspec.convert(prompt, _TokenIds)
    return [int(token_id) for token_id in check_ids("prompt", prompt)]


def params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(check_list("sampling_params", params, "one for all or a list")) != count:
        raise ValueError(f"sampling_params: one, or one a prompt ({count}), not {len(params)}")
    return [SamplingParams() if one is None else one for one in params]
