"""A GGUF file's metadata as a Hugging Face Llama config; what cannot be expressed is an error.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.hub.errors import GgufError

Metadata = Mapping[str, Any]
FloatArray = npt.NDArray[np.float32]

# Of the architecture's keys, those that are read below or say nothing that changes the model. Any
# other may change what the model computes, so it is refused.
_KNOWN = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_count",
        "expert_used_count",
        "tensor_data_layout",
    }
)


def llama_config(
    metadata: Metadata, vocab_size: int, rope_freqs: FloatArray | None
) -> dict[str, Any]:
    """config.json of a Llama-architecture file, but for what its tensors say (ties, biases).

    vocab_size counts the embedding's rows; rope_freqs is the file's rope_freqs.weight. Raises
    GgufError.
    """
    for key in metadata:
        if key.startswith("llama.") and key.removeprefix("llama.") not in _KNOWN:
            raise GgufError(f"the file sets {key}, which this importer does not know")
    hidden = _required(metadata, "embedding_length", int)
    heads = _required(metadata, "attention.head_count", int)
    head_dim = int(metadata.get("llama.attention.key_length", hidden // heads))
    value_dim = int(metadata.get("llama.attention.value_length", head_dim))
    rotary_dim = int(metadata.get("llama.rope.dimension_count", head_dim))
    if head_dim % 2:
        raise GgufError(f"rope needs an even head dimension, not {head_dim}")
    if value_dim != head_dim:
        raise GgufError(f"keys of {head_dim} and values of {value_dim} dimensions: must be equal")
    if rotary_dim != head_dim:
        raise GgufError(f"rope over {rotary_dim} of {head_dim} dimensions is not supported")
    if metadata.get("llama.expert_count", 0):
        raise GgufError("mixtures of experts are not supported")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _required(metadata, "feed_forward_length", int),
        "num_hidden_layers": _required(metadata, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _required(metadata, "attention.layer_norm_rms_epsilon", _float),
        "max_position_embeddings": _required(metadata, "context_length", int),
        "rope_parameters": _rope_parameters(metadata, head_dim, rope_freqs),
    }
    for name, key in (
        ("bos_token_id", "bos"),
        ("eos_token_id", "eos"),
        ("pad_token_id", "padding"),
    ):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[name] = None if token_id is None else int(token_id)
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: every id that ends an answer, not the first alone."""
    kinds = ("eos", "eot", "eom")
    found = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
    eos_ids = list(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))
    config: dict[str, Any] = {}
    if eos_ids:
        config["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = int(token_id)
    return config


def _required(metadata: Metadata, name: str, convert: Callable[[Any], Any]) -> Any:
    if (value := metadata.get(f"llama.{name}")) is None:
        raise GgufError(f"the file does not set llama.{name}")
    return convert(value)


def _float(value: Any) -> float:
    """The number that was meant: 1e-5, and not 9.999999747378752e-06, its float32 widened."""
    return float(str(np.float32(value)))


def _rope_parameters(
    metadata: Metadata, head_dim: int, rope_freqs: FloatArray | None
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": _float(metadata.get("llama.rope.freq_base", 10000.0))}
    kind = metadata.get("llama.rope.scaling.type", "none")
    scale = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
    factor = _float(scale)
    if "llama.rope.scaling.type" not in metadata and factor != 1.0:
        kind = "linear"
    original = metadata.get("llama.rope.scaling.original_context_length")
    if _float(metadata.get("llama.rope.scaling.attn_factor", 1.0)) != 1.0:
        raise GgufError("llama.rope.scaling.attn_factor other than 1 is not supported")
    if rope_freqs is not None and not np.all(rope_freqs == 1.0):
        if kind not in ("none", "llama3"):
            raise GgufError(f"rope_freqs.weight together with rope scaling {kind!r}")
        return rope | _llama3(rope["rope_theta"], head_dim, rope_freqs, original)
    match kind:
        case "none":
            return rope | {"rope_type": "default"}
        case "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        case "yarn" if original is not None:
            rope |= {"rope_type": "yarn", "factor": factor}
            for name in ("beta_fast", "beta_slow"):
                if (value := metadata.get(f"llama.rope.scaling.yarn_{name}")) is not None:
                    rope[name] = _float(value)
            return rope | {"original_max_position_embeddings": int(original)}
        case _:
            raise GgufError(f"rope scaling {kind!r} is not supported, or lacks its parameters")


def _llama3(
    theta: float, head_dim: int, divisors: FloatArray, original: int | None
) -> dict[str, Any]:
    """The llama3 parameters behind rope_freqs.weight, which holds what each frequency is divided by
    and drops the parameters. The published models' are tried; the file must agree with them."""
    factor = _float(divisors.max())
    low, high = 1.0, 4.0
    context = 8192 if original is None else int(original)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise GgufError("rope_freqs.weight is not that of a Llama 3 model: unknown rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
