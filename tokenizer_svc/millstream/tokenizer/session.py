"""The open sequences of one Detokenize stream, and the answer to each of its messages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from millstream.rpc.errors import (
    DuplicateHandle,
    EngineUnavailable,
    InvalidArgument,
    QueueFull,
    UnknownHandle,
    to_status,
)
from millstream.rpc.sampling_params import MAX_STOP_CHARS
from millstream.tokenizer.codec import Codec
from millstream.tokenizer.detokenizer import Detokenizer, UnknownTokenId
from millstream.v1 import engine_pb2, tokenizer_pb2

logger = logging.getLogger(__name__)

# Of the sequences that one message names, as many may fail: what is said of each is longer than
# what names it.
MAX_FAILED = 1 << 16
# Of one stream: 200 MB of sequences, and 1 GB of what looks for their stop strings if all differ.
MAX_OPEN = 1 << 18
MAX_OPEN_STOP_CHARS = 1 << 23


class DetokenizeSession:
    """One stream's sequences by handle. One call of `answer` at a time; it may be on any thread.

    A sequence that fails ends alone: the message says so, and the others go on.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sequences: dict[int, Detokenizer] = {}
        self._stop_chars: dict[int, int] = {}  # of those that have any
        self._num_stop_chars = 0
        self.draining = False  # opens are refused

    @property
    def open_count(self) -> int:
        return len(self._sequences)

    def answer(self, request: tokenizer_pb2.DetokenizeRequest) -> tokenizer_pb2.DetokenizeResponse:
        """Does what a message asks. Raises InvalidArgument if its arrays do not fit together, or
        more than MAX_FAILED sequences fail."""
        answer = _Answer()
        for opening in request.open:
            self._open(opening, answer)
        if request.HasField("tokens"):
            self._append(request.tokens, answer)
        for handle in request.close:
            self._close(handle, answer)
        return tokenizer_pb2.DetokenizeResponse(
            handles=answer.handles,
            texts=answer.texts,
            stopped=answer.stopped,
            failed=answer.failed,
        )

    def _open(self, opening: tokenizer_pb2.DetokenizeOpen, answer: _Answer) -> None:
        handle = opening.handle
        if self.draining:
            answer.fail(handle, EngineUnavailable("the service is stopping"))
        elif handle in self._sequences:
            field = "open.handle"
            answer.fail(handle, DuplicateHandle(f"{field}: {handle} is open already", field=field))
        else:
            try:
                num_stop_chars = self._check_stops(opening.stop)
                self._sequences[handle] = self._sequence(opening)
                if num_stop_chars:
                    self._stop_chars[handle] = num_stop_chars
                    self._num_stop_chars += num_stop_chars
            except Exception as error:
                answer.fail(handle, _reported(error, "open.context_token_ids"))

    def _check_stops(self, stops: Sequence[str]) -> int:
        """How many characters they have. Raises InvalidArgument, or QueueFull where no more can be
        open."""
        if "" in stops:
            raise InvalidArgument("open.stop: a stop string is empty", field="open.stop")
        if (size := sum(map(len, stops))) > MAX_STOP_CHARS:
            raise InvalidArgument(
                f"open.stop: at most {MAX_STOP_CHARS} characters together, not {size}",
                field="open.stop",
            )
        too_many = len(self._sequences) >= MAX_OPEN
        if too_many or self._num_stop_chars + size > MAX_OPEN_STOP_CHARS:
            raise QueueFull("open: too many sequences, or stop strings of those, are open")
        return size

    def _sequence(self, opening: tokenizer_pb2.DetokenizeOpen) -> Detokenizer:
        skip = opening.skip_special_tokens if opening.HasField("skip_special_tokens") else True
        return Detokenizer(
            self._codec.text_decoder(skip_special_tokens=skip),
            context=opening.context_token_ids,
            stops=opening.stop,
            include_stop=opening.include_stop,
            min_tokens=opening.min_tokens,
        )

    def _append(self, tokens: engine_pb2.StepOutput, answer: _Answer) -> None:
        for handle, token_ids in _entries(tokens):
            sequence = self._sequences.get(handle)
            if sequence is None:
                answer.fail_unknown(handle, "tokens.handles")
                continue
            try:
                text = sequence.extend(token_ids)
            except Exception as error:
                self._fail(handle, error, answer)
                continue
            answer.show(handle, text)
            if sequence.stopped:
                self._stop(handle, sequence, answer)

    def _close(self, handle: int, answer: _Answer) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None:
            answer.fail_unknown(handle, "close")
            return
        try:
            text = sequence.flush()
        except Exception as error:
            self._fail(handle, error, answer)
            return
        answer.show(handle, text)
        self._stop(handle, sequence, answer)

    def _fail(self, handle: int, error: Exception, answer: _Answer) -> None:
        self._forget(handle)
        answer.fail(handle, _reported(error, "tokens.token_ids"))

    def _forget(self, handle: int) -> None:
        del self._sequences[handle]
        self._num_stop_chars -= self._stop_chars.pop(handle, 0)

    def _stop(self, handle: int, sequence: Detokenizer, answer: _Answer) -> None:
        self._forget(handle)
        if match := sequence.stopped:
            answer.stop(handle, match.stop, match.token_count)


