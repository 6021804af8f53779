"""Ids to text with one `tokenizers` tokenizer. Needs no transformers, so the engine's front end may
use it too. Safe to use from many threads: the tokenizer is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from millstream.tokenizer.detokenizer import (
    PieceDecoder,
    Pieces,
    TextDecoder,
    UnknownTokenId,
    WindowDecoder,
)
from millstream.tokenizer.panics import panics_as_errors
from millstream.tokenizer.pieces import build_pieces, without

TOKENIZER_FILE = "tokenizer.json"


class Decoding:
    """One tokenizer's way back to text."""

    def __init__(self, tokenizer: Tokenizer, *, id_limit: int = 0) -> None:
        """The tokenizer must not be changed afterwards. Raises ValueError if it has no tokens.

        id_limit: rows of the model's embedding, if known. Ids below it that name no token are
        padding of the embedding; they are legal and have no text.
        """
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError("the vocabulary is empty")
        self.vocab_size = 1 + max(vocab.values())  # vocabularies may have gaps
        self._id_limit = max(id_limit, self.vocab_size)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces: dict[bool, Pieces] = {}  # by skip_special_tokens
        pieces = build_pieces(tokenizer, id_limit=self._id_limit)
        if pieces is not None:
            self._pieces = {False: pieces, True: without(pieces, self.special_ids)}

    @classmethod
    def load(cls, model_dir: Path) -> Decoding:
        """From the folder's tokenizer.json. Raises OSError if there is none, ValueError if it
        cannot be read."""
        text = (model_dir / TOKENIZER_FILE).read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{model_dir / TOKENIZER_FILE}: {error}") from error
        return cls(tokenizer, id_limit=embedding_rows(model_dir))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The whole text. Raises UnknownTokenId."""
        if self._pieces:
            decoder = PieceDecoder(self._pieces[skip_special_tokens])
            return "".join([decoder.decode(i) for i in token_ids]) + decoder.flush()
        for token_id in token_ids:
            if not 0 <= token_id < self._id_limit:
                raise UnknownTokenId(token_id)
        return self._library_decode(token_ids, skip_special_tokens)

    def text_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one sequence that comes in pieces."""
        if self._pieces:
            return PieceDecoder(self._pieces[skip_special_tokens])
        return WindowDecoder(
            lambda ids: self._library_decode(ids, skip_special_tokens), id_limit=self._id_limit
        )

    @panics_as_errors
    def _library_decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        # Not transformers' decode: that may "clean up" spaces that the model did write.
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def embedding_rows(model_dir: Path) -> int:
    """Rows of the model's embedding by its config.json; 0 if that does not say."""
    try:
        rows = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):  # a tokenizer alone, or not a model's config
        return 0
    return rows if isinstance(rows, int) else 0
