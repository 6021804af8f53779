"""The engine's settings: one frozen value and its flags; nothing is read from elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "triton", "torch")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _flag(default: Any, help_text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **argument})


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
    max_num_seqs: int | None = _flag(
        None,
        "most sequences in one step; default: 256, or 1024 on GPUs of 70 GiB and more",
        type=int,
    )
    max_num_batched_tokens: int | None = _flag(
        None, "most tokens in one step; default: 8192 on CUDA, 2048 on CPU", type=int
    )
    max_model_len: int | None = _flag(
        None,
        "most tokens of prompt and output together; default: "
        "the model's, shrunk to what the KV cache holds",
        type=int,
    )
    gpu_memory_utilization: float = _flag(
        0.92, "share of the GPU's memory for weights, KV cache and workspaces", type=float
    )
    kv_cache_bytes: int | None = _flag(
        None, "size of the KV cache; default: from measured memory", type=int
    )
    block_size: int | None = _flag(
        None, "tokens per KV block; default: 64 on CUDA, 16 on CPU", type=int
    )
    prefix_caching: bool = _flag(True, "reuse the KV blocks of equal prompt prefixes")
    attention_backend: str = _flag(
        "auto",
        "what computes attention, norms and sampling; auto: triton on CUDA where the "
        "model's shape has kernels, torch elsewhere",
        choices=ATTENTION_BACKENDS,
    )
    enforce_eager: bool = _flag(False, "no CUDA graphs")
    tensor_parallel_size: int = _flag(1, "GPUs that share one model; only 1 so far", type=int)
    threads: int | None = _flag(
        None, "CPU threads for the model's arithmetic; default: one a core", type=int
    )
    max_queued_requests: int = _flag(
        16384,
        "requests that may wait before new ones are refused with RESOURCE_EXHAUSTED",
        type=int,
    )
    step_timeout_s: float = _flag(
        30.0,
        "health turns NOT_SERVING when a step takes longer than so "
        "many seconds and work is pending",
        type=float,
    )
    seed: int = _flag(0, "seed of dummy weights", type=int)
    runner: str = _flag(
        "model",
        "model; or instant, which answers at once with made-up tokens "
        "(benchmarks); or module:function (tests)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of EngineConfig."""
    for item in dataclasses.fields(EngineConfig):
        options = dict(item.metadata)
        name = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        parser.add_argument(name, default=item.default, **options)


def from_arguments(arguments: argparse.Namespace) -> EngineConfig:
    """The config that parsed flags describe."""
    names = [item.name for item in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(arguments, name) for name in names})
