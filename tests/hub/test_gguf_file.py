"""GGUF files that are truncated, or hostile: one line, in no time and no memory."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from tests.hub.gguf_files import tiny_llama, write_gguf

from millstream.hub.errors import GgufError
from millstream.hub.gguf_import import import_gguf


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), Type.Q8_0).read_bytes()
    for size in (0, 3, 10, 30, 500, 5000, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"truncated|not a GGUF"):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(GgufError, match="not a GGUF"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(GgufError, match="no such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("counts", "body", "says"),
    [
        # Claims of more than there is: the reader went on, and took memory, to the claimed number.
        ((2**60, 1), b"", "ends early"),
        ((0, 2**60), b"", "ends early"),
        ((0, 2), entry("k", 9, struct.pack("<IQ", 0, 2**20)), "ends early"),
        ((0, 2), entry("k", 8, struct.pack("<Q", 2**64 - 1)), "ends early"),
        ((0, 2), entry("k", 9, struct.pack("<IQ", 9, 1) * 5000), "recursion"),
        ((0, 2), entry("tokenizer.chat_template", 8, text(b"\xff")), "can't decode byte 0xff"),
        ((1, 1), text("token_embd.weight") + struct.pack("<IIQ", 0, 0, 0), "which is no matrix"),
        (
            (1, 1),
            text("token_embd.weight") + struct.pack("<IQIQ", 1, 4, 0, 0),
            "which is no matrix",
        ),
    ],
)
def test_hostile_files_are_refused(
    tmp_path: Path, counts: tuple[int, int], body: bytes, says: str
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    file = tmp_path / "hostile.gguf"
    padding = b"" if "early" in says else bytes(64)
    file.write_bytes(head + entry("general.architecture", 8, text("llama")) + body + padding)
    with pytest.raises(GgufError, match=says):
        import_gguf(file, tmp_path / "out")
