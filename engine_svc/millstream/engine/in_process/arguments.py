"""What a caller of LLM gives, told apart and checked."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Sequence
from typing import Any

from millstream.engine.config import EngineConfig
from millstream.rpc.sampling_params import SamplingParams
from millstream.rpc.values import check_list

Prompt = str | Sequence[int]


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


def params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(check_list("sampling_params", params, "one for all or a list")) != count:
        raise ValueError(f"sampling_params: one, or one a prompt ({count}), not {len(params)}")
    return [SamplingParams() if one is None else one for one in params]
