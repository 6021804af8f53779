"""The piece table of a tokenizer: what each id stands for in text, where its decoder allows one.

Two kinds of decoder cover nearly every model: byte-level BPE, and what sentencepiece models become
(spaces as "▁", byte fallback). For these a text is its tokens' pieces joined. The table equals
`Tokenizer.decode`, with one exception: in a run of byte tokens that is not UTF-8 the library shows
U+FFFD for every byte of the run, here only the broken bytes do; a stream cannot take back
characters that it has shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from millstream.tokenizer.detokenizer import Pieces


def build_pieces(tokenizer: Tokenizer, *, id_limit: int) -> Pieces | None:
    """The table with all tokens shown, `id_limit` long (ids without a token show nothing); None for
    a decoder that is no mere join."""
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    strip = False
    to_bytes: Callable[[str], bytes]
    match steps:
        case [{"type": "ByteLevel"}]:
            to_bytes = _byte_level
        case [
            {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if rest in ([], [_STRIP_ONE_SPACE]):
            to_bytes = _byte_fallback(pattern, content)
            strip = bool(rest)
        case _:
            return None
    by_id: list[str | bytes] = [""] * id_limit
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        by_id[token_id] = _as_text(to_bytes(token))
    return Pieces(
        by_id=by_id, replace_each_byte=to_bytes is not _byte_level, strip_leading_space=strip
    )


def without(pieces: Pieces, token_ids: frozenset[int]) -> Pieces:
    """The same table, in which these tokens show nothing."""
    by_id = list(pieces.by_id)
    for token_id in token_ids:
        by_id[token_id] = ""
    return Pieces(
        by_id=by_id,
        replace_each_byte=pieces.replace_each_byte,
        strip_leading_space=pieces.strip_leading_space,
    )


_STRIP_ONE_SPACE: Mapping[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token that is not written in the alphabet
        return token.encode()


def _byte_fallback(pattern: str, content: str) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(pattern, content).encode()

    return to_bytes


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
