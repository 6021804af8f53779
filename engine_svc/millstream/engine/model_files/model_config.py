"""Reads config.json and generation_config.json into one frozen ModelConfig.

Each key is read, checked against the one value that is supported, or on the list of bookkeeping
keys; anything else is a ModelConfigError at start. Keys that are missing take the defaults of
transformers' config classes. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.engine.model_files.config_values import (
    ModelConfigError,
    boolean,
    positive_int,
    positive_number,
    shortened,
    unsupported,
)
from millstream.engine.model_files.rope_config import RopeConfig, RopeType, parse_rope

__all__ = ["ModelConfig", "ModelConfigError", "load_model_config", "parse_model_config"]

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder-only model, and what its checkpoint says of generation."""

    family: str  # a key of FAMILIES
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # most tokens of a sequence, RoPE scaling included
    tie_word_embeddings: bool
    attention_bias: bool  # of q, k, v and o
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of q and k, before RoPE
    eos_token_ids: tuple[int, ...]  # union of both files, ascending
    bos_token_id: int | None
    dtype: str | None  # of the checkpoint: float32, bfloat16 or float16; None: not told

    @property
    def layer_products(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of what each layer multiplies by, in its order."""
        attended = self.num_heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "o": (self.hidden_size, attended),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str  # the only entry allowed in `architectures`
    defaults: Mapping[str, Any]  # transformers' class defaults of keys that may be missing


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM",
        {"num_key_value_heads": None, "head_dim": None, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "head_dim": 128, "bos_token_id": None, "eos_token_id": None},
    ),
}
# Known, and on their way: their error says so instead of "unknown".
_PLANNED = ("qwen2", "mistral", "qwen3_moe")

_DTYPES = ("float32", "bfloat16", "float16")

# Keys that may hold but one value; absent and null mean that value too.
_REQUIRED_VALUES: Mapping[str, Any] = {
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_sliding_window": False,
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    rope_theta rope_scaling rope_parameters tie_word_embeddings attention_bias mlp_bias
    eos_token_id bos_token_id dtype torch_dtype sliding_window layer_types"""
)

