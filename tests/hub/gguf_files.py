"""Writes tiny random Llama models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|eot|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r")


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in its order."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random model; quantised rows need multiples of 32, and head_dim is not hidden/heads."""
    vocab = len(CONTROL) + 256 + len(MERGES)
    settings = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    for parameter in model.parameters():  # also norms and biases, which start as ones and zeros
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a q or k projection's rows."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tensor_type: Type = Type.F32,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes the model. In `metadata`, None leaves a key out; `drop` leaves tensors out."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values = _metadata(config) | dict(metadata or {})
    for key, value in values.items():
        _add(writer, key, value)
    for name, array in _tensors(model):
        if name not in drop:
            kind = Type.F32 if array.ndim == 1 else tensor_type
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected_state(model: LlamaForCausalLM, tensor_type: Type) -> dict[str, torch.Tensor]:
    """The model's weights after the file's quantisation, as bf16."""
    state = {}
    for name, parameter in model.state_dict().items():
        array = parameter.numpy()
        if array.ndim > 1:
            array = dequantize(quantize(array, tensor_type), tensor_type)
        state[name] = torch.from_numpy(np.array(array)).bfloat16()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _metadata(config: LlamaConfig) -> dict[str, Any]:
    tokens = [*CONTROL, *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _tensors(model: LlamaForCausalLM) -> list[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = []
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = parameter.numpy()
        if ".q_proj." in name:
            array = permute(array, model.config.num_attention_heads)
        if ".k_proj." in name:
            array = permute(array, model.config.num_key_value_heads)
        tensors.append((names.get_name(name, try_suffixes=(".weight", ".bias")), array))
    return tensors