class _Answer:
    """A response in the making, as plain lists: they become a message at once, at the end."""

    __slots__ = ("_ended", "failed", "handles", "stopped", "texts")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.texts: list[str] = []
        self.stopped: list[tokenizer_pb2.DetokenizeStopped] = []
        self.failed: list[tokenizer_pb2.DetokenizeFailed] = []
        self._ended: set[int] = set()

    def show(self, handle: int, text: str) -> None:
        if text:
            self.handles.append(handle)
            self.texts.append(text)

    def stop(self, handle: int, stop: str, token_count: int) -> None:
        self._ended.add(handle)
        self.stopped.append(
            tokenizer_pb2.DetokenizeStopped(handle=handle, stop=stop, token_count=token_count)
        )

    def fail(self, handle: int, error: Exception) -> None:
        if len(self.failed) == MAX_FAILED:
            raise InvalidArgument(f"more than {MAX_FAILED} sequences fail in one message")
        self._ended.add(handle)
        self.failed.append(tokenizer_pb2.DetokenizeFailed(handle=handle, status=to_status(error)))

    def fail_unknown(self, handle: int, field: str) -> None:
        """Says so once, and not of a sequence that this very message has seen end."""
        if handle not in self._ended:
            self.fail(handle, UnknownHandle(f"{field}: {handle} is not open", field=field))


def _entries(tokens: engine_pb2.StepOutput) -> Iterator[tuple[int, Iterable[int]]]:
    """Each entry's handle and ids. Raises InvalidArgument before the first if they do not fit."""
    if not tokens.counts:
        if len(tokens.handles) != len(tokens.token_ids):
            raise InvalidArgument(
                f"tokens.token_ids: {len(tokens.token_ids)} for {len(tokens.handles)} handles",
                field="tokens.token_ids",
            )
        return zip(tokens.handles, zip(tokens.token_ids, strict=True), strict=True)
    if len(tokens.counts) != len(tokens.handles) or sum(tokens.counts) != len(tokens.token_ids):
        raise InvalidArgument(
            "tokens.counts: one for each handle is needed, adding up to the number of token_ids",
            field="tokens.counts",
        )
    return _sliced_entries(tokens)


def _sliced_entries(tokens: engine_pb2.StepOutput) -> Iterator[tuple[int, Iterable[int]]]:
    start = 0
    for handle, count in zip(tokens.handles, tokens.counts, strict=True):
        yield handle, tokens.token_ids[start : start + count]
        start += count


def _reported(error: Exception, field: str) -> Exception:
    """What the client hears of a sequence's failure."""
    if isinstance(error, UnknownTokenId):
        return InvalidArgument(f"{field}: {error}", field=field)
    if not isinstance(error, InvalidArgument | QueueFull):
        logger.error("a sequence failed", exc_info=error)
    return error
