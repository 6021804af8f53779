"""A model's tokenizer: texts to ids and back. Safe to use from many threads.

transformers loads the folder and knows its chat template; all the work is done by the `tokenizers`
library, on copies that nobody changes after `load`. Its calls release the GIL.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from millstream import hub
from millstream.tokenizer.chat import ChatRenderer, Segment
from millstream.tokenizer.decoding import Decoding, embedding_rows
from millstream.tokenizer.detokenizer import TextDecoder
from millstream.tokenizer.panics import panics_as_errors


class TokenizerLoadError(Exception):
    """The folder has no tokenizer that can be used; one line for people."""


class Codec:
    """Encodes and decodes with one tokenizer; `chat` renders its chat template."""

    def __init__(self, tokenizer: Any, *, id_limit: int = 0) -> None:
        """tokenizer: a transformers tokenizer with a `tokenizers` backend.

        id_limit: rows of the model's embedding, as Decoding takes it.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat = ChatRenderer(tokenizer)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._decoding = Decoding(self._tokenizer, id_limit=id_limit)
        self.vocab_size = self._decoding.vocab_size

    @classmethod
    def load(cls, model_dir: Path) -> Codec:
        """Raises TokenizerLoadError."""
        try:
            return cls._load(model_dir)
        except TokenizerLoadError:
            raise
        except Exception as error:  # the libraries raise whatever the folder's files provoke
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise TokenizerLoadError(
                f"cannot load the tokenizer in {model_dir}: {reason}"
            ) from error

    @classmethod
    @panics_as_errors
    def _load(cls, model_dir: Path) -> Codec:
        from transformers import AutoTokenizer

        if not hub.has_tokenizer(model_dir):
            raise TokenizerLoadError(f"{model_dir} has no tokenizer files")
        # trust_remote_code: unless told, it asks on the terminal whether to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TokenizerLoadError(f"{model_dir} has no fast tokenizer (tokenizer.json)")
        return cls(tokenizer, id_limit=embedding_rows(model_dir))

    @panics_as_errors
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    @panics_as_errors
    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of the joined segments, where special tokens count in the template's segments only.

        Equal to the encoding of the joined text if no content holds a special token's text.
        """
        # The library finds special tokens everywhere or nowhere. So: find them in the template's
        # segments, put an anchor in the place of each, encode the whole with special tokens off,
        # and put the ids back where the anchors are.
        plain = self._plain
        parts: list[str] = []
        special_ids: list[int] = []
        for segment in segments:
            position = 0
            if not segment.is_content:
                encoding = self._tokenizer.encode(segment.text, add_special_tokens=False)
                for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                    if token_id in self._decoding.special_ids:
                        parts += (segment.text[position:start], plain.anchor)
                        special_ids.append(token_id)
                        position = end
            parts.append(segment.text[position:])
        ids = plain.tokenizer.encode("".join(parts), add_special_tokens=False).ids
        returning = iter(special_ids)
        return [next(returning) if i == plain.anchor_id else i for i in ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The whole text. Raises UnknownTokenId."""
        return self._decoding.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one sequence that comes in pieces."""
        return self._decoding.text_decoder(skip_special_tokens=skip_special_tokens)

    @cached_property
    def _plain(self) -> _PlainTokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        anchor = f"<{secrets.token_hex(16)}>"  # unguessable: no content can hold it
        tokenizer.add_tokens([AddedToken(anchor, normalized=False)])
        anchor_id = tokenizer.token_to_id(anchor)
        assert anchor_id is not None
        return _PlainTokenizer(tokenizer=tokenizer, anchor=anchor, anchor_id=anchor_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainTokenizer:
    """A tokenizer that takes special tokens' texts for plain text, and has one token more."""

    tokenizer: Tokenizer
    anchor: str
    anchor_id: int
