"""Fills a model's parameters: from safetensors files, tensor by tensor, or with random numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millstream.engine.layers import Linear, ParameterPart, RMSNorm
from millstream.engine.models import DecoderModel

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
# Buffers that old transformers versions saved; they follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OnProgress = Callable[[int, int], None]  # (done bytes, total bytes)


class WeightError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensor or the file."""


def load_weights(
    model: DecoderModel, model_dir: Path, *, on_progress: OnProgress | None = None
) -> None:
    """Copies every tensor of a checkpoint to its part of a parameter, one at a time.

    Raises:
        WeightError: a tensor is missing, left over, of the wrong shape or type; a file is broken.
    """
    files = _tensor_files(model_dir)
    parts = _match(model, {name for names in files.values() for name in names})
    total_bytes = sum(path.stat().st_size for path in files)
    done_bytes = 0
    second_head = None
    for path, names in files.items():
        for name, tensor in _read(path, names):
            if name in parts:
                _take(parts[name], name, tensor)
            elif name == _LM_HEAD:
                second_head = tensor
            done_bytes += tensor.nbytes
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)
    if second_head is not None:
        _settle_tie(model, second_head)
    model.pack()
    if on_progress is not None:
        on_progress(total_bytes, total_bytes)


def init_dummy_weights(model: DecoderModel, seed: int) -> None:
    """Random matrices, norms of one and biases of zero, the same for a seed on a kind of device."""
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for layer in model.modules():
        if isinstance(layer, RMSNorm):
            layer.weight.data.fill_(1.0)
        elif isinstance(layer, Linear) and layer.bias is not None:
            layer.bias.data.zero_()
    model.pack()


def _tensor_files(model_dir: Path) -> dict[Path, list[str]]:
    """The checkpoint's files and the names of the tensors to read from each."""
    index = model_dir / INDEX_FILE
    if index.exists():
        return _indexed_files(index)
    single = model_dir / SINGLE_FILE
    paths = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise WeightError(f"{model_dir} holds no *.safetensors file, the one format that is read")
    files = {path: _names_in(path) for path in paths}
    seen: set[str] = set()
    for path, names in files.items():
        if not seen.isdisjoint(names):
            raise WeightError(f"{min(seen & set(names))} is in {path} and in another file too")
        seen.update(names)
    return files


def _indexed_files(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index} is not an index with a weight_map") from error
    files: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightError(f"{index} puts {name} outside its folder: {file_name!r}")
        files.setdefault(index.parent / file_name, []).append(name)
    for path, names in files.items():
        absent = set(names) - set(_names_in(path))
        if absent:
            raise WeightError(f"{min(absent)} is not in {path}, where {index.name} puts it")
    return files


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error


def _read(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error


def _match(model: DecoderModel, names: set[str]) -> dict[str, ParameterPart]:
    """The part of each checkpoint tensor, once it is sure that they are neither more nor fewer."""
    parts = dict(model.checkpoint_parts())
    if model.tied and _EMBEDDING not in names and _LM_HEAD in names:
        parts[_LM_HEAD] = parts.pop(_EMBEDDING)  # of two tied names a file may keep either
    missing = sorted(parts.keys() - names)
    if missing:
        hint = " (tie_word_embeddings is false)" if _LM_HEAD in missing else ""
        raise WeightError(f"the checkpoint lacks {_listed(missing)}{hint}")
    left_over = sorted(
        name
        for name in names - parts.keys()
        if not name.endswith(_IGNORED_SUFFIXES) and not (model.tied and name == _LM_HEAD)
    )
    if left_over:
        raise WeightError(f"the model has no place for {_listed(left_over)} of the checkpoint")
    return parts


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _take(part: ParameterPart, name: str, tensor: Tensor) -> None:
    if tuple(tensor.shape) != part.shape:
        raise WeightError(
            f"{name} has shape {list(tensor.shape)}, but config.json asks for {list(part.shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise WeightError(f"{name} is {tensor.dtype}: quantised weights are not supported")
    part.take(tensor)


def _settle_tie(model: DecoderModel, lm_head: Tensor) -> None:
    """A tied head that is in the file beside the embedding counts if it differs (transformers)."""
    embedding = model.model.embed_tokens.weight
    head = torch.empty_like(embedding)
    _take(ParameterPart(head), _LM_HEAD, lm_head)
    if not torch.equal(head, embedding):
        logger.warning("tie_word_embeddings is true but %s differs: not tied", _LM_HEAD)
        model.untie(head)