# Keys that change nothing of what this engine computes: training, bookkeeping, other libraries, and
# the generation parameters that old files keep here (requests carry their own).
_IGNORED = _words(
    """transformers_version name_or_path auto_map tokenizer_class prefix task_specific_params
    finetuning_task problem_type id2label label2id num_labels is_llama_config transformers.js_config
    unsloth_fixed unsloth_version torchscript use_bfloat16 attn_implementation attention_dropout
    chunk_size_feed_forward hidden_dropout embd_pdrop resid_pdrop attn_pdrop initializer_range
    pretraining_tp use_cache output_hidden_states output_attentions return_dict max_window_layers
    pad_token_id unk_token_id sep_token_id decoder_start_token_id tie_encoder_decoder

    model_max_length max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    epsilon_cutoff eta_cutoff"""
)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads a model folder.

    Raises:
        ModelConfigError: a file is missing or not JSON, or holds something unsupported.
    """
    raw = read_json(model_dir / CONFIG_FILE)
    generation_file = model_dir / GENERATION_CONFIG_FILE
    generation = read_json(generation_file) if generation_file.exists() else {}
    return parse_model_config(raw, generation)


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The ModelConfig of a parsed config.json and generation_config.json; errors as above."""
    family_name = _family(raw)
    family = FAMILIES[family_name]
    _check_keys(raw)
    values = {**family.defaults, **raw}

    hidden_size = positive_int(values, "hidden_size")
    num_heads = positive_int(values, "num_attention_heads")
    num_kv_heads = (
        num_heads
        if values["num_key_value_heads"] is None
        else positive_int(values, "num_key_value_heads")
    )
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}"
        )
    mlp_bias = boolean(values, "mlp_bias")
    if mlp_bias and family_name != "llama":
        raise ModelConfigError(f"mlp_bias=true is not supported for model_type={family_name!r}")
    vocab_size = positive_int(values, "vocab_size")
    max_position_embeddings = positive_int(values, "max_position_embeddings")
    rope = parse_rope(values, max_position_embeddings)
    return ModelConfig(
        family=family_name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=positive_int(values, "intermediate_size"),
        num_layers=positive_int(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(values, hidden_size, num_heads),
        rms_norm_eps=positive_number(values, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position=_max_position(rope, max_position_embeddings),
        tie_word_embeddings=boolean(values, "tie_word_embeddings"),
        attention_bias=boolean(values, "attention_bias"),
        mlp_bias=mlp_bias,
        qk_norm=family_name == "qwen3",
        eos_token_ids=_eos_token_ids(raw, generation or {}, family, vocab_size),
        bos_token_id=_bos_token_id(values),
        dtype=_dtype(values),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ModelConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    return value


def _family(raw: Mapping[str, Any]) -> str:
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        if name in _PLANNED:
            raise ModelConfigError(
                f"model_type={name!r} is not supported yet; supported: {', '.join(FAMILIES)}"
            )
        raise unsupported("model_type", name, ", ".join(FAMILIES))
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [FAMILIES[name].architecture]:
        raise unsupported("architectures", architectures, FAMILIES[name].architecture)
    return name


def _head_dim(values: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if values["head_dim"] is not None:
        head_dim = positive_int(values, "head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise ModelConfigError(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}, "
            "and head_dim is missing"
        )
    if head_dim % 2:
        raise ModelConfigError(f"head_dim={head_dim} is odd, which RoPE does not allow")
    return head_dim


def _check_keys(raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        if key in _REQUIRED_VALUES:
            wanted = _REQUIRED_VALUES[key]
            if value is not None and value != wanted:
                raise unsupported(key, value, repr(wanted))
        elif key in _READ or key in _IGNORED or key.startswith("_"):
            continue
        elif value is not None and value is not False:  # what is off changes nothing
            raise ModelConfigError(
                f"{key}={shortened(value)} is an unknown key: it may change what the model "
                "computes, so the model is not served"
            )
    layer_types = raw.get("layer_types")
    if layer_types is not None and set(layer_types) - {"full_attention"}:
        raise unsupported("layer_types", sorted(set(layer_types)), "full_attention")
    # Qwen3 writes a window that is off unless use_sliding_window says otherwise.
    if raw.get("sliding_window") is not None and raw["model_type"] != "qwen3":
        raise unsupported("sliding_window", raw["sliding_window"], "null")


def _dtype(values: Mapping[str, Any]) -> str | None:
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    value = values.get(key)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise unsupported(key, value, ", ".join(_DTYPES))
    return name


def _bos_token_id(values: Mapping[str, Any]) -> int | None:
    value = values["bos_token_id"]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ModelConfigError(f"bos_token_id={value!r} must be an id")
    return value


def _eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], family: _Family, vocab_size: int
) -> tuple[int, ...]:
    found: set[int] = set()
    told = False
    for name, source in ((CONFIG_FILE, raw), (GENERATION_CONFIG_FILE, generation)):
        value = source.get("eos_token_id")
        told |= "eos_token_id" in source
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ModelConfigError(f"eos_token_id={value!r} in {name} must be ids")
            found.add(token_id)
    if not told and family.defaults["eos_token_id"] is not None:
        found.add(family.defaults["eos_token_id"])
    # An id without a row of logits (some files say -1) can never be sampled.
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < vocab_size))


def _max_position(rope: RopeConfig, max_position_embeddings: int) -> int:
    match rope.type:
        case RopeType.LINEAR | RopeType.DYNAMIC | RopeType.YARN:
            # These files keep the unscaled limit and name a factor: the original limit times it.
            return int(rope.original_max_position * rope.factor)
        case RopeType.DEFAULT | RopeType.LLAMA3:
            return max_position_embeddings
