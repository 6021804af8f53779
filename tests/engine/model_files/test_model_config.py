"""config.json is read whole: every key is used, checked, known to be harmless, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from millstream.engine.model_files.model_config import (
    ModelConfig,
    ModelConfigError,
    load_model_config,
    parse_model_config,
)
from millstream.engine.model_files.rope_config import RopeType
from millstream.engine.model_files.shapes import SHAPE_NAMES, named_shape

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 2,
}


def write(directory: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_what_transformers_saves_is_read(config_class: type[Any], tmp_path: Path) -> None:
    saved = config_class(num_attention_heads=8, num_key_value_heads=2, eos_token_id=[2, 7])
    saved.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.family == saved.model_type
    assert (config.num_heads, config.num_kv_heads) == (8, 2)
    assert config.head_dim == saved.head_dim
    assert config.max_position == saved.max_position_embeddings
    assert config.rope.theta == saved.rope_parameters["rope_theta"]
    assert config.qk_norm == (saved.model_type == "qwen3")
    assert config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("family", "config_class"), [("llama", LlamaConfig), ("qwen3", Qwen3Config)]
)
def test_missing_keys_take_transformers_defaults(family: str, config_class: type[Any]) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    raw = {"model_type": family, "num_hidden_layers": 2, "num_attention_heads": 32}
    raw |= {key: getattr(config_class(), key) for key in required}
    config, theirs = parse_model_config(raw), config_class(**raw)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def test_smollm2s_own_keys() -> None:
    raw = {
        **LLAMA,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "torch_dtype": "bfloat16",
    }
    config = parse_model_config(raw)
    assert config.rope.theta == 100000.0
    assert config.dtype == "bfloat16"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type='gpt2'"),
    ({"model_type": None}, "model_type=None"),
    ({"model_type": ["llama"]}, "model_type="),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"sliding_window": 128}, "sliding_window=128"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ({"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_interleaved": True}, "rope_interleaved=True"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ({"vocab_size": None}, "vocab_size=None"),
    ({"hidden_size": 64.0}, "hidden_size=64.0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"hidden_size": 66}, "num_attention_heads=4"),
    ({"head_dim": 15}, "head_dim=15"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn'"),
    ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ({"bos_token_id": "<s>"}, "bos_token_id='<s>'"),
    ({"rope_theta": -1}, "rope_theta=-1"),
    ({"rope_theta": float("inf")}, "rope_theta=inf"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
    ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_scaling.type='su'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "contradicts"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [2]}}, "mrope_section=[2]"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention="),
    ({"rope_parameters": [1]}, "rope_parameters=[1]"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta=10000.0 contradicts"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(item[0]) for item in REFUSED])
def test_row_39_what_is_not_supported_is_an_error_with_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse_model_config({**LLAMA, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3_moe"])
def test_coming_families_say_so(family: str) -> None:
    with pytest.raises(ModelConfigError, match=f"model_type='{family}' is not supported yet"):
        parse_model_config({**LLAMA, "model_type": family})


def test_qwen3_window_is_off_unless_switched_on() -> None:
    assert parse_model_config(QWEN3).qk_norm
    without_switch = {key: QWEN3[key] for key in QWEN3 if key != "use_sliding_window"}
    assert parse_model_config(without_switch).head_dim == 32
    with pytest.raises(ModelConfigError, match="use_sliding_window=True"):
        parse_model_config({**QWEN3, "use_sliding_window": True})


def test_qwen3_has_no_mlp_bias() -> None:
    with pytest.raises(ModelConfigError, match="mlp_bias"):
        parse_model_config({**QWEN3, "mlp_bias": True})


def test_unknown_features_that_are_off_are_no_features() -> None:
    assert parse_model_config({**LLAMA, "use_new_attention": False, "moe": None, "_private": 1})


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        (2, {"eos_token_id": 7}, (2, 7)),
        ([9, 2], {"eos_token_id": 7}, (2, 7, 9)),
        (2, {}, (2,)),
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, None, ()),
        (-1, {"eos_token_id": [7, 256]}, (7,)),  # no row of logits: never sampled
    ],
)
def test_row_15_eos_ids_are_the_union_of_both_files(
    eos: Any, generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": eos}, generation)
    assert load_model_config(tmp_path).eos_token_ids == expected


def test_row_15_missing_eos_is_the_class_default_only_if_no_file_speaks(tmp_path: Path) -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert load_model_config(write(tmp_path, raw)).eos_token_ids == (2,)
    assert load_model_config(write(tmp_path, raw, {"eos_token_id": 7})).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("rope", "max_position"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 3}, 1536),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_row_78_max_position_includes_the_scaling(rope: dict[str, Any], max_position: int) -> None:
    config = parse_model_config({**LLAMA, "rope_parameters": rope})
    assert config.max_position == max_position
    assert config.rope.type is RopeType(rope["rope_type"])
    assert parse_model_config({**LLAMA, "rope_scaling": rope}) == config


def test_dtype_keys() -> None:
    def dtype(**keys: Any) -> str | None:
        return parse_model_config({**LLAMA, **keys}).dtype

    assert dtype() is None
    assert dtype(torch_dtype="bfloat16") == "bfloat16"
    assert dtype(dtype="float16", torch_dtype="bfloat16") == "float16"
    assert dtype(dtype="torch.float32") == "float32"


def test_broken_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"cannot read .*config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="is not JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="is not a JSON object"):
        load_model_config(tmp_path)


def test_named_shapes() -> None:
    shapes: dict[str, ModelConfig | None] = {name: named_shape(name) for name in SHAPE_NAMES}
    billions = {name: round(parameters(shape) / 1e9, 2) for name, shape in shapes.items() if shape}
    assert billions == {
        "qwen3-0.6b": 0.60,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-14b": 14.77,
        "qwen3-32b": 32.76,
        "llama-3.2-1b": 1.24,
        "smollm2-135m": 0.13,
    }
    small = shapes["qwen3-0.6b"]
    assert small is not None
    assert small.num_layers * 2 * small.num_kv_heads * small.head_dim * 2 == 114_688  # KV a token
    assert named_shape("gpt-5") is None


def parameters(shape: ModelConfig) -> int:
    """As model cards count them, without the norms' few."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    layer = shape.hidden_size * (heads * shape.head_dim + 3 * shape.intermediate_size)
    embeddings = 1 if shape.tie_word_embeddings else 2
    return shape.num_layers * layer + embeddings * shape.vocab_size * shape.hidden_size


def test_reading_a_config_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, millstream.engine.model_files.shapes as s; s.named_shape('qwen3-0.6b');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
