"""Fills a model's parameters: from safetensors files, tensor by tensor, or with random numbers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Copies every tensor of a checkpoint to its part of a parameter, one at a time; of tensors
    that are spread over ranks it reads this rank's part alone.

    Raises:
        WeightError: a tensor is missing, left over, of the wrong shape or type; a file is broken.
    """
    files = _tensor_files(model_dir)
    parts = _match(model, {name for names in files.values() for name in names})
    second_head = None
    if model.tied and _LM_HEAD not in parts and any(_LM_HEAD in names for names in files.values()):
        second_head = torch.empty_like(model.lm_head.weight)
        parts[_LM_HEAD] = ParameterPart(second_head, rows=model.lm_head.rows)
    total_bytes = sum(path.stat().st_size for path in files)
    done_bytes = 0
    for path, names in files.items():
        for name, tensor, num_bytes in _read(path, names, parts):
            if name in parts:
                parts[name].take(tensor)
            done_bytes += num_bytes
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)
    if second_head is not None:
        _settle_tie(model, second_head)
    model.pack()
    if on_progress is not None:
        on_progress(total_bytes, total_bytes)


def init_dummy_weights(model: DecoderModel, seed: int) -> None:
    """Random matrices, norms of one and biases of zero, the same for a seed on a kind of device,
    however many ranks they are spread over."""
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    parts: dict[Tensor, list[ParameterPart]] = {}
    for _, part in model.checkpoint_parts():
        parts.setdefault(part.parameter, []).append(part)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            _init_matrix(parameter, parts[parameter], generator)
    for layer in model.modules():
        if isinstance(layer, RMSNorm):
            layer.weight.data.fill_(1.0)
        elif isinstance(layer, Linear) and layer.bias is not None:
            layer.bias.data.zero_()
    model.pack()


def _init_matrix(parameter: Tensor, parts: list[ParameterPart], generator: torch.Generator) -> None:
    """As if the whole matrix were drawn, and this rank's parts cut out of it."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    whole = parameter.data if shape == parameter.shape else parameter.new_empty(shape)
    whole.normal_(0.0, shape[1] ** -0.5, generator=generator)
    if whole is not parameter.data:
        row = 0
        for part in parts:
            rows = whole[row : row + part.shape[0]]
            part.take(rows if part.taken is None else rows[part.taken])
            row += part.shape[0]


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


def _read(
    path: Path, names: list[str], parts: Mapping[str, ParameterPart]
) -> Iterator[tuple[str, Tensor, int]]:
    """(name, what its part takes of it, bytes of the whole) of tensors, checked."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                part = parts.get(name)
                if part is None or part.taken is None:
                    tensor = file.get_tensor(name)
                    shape = tensor.shape
                else:
                    stored = file.get_slice(name)
                    shape = stored.get_shape()
                    _check_shape(part, name, shape)  # before it is indexed
                    tensor = stored[part.taken]
                if part is not None:
                    _check_shape(part, name, shape)
                    if tensor.dtype not in _DTYPES:
                        raise WeightError(
                            f"{name} is {tensor.dtype}: quantised weights are not supported"
                        )
                yield name, tensor, math.prod(shape) * tensor.itemsize
    except (SafetensorError, OSError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error


def _check_shape(part: ParameterPart, name: str, shape: Sequence[int]) -> None:
    if tuple(shape) != part.shape:
        raise WeightError(
            f"{name} has shape {list(shape)}, but config.json asks for {list(part.shape)}"
        )


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


def _settle_tie(model: DecoderModel, head: Tensor) -> None:
    """A tied head that is in the file beside the embedding counts if it differs (transformers)."""
    if not torch.equal(head, model.model.embed_tokens.weight):
        logger.warning("tie_word_embeddings is true but %s differs: not tied", _LM_HEAD)
        model.untie(head)
