"""Decoding from a folder's tokenizer.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_tokenizers import byte_ids, byte_tokenizer

from millstream.tokenizer.decoding import Decoding
from millstream.tokenizer.detokenizer import UnknownTokenId


def test_from_a_folder(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    decoding = Decoding.load(tmp_path)
    text = "é🙂"
    assert decoding.decode([*byte_ids(text), 299], skip_special_tokens=True) == text  # 299: padding
    with pytest.raises(UnknownTokenId):
        decoding.decode([300], skip_special_tokens=True)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Decoding.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Decoding.load(tmp_path)


def test_it_imports_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, millstream.tokenizer.decoding\n"
        "print(sorted({'torch', 'transformers', 'jinja2', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
