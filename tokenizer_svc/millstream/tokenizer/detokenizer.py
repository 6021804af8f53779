"""Token ids into text as they come: whole characters only, and stop strings on the text.

One Detokenizer is one sequence: a TextDecoder turns its ids into text, a StopMatcher looks for stop
strings in that text. Whatever the chunking, the joined deltas are the text of the whole sequence;
only text that may yet turn out to be the head of a stop string, or part of a character, is held
back, and `flush` gives up what is held when the sequence ends. Pure: standard library only.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Protocol

from millstream.tokenizer.stop_matcher import StopMatch, StopMatcher

REPLACEMENT = "\ufffd"
# A character is at most four tokens (its bytes); some that show nothing may lie between. Beyond
# that, U+FFFD at the end of a text is no unfinished character.
_MAX_PENDING_IDS = 8
_ESCAPED_BYTES = {0xDC80 + byte: REPLACEMENT for byte in range(128)}


class UnknownTokenId(ValueError):
    """The id is outside the vocabulary."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"token id {token_id} is not in the vocabulary")


class TextDecoder(Protocol):
    """The text of one growing sequence of ids, in pieces of whole characters."""

    def start_after(self, context: Iterable[int]) -> None:
        """Goes on where the text of `context` ends; before the first `decode`."""

    def decode(self, token_id: int) -> str:
        """The text that this id completes, maybe none. Raises UnknownTokenId."""

    def flush(self) -> str:
        """The text of an unfinished character at the end: U+FFFD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What each id stands for, where a text is no more than its pieces joined.

    by_id: text, or bytes where they are no text on their own (a part of a character).
    replace_each_byte: a broken character shows as one U+FFFD per byte (byte fallback), not one in
    all. strip_leading_space: the text's first space is not shown (sentencepiece).
    """

    by_id: Sequence[str | bytes]
    replace_each_byte: bool = False
    strip_leading_space: bool = False


class PieceDecoder:
    """A TextDecoder by table: constant work per id."""

    __slots__ = ("_by_id", "_context_tail", "_each_byte", "_errors", "_pending", "_strip")

    def __init__(self, pieces: Pieces) -> None:
        self._by_id = pieces.by_id
        self._each_byte = pieces.replace_each_byte
        # surrogateescape gives one (lone surrogate) character per bad byte, replace one for all.
        self._errors = "surrogateescape" if pieces.replace_each_byte else "replace"
        self._strip = pieces.strip_leading_space
        self._pending = b""  # the bytes of a character so far
        self._context_tail = ""  # what the context's own text shows for its bytes in _pending

    def start_after(self, context: Iterable[int]) -> None:
        for token_id in context:
            self.decode(token_id)
        self._context_tail = self._to_text(self._pending, final=True)[0]

    def decode(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._by_id):
            raise UnknownTokenId(token_id)
        piece = self._by_id[token_id]
        if isinstance(piece, str):
            if not piece or not (self._pending or self._strip):
                return piece
            piece = piece.encode()
        data = self._pending + piece
        text, used = self._to_text(data, final=False)
        self._pending = data[used:]
        return self._show(text)

    def flush(self) -> str:
        text, _ = self._to_text(self._pending, final=True)
        self._pending = b""
        return self._show(text)

    def _to_text(self, data: bytes, *, final: bool) -> tuple[str, int]:
        text, used = utf_8_decode(data, self._errors, final)
        return (text.translate(_ESCAPED_BYTES) if self._each_byte else text), used

    def _show(self, text: str) -> str:
        if not text:
            return ""
        if self._context_tail:
            # The context ended inside a character: if it never completes, its U+FFFD is not ours.
            text = text.removeprefix(self._context_tail)
            self._context_tail = ""
        if self._strip:
            text = text.removeprefix(" ")
            self._strip = False
        return text


class WindowDecoder:
    """A TextDecoder over any `decode(ids) -> text`: decodes the last few ids again, and compares.

    id_limit: the first id that is too large.
    """

    __slots__ = ("_decode", "_id_limit", "_ids", "_shown_ids", "_shown_text")

    def __init__(self, decode: Callable[[Sequence[int]], str], *, id_limit: int) -> None:
        self._decode = decode
        self._id_limit = id_limit
        # _ids:  [ shown before, kept as context | pending ]
        #          0 .. _shown_ids                          and _shown_text is the left part's text
        self._ids: list[int] = []
        self._shown_ids = 0
        self._shown_text = ""

    def start_after(self, context: Iterable[int]) -> None:
        for token_id in context:
            self._append(token_id)
        self._shown_ids = len(self._ids)
        self._shown_text = self._decode(self._ids)

    def decode(self, token_id: int) -> str:
        self._append(token_id)
        text = self._decode(self._ids)
        if text == self._shown_text:
            if text:  # a skipped token; it is no context for the next one either
                self._ids.pop()
            return ""
        if text.endswith(REPLACEMENT) and len(self._ids) - self._shown_ids < _MAX_PENDING_IDS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._ids)) if len(self._ids) > self._shown_ids else ""

    def _append(self, token_id: int) -> None:
        if not 0 <= token_id < self._id_limit:
            raise UnknownTokenId(token_id)
        self._ids.append(token_id)

    def _show(self, text: str) -> str:
        new = text[len(commonprefix((self._shown_text, text))) :]  # noqa: RUF071 (characters it is)
        del self._ids[: self._shown_ids]
        self._shown_ids = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return new


class Detokenizer:
    """One sequence: ids in, text to show out; `stopped` once a stop string was met.

    After `stopped` is set, or `flush`, it takes no more ids.
    """

    __slots__ = ("_decoder", "_matcher", "_token_count")

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        context: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Raises UnknownTokenId for a bad id in `context`, ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        decoder.start_after(context)
        self._decoder = decoder
        self._token_count = 0
        self._matcher = (
            StopMatcher(stops, include_stop=include_stop, min_tokens=min_tokens) if stops else None
        )

    @property
    def stopped(self) -> StopMatch | None:
        return self._matcher.match if self._matcher else None

    @property
    def settled_count(self) -> int:
        """So many tokens belong to the output whatever follows: a stop string, if one is met,
        ends at the last of these or later."""
        if self._matcher is None:
            return self._token_count
        if self._matcher.match is not None:
            return self._matcher.match.token_count
        waiting = self._matcher.waiting_count
        return self._token_count if waiting is None else waiting

    def append(self, token_id: int) -> str:
        """The text to show for one more id. Raises UnknownTokenId."""
        text = self._decoder.decode(token_id)
        self._token_count += 1
        return self._matcher.push(text, self._token_count) if self._matcher else text

    def extend(self, token_ids: Iterable[int]) -> str:
        """The text to show for more ids; those after a stop string are left out."""
        parts = []
        for token_id in token_ids:
            parts.append(self.append(token_id))
            if self.stopped:
                break
        return "".join(parts)

    def flush(self) -> str:
        """The text still held, at the end of the sequence; it may hold a stop string."""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        shown = self._matcher.push(text, self._token_count)
        return shown if self._matcher.match else shown + self._matcher.flush()
