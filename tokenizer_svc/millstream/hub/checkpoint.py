"""Writes bf16 safetensors checkpoints with numpy alone, one tensor in memory at a time.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, raw data).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_SHARD_BYTES = 2_000_000_000
_BF16_BYTES = 2

Shapes = Mapping[str, tuple[int, ...]]


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bit patterns of float32 values, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Adding just under half of the lowest kept bit, and that bit itself, carries exactly when
    # rounding up is right.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    patterns = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        patterns[nan] = 0x7FC0  # the carry may have turned its payload into infinity
    return patterns


def write_bf16(
    folder: Path,
    shapes: Shapes,
    read: Callable[[str], npt.NDArray[np.float32]],
    on_tensor: Callable[[int], None],
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> None:
    """Writes model.safetensors, or shards and their index where one file would be too large.

    `read` gives a tensor's values by name, once each and in order of `shapes`; `on_tensor` hears
    how many bytes each took in the file.
    """
    shards = list(_shards(shapes, max_shard_bytes))
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", shapes, shards[0], read, on_tensor)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shapes, names, read, on_tensor)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(_size(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * _BF16_BYTES


def _shards(shapes: Shapes, max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        if names and filled + _size(shape) > max_shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += _size(shape)
    yield names


def _write_shard(
    path: Path,
    shapes: Shapes,
    names: Sequence[str],
    read: Callable[[str], npt.NDArray[np.float32]],
    on_tensor: Callable[[int], None],
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + _size(shapes[name])
        header[name] = {
            "dtype": "BF16",
            "shape": list(shapes[name]),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = to_bf16(read(name))
            if values.shape != shapes[name]:
                raise ValueError(f"{name} has shape {values.shape}, not {shapes[name]}")
            file.write(values.astype("<u2", copy=False).data)
            on_tensor(values.nbytes)
