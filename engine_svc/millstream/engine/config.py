"""The engine's settings: one frozen value and its flags; nothing is read from elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import numbers
from dataclasses import dataclass, field
from typing import Any

from millstream.rpc.parsing import number

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "triton", "flash-attn", "torch")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
GENERATION_CONFIGS = ("auto", "none")


def _flag(default: Any, help_text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"argument": {"help": help_text, **argument}})


def _number(
    default: float | None, low: float, high: float, help_text: str, *, kind: type = int
) -> Any:
    argument = {"help": help_text, "type": number(kind, low, high)}
    return field(default=default, metadata={"argument": argument, "range": (kind, low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Each field is a flag of `millstream-engine` and a keyword of LLM and
    launch; None means "chosen from the model and the hardware"."""

    model: str | None = _flag(None, "model folder or Hugging Face id; default: the embedded model")
    served_model_name: str | None = _flag(
        None, "name to tell clients; default: the id, or the folder's name"
    )
    dtype: str = _flag(
        "auto",
        "type of weights and arithmetic; auto: float32 on CPU, the checkpoint's on CUDA",
        choices=DTYPES,
    )
    device: str = _flag("auto", "where the model runs; auto: CUDA if there is one", choices=DEVICES)
    load_format: str = _flag(
        "auto", "dummy: random weights from config.json alone", choices=LOAD_FORMATS
    )
    generation_config: str = _flag(
        "auto",
        "where a request's unset sampling parameters come from; auto: the model's "
        "generation_config.json, if it sets them; none: the protocol's defaults",
        choices=GENERATION_CONFIGS,
    )
    max_num_seqs: int | None = _number(
        None,
        1,
        (1 << 16) - 1,  # a grid's second axis, in sampling
        "most sequences in one step; default: 256, or 1024 on GPUs of 70 GiB and more",
    )
    max_num_batched_tokens: int | None = _number(
        None, 1, 1 << 24, "most tokens in one step; default: 8192 on CUDA, 2048 on CPU"
    )
    max_model_len: int | None = _number(
        None,
        2,
        1 << 30,
        "most tokens of prompt and output together; default: "
        "the model's, shrunk to what the KV cache holds",
    )
    gpu_memory_utilization: float = _number(
        0.92, 0.01, 1, "share of the GPU's memory for weights, KV cache and workspaces", kind=float
    )
    kv_cache_bytes: int | None = _number(
        None, 1, 1 << 50, "size of the KV cache; default: from measured memory"
    )
    block_size: int | None = _number(
        None, 1, 1 << 16, "tokens per KV block; default: 64 on CUDA (256 for flash-attn), 16 on CPU"
    )
    prefix_caching: bool = _flag(True, "reuse the KV blocks of equal prompt prefixes")
    attention_backend: str = _flag(
        "auto",
        "what computes attention, norms and sampling; auto: triton on CUDA where the "
        "model's shape has kernels, torch elsewhere; flash-attn: attention by that package, the "
        "rest as with triton",
        choices=ATTENTION_BACKENDS,
    )
    batch_invariant: bool = _flag(
        False, "a request's tokens are the same alone and in any batch, to the bit; slower"
    )
    enforce_eager: bool = _flag(False, "no CUDA graphs")
    tensor_parallel_size: int = _number(
        1, 1, 1024, "ranks that share one model, each with a GPU, or on CPUs with some of the cores"
    )
    threads: int | None = _number(
        None, 1, 1024, "CPU threads for the model's arithmetic; default: one a core"
    )
    max_queued_requests: int = _number(
        16384,
        0,
        1 << 24,
        "requests that may wait before new ones are refused with RESOURCE_EXHAUSTED",
    )
    step_timeout_s: float = _number(
        30.0,
        0.001,
        1e6,
        "health turns NOT_SERVING when a step takes longer than so "
        "many seconds and work is pending",
        kind=float,
    )
    seed: int = _number(0, 0, (1 << 63) - 1, "seed of dummy weights")
    runner: str = _flag(
        "model",
        "model; or instant, which answers at once with made-up tokens "
        "(benchmarks); or module:function (tests)",
    )

    def __post_init__(self) -> None:
        """Raises ValueError naming the first field with a bad value."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            wanted = None if value is None and item.default is None else _wanted(item, value)
            if wanted is not None:
                raise ValueError(f"{item.name}: {wanted}, not {value!r}")


def _wanted(item: dataclasses.Field[Any], value: Any) -> str | None:
    """What a field takes, if the value is not that."""
    if "range" in item.metadata:
        kind, low, high = item.metadata["range"]
        base = numbers.Integral if kind is int else numbers.Real
        if not isinstance(value, bool) and isinstance(value, base) and low <= value <= high:
            return None
        return f"a {'whole ' if kind is int else ''}number from {low} to {high}"
    if (choices := item.metadata["argument"].get("choices")) is not None:
        return None if value in choices else f"one of {', '.join(choices)}"
    kind, wanted = (bool, "True or False") if isinstance(item.default, bool) else (str, "a string")
    return None if isinstance(value, kind) else wanted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of EngineConfig."""
    for item in dataclasses.fields(EngineConfig):
        options = dict(item.metadata["argument"])
        name = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        parser.add_argument(name, default=item.default, **options)


def from_arguments(arguments: argparse.Namespace) -> EngineConfig:
    """The config that parsed flags describe."""
    names = [item.name for item in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(arguments, name) for name in names})
