"""A model's tokenizer as the zip that GetTokenizer streams."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as common

from millstream import hub
from millstream.rpc.errors import NoTokenizer

CHUNK_BYTES = 64 * 1024
# The tokenizer itself, its chat templates, and the configs that say which special tokens it has:
# nothing else that the folder may hold.
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json", "chat_template.json"),
    *("config.json", "generation_config.json"),
)
_PATTERNS = (*_NAMES, "*.jinja", "*.model", "*.tiktoken")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal folders give equal zips


def tokenizer_chunks(model_dir: Path | None) -> Iterator[common.GetTokenizerChunk]:
    """The zip in pieces, the last one with its sha256. Raises NoTokenizer when the folder has no
    tokenizer. Blocks: call it on a thread."""
    if model_dir is None or not hub.has_tokenizer(model_dir):
        raise NoTokenizer("GetTokenizer: the model has no tokenizer files")
    data = _zip(model_dir)
    sha256 = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        is_last = start + CHUNK_BYTES >= len(data)
        yield common.GetTokenizerChunk(data=piece, sha256=sha256 if is_last else "")


def _zip(model_dir: Path) -> bytes:
    files = {file for pattern in _PATTERNS for file in model_dir.glob(pattern)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files):
            entry = zipfile.ZipInfo(file.name, _EPOCH)
            archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
