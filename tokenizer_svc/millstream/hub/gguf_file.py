"""Reads a GGUF file: its metadata and its tensors, neither trusted. What is damaged, or not of the
type that its key wants, is a GgufError before anything is made of it.

Format and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.hub.errors import GgufError

TEMPLATE_KEY = "tokenizer.chat_template"

_SIZES = (
    "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "rope.dimension_count", "rope.scaling.original_context_length",
)  # fmt: skip
_NUMBERS = (
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
_TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")

_SIZE, _COUNT, _NUMBER, _TEXT = "a number above 0", "a whole number", "a number", "a text"
_TEXTS, _WHOLES, _REALS = "an array of texts", "an array of whole numbers", "an array of numbers"
_WANTED: Mapping[str, str] = {
    "general.architecture": _TEXT,
    "split.count": _COUNT,
    **{f"llama.{name}": _SIZE for name in _SIZES},
    **{f"llama.{name}": _NUMBER for name in _NUMBERS},
    "llama.expert_count": _COUNT,
    "llama.rope.scaling.type": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.tokens": _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    "tokenizer.ggml.scores": _REALS,
    "tokenizer.ggml.token_type": _WHOLES,
    **{f"tokenizer.ggml.{name}_token_id": _COUNT for name in _TOKEN_IDS},
}


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata by key, and gguf's tensors by name. Raises GgufError, OSError."""
    if not file.is_file():
        raise GgufError(f"no such file: {file}")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise GgufError(f"{file} is not a GGUF file")
    try:
        reader = _bounded_reader()(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
        raise GgufError(f"{file} is truncated or damaged ({error})") from error
    for key, value in metadata.items():
        _check(key, value)
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _bounded_reader() -> type[Any]:
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):  # type: ignore[misc]
        """Beyond its end a file has empty arrays for GGUFReader, as many as its header claims."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) != count:
                raise ValueError("it ends early")
            return values

    return BoundedReader


def _check(key: str, value: Any) -> None:
    wanted = (
        _TEXT if key.startswith(f"{TEMPLATE_KEY}.") or key == TEMPLATE_KEY else _WANTED.get(key)
    )
    if wanted == _SIZE and isinstance(value, list):
        raise GgufError(f"{key} differs from layer to layer, which is not supported")
    if wanted is not None and not _is(wanted, value):
        raise GgufError(f"the file's {key} is {repr(value)[:40]}, not {wanted}")


def _is(wanted: str, value: Any) -> bool:
    if wanted in _OF_ARRAYS:
        return isinstance(value, list) and all(_is(_OF_ARRAYS[wanted], item) for item in value)
    if wanted == _TEXT:
        return isinstance(value, str)
    if not isinstance(value, int if wanted != _NUMBER else int | float) or isinstance(value, bool):
        return False
    if wanted == _NUMBER:
        return math.isfinite(value)
    return bool(value > 0 if wanted == _SIZE else value >= 0)


_OF_ARRAYS = {_TEXTS: _TEXT, _WHOLES: _COUNT, _REALS: _NUMBER}
