"""The engine. `LLM` and `SamplingParams` come from here; only the use of LLM imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.engine.llm import LLM
    from millstream.rpc.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    match name:
        case "LLM":
            from millstream.engine.llm import LLM

            return LLM
        case "SamplingParams":
            from millstream.rpc.sampling_params import SamplingParams

            return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
