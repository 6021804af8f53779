"""Imports a Llama-architecture GGUF file as a Hugging Face model folder, without torch.

The folder holds bf16 safetensors, config.json, generation_config.json, the tokenizer and its chat
template. Whatever the file says that the folder could not say is an error, never left out.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.hub.checkpoint import DEFAULT_MAX_SHARD_BYTES, write_bf16
from millstream.hub.errors import GgufError
from millstream.hub.gguf_config import generation_config, llama_config
from millstream.hub.gguf_file import read_gguf
from millstream.hub.gguf_tokenizer import write_tokenizer
from millstream.hub.progress import OnProgress, silent

FloatArray = npt.NDArray[np.float32]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_ROPE_FREQS = "rope_freqs.weight"


def import_gguf(
    file: Path,
    out_dir: Path,
    on_progress: OnProgress = silent,
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> None:
    """Writes `file`'s model into `out_dir`, which must not exist or be empty; all of it or nothing.

    Raises GgufError for what cannot be imported, OSError where writing fails.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise GgufError(f"{out_dir} exists and is not an empty folder")
    metadata, tensors = read_gguf(file)
    _check_kind(metadata)
    _check_types(tensors)
    config = _config(metadata, tensors)
    # An existing folder may be a mount, a link or ".", which no rename can replace.
    place = out_dir if out_dir.exists() else out_dir.parent
    place.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=place))
    try:
        partial.chmod(0o755)
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", generation_config(metadata))
        write_tokenizer(metadata, partial, config["vocab_size"])
        _write_weights(partial, tensors, config, on_progress, max_shard_bytes)
        if place == out_dir:
            _move_into(out_dir, partial)
        else:
            partial.replace(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_into(folder: Path, partial: Path) -> None:
    """Its files into `folder`, config.json last: without it a folder is no model."""
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(folder / path.name)


def _check_kind(metadata: Mapping[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(
            f"the file's architecture is {architecture!r}, only 'llama' can be imported"
        )
    if metadata.get("split.count", 1) > 1:
        raise GgufError("the model is split over several files; join them with llama-gguf-split")


def _check_types(tensors: Mapping[str, Any]) -> None:
    """Tries a row of each tensor type: an unknown one is found before anything is written."""
    seen = {tensor.tensor_type: tensor for tensor in tensors.values()}
    for tensor_type, tensor in seen.items():
        try:
            _values(np.atleast_1d(tensor.data)[:1], tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise GgufError(
                f"{tensor.name} has tensor type {tensor_type.name}, which gguf cannot dequantise"
            ) from error


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """config.json; raises GgufError when a tensor is missing, unknown or has another shape."""
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise GgufError("the file has no token_embd.weight")
    if len(_shape(embedding)) != 2:
        raise GgufError(f"token_embd.weight has shape {_shape(embedding)}, which is no matrix")
    freqs = tensors.get(_ROPE_FREQS)
    rope_freqs = None if freqs is None else _values(freqs.data, freqs.tensor_type)
    config = llama_config(metadata, _shape(embedding)[0], rope_freqs)
    if config["num_hidden_layers"] > len(tensors):  # before they are listed: it may be any number
        raise GgufError(f"{len(tensors)} tensors for {config['num_hidden_layers']} layers")
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    expected = _expected_shapes(config)
    present = tensors.keys() - {_ROPE_FREQS}
    if missing := expected.keys() - present:
        raise GgufError(f"the file has no {min(missing)}")
    if unknown := present - expected.keys():
        raise GgufError(f"the file has {min(unknown)}, which a Llama model does not have")
    for name, shape in expected.items():
        if _shape(tensors[name]) != shape:
            raise GgufError(f"{name} has shape {_shape(tensors[name])}, not {shape}")
    return config


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its GGUF name, in the order of the model."""
    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    query_dim = config["num_attention_heads"] * config["head_dim"]
    kv_dim = config["num_key_value_heads"] * config["head_dim"]
    weights = {
        "attn_norm": (hidden,),
        "attn_q": (query_dim, hidden),
        "attn_k": (kv_dim, hidden),
        "attn_v": (kv_dim, hidden),
        "attn_output": (hidden, query_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    biased = (*_ATTENTION * config["attention_bias"], *_MLP * config["mlp_bias"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in weights.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
            if name in biased:
                shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
    shapes["output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocab, hidden)
    return shapes


def _write_weights(
    folder: Path,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    on_progress: OnProgress,
    max_shard_bytes: int,
) -> None:
    expected = _expected_shapes(config)
    source = {_hugging_face_name(name): name for name in expected}
    shapes = {name: expected[source[name]] for name in source}
    total = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    done = 0

    def read(name: str) -> FloatArray:
        tensor = tensors[source[name]]
        values = _values(tensor.data, tensor.tensor_type)
        if ".attn_q." in source[name]:
            return unpermute(values, config["num_attention_heads"])
        if ".attn_k." in source[name]:
            return unpermute(values, config["num_key_value_heads"])
        return values

    def on_tensor(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        on_progress("converting", done, total)

    on_progress("converting", 0, total)
    write_bf16(folder, shapes, read, on_tensor, max_shard_bytes)


def unpermute(values: FloatArray, heads: int) -> FloatArray:
    """Rows of q or k ([heads * dim] or [heads * dim, in]) in Hugging Face's order: in each head the
    first halves of the rotated pairs, then the second; llama.cpp keeps a pair side by side."""
    rows, *rest = values.shape
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _hugging_face_name(name: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block is None:
        stem, _, suffix = name.rpartition(".")
        return f"{_NAMES[stem]}.{suffix}"
    layer, stem, suffix = block.groups()
    return f"model.layers.{layer}.{_BLOCK_NAMES[stem]}.{suffix}"


def _values(data: Any, tensor_type: Any) -> FloatArray:
    from gguf.quants import dequantize

    values: FloatArray = np.asarray(dequantize(data, tensor_type), dtype=np.float32)
    return values


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
