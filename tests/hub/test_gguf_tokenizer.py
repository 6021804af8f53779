"""Tokenizers out of GGUF files tokenise as transformers' own, torch-bound reader does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hub.gguf_files import tiny_llama, write_gguf
from transformers import AutoTokenizer

from millstream.hub.gguf_import import import_gguf

TEXTS = (
    "hello world",
    "x != y, hello !",
    " 12345 and 1,000.50",
    "  two  spaces\n\n\ttab ",
    "naïve café 🙂 日本語",
    "<|im_start|>user\nhello<|im_end|>",
    "I'LL don't",
    "",
)


def import_pair(tmp_path: Path, metadata: dict[str, Any], **model: Any) -> tuple[Any, Any]:
    """Our tokenizer of a tiny file, and transformers' reading of the same file; None in its place
    where transformers still has its older reader, which ignores pre-tokenizers and BOS."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(**model), metadata=metadata)
    import_gguf(file, tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    if importlib.util.find_spec("transformers.integrations.gguf") is None:
        return ours, None
    return ours, AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_byte_level_kinds(tmp_path: Path, pre: str, add_bos: bool) -> None:
    ours, theirs = import_pair(
        tmp_path, {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": add_bos}
    )
    for text in TEXTS:
        ids = ours(text).input_ids
        assert theirs is None or ids == theirs(text).input_ids, text
        assert ids[:1] == [0] or not add_bos
        assert ours.decode(ids[add_bos:]) == text
    assert ours.eos_token == "<|im_end|>"


def test_smollm_splits_digits_and_llama_bpe_adds_bos_by_itself(tmp_path: Path) -> None:
    """Both are llama.cpp's rules, which transformers' reader leaves out."""
    ours, _ = import_pair(tmp_path, {})
    assert ours.tokenize("hello12") == ["hello", "1", "2"]
    (tmp_path / "b").mkdir()
    ours, _ = import_pair(tmp_path / "b", {"tokenizer.ggml.pre": "llama-bpe"})
    assert ours("hello").input_ids[0] == 0


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece(tmp_path: Path, prefixed: bool) -> None:
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "ll", "he", "hell", "hello", "▁hello", "▁w"]
    words += ["or", "ld", "orld", "▁world", "▁▁", "1", "2", "🙂"]
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, 4] + [6] * 256 + [1] * len(words)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + words,
        "tokenizer.ggml.scores": [0.0] * len(tokens) + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }
    ours, theirs = import_pair(tmp_path, metadata, vocab_size=len(kinds))
    for text in (*TEXTS, "hello  world"):
        ids = ours(text).input_ids
        assert ids[0] == 1  # SentencePiece files add BOS where they do not say
        assert ours.decode(ids, skip_special_tokens=True) == text
        # Theirs leaves the prefix out before a space; SentencePiece and llama.cpp never do.
        if prefixed and theirs is not None and not text.startswith(" "):
            assert ids == theirs(text).input_ids, text
    assert ours.tokenize("hello") == (["▁hello"] if prefixed else ["hello"])
    # What follows an added token is prefixed again, as llama.cpp does it.
    after = "▁hello" if prefixed else "hello"
    assert ours.tokenize("hello<|user|>hello") == [after, "<|user|>", after]


def test_whatever_the_locale_files_are_utf_8(tmp_path: Path) -> None:
    template = "{% for m in messages %}«{{ m.content }}»{% endfor %}"
    metadata = {"tokenizer.chat_template": template, "tokenizer.chat_template.rag": template}
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), metadata=metadata)
    code = (
        "import pathlib, sys\n"
        "from millstream.hub.gguf_import import import_gguf\n"
        "from millstream.tokenizer.decoding import Decoding\n"
        "file, folder = map(pathlib.Path, sys.argv[1:])\n"
        "import_gguf(file, folder)\n"
        "print(ascii(Decoding.load(folder).decode([3 + 256], skip_special_tokens=True)))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "out")]
    done = subprocess.run(
        command, env=os.environ | ascii_only, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "'he'\n"), done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == {"default": template, "rag": template}
