"""One request from its submission to its output: gathers what the engine and the tokenizer say.

Tokens come from the engine's stream and, if text is wanted, go on to a text session:

    engine ----token_ids----> Generation ----feed----> TextSession
                                   ^----text, "so many tokens confirmed", stop string----'

A reader sees a token once its text session has answered for it, so that tokens after a stop string
are never shown. Everything here runs on the client's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

from millstream.client.naming import from_service
from millstream.client.types import Delta, FinishReason, Logprob, Output, Timings, Usage
from millstream.rpc.errors import EngineFault, EngineUnavailable, MillstreamError
from millstream.rpc.sampling_params import SamplingParams, from_proto
from millstream.v1 import engine_pb2


class TextSink(Protocol):
    """The text session of one request (text.TextSession)."""

    def feed(self, token_ids: Sequence[int]) -> None: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


class Generation:
    """The state of one request. `token_ids` and the log probabilities only grow; the engine stream
    appends to them."""

    __slots__ = (
        "_accepted",
        "_cancel",
        "_changed",
        "_confirmed",
        "_cut",
        "_error",
        "_fed",
        "_finished",
        "_hold_ids",
        "_include_stop",
        "_sample",
        "_sampling",
        "_shown",
        "_stop_string",
        "_text",
        "_text_closed",
        "_texts",
        "follow",
        "load",
        "logprobs",
        "prompt_logprobs",
        "prompt_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        *,
        prompt_token_ids: Sequence[int],
        changed: asyncio.Event,
        sampling: SamplingParams,
        sample: int = 0,
        follow: bool = False,
        hold_ids: bool = False,
        load: float = 0,
    ) -> None:
        """`changed`: set when there is something for the reader. `sampling`: what the user asked
        for. `sample`: its number among the samples of the prompt. `follow`: act on each piece, not
        only at the end; for streams and stop strings. `hold_ids`: show no ids before the end.
        `load`: as its job's."""
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob | None] = [None]  # nothing comes before the first token
        self.follow = follow
        self.load = load
        self._sampling = sampling
        self._sample = sample
        self._include_stop = sampling.include_stop
        self._hold_ids = hold_ids
        self._text: TextSink | None = None
        self._cancel: Callable[[], None] | None = None
        self._accepted: engine_pb2.Accepted | None = None
        self._finished: engine_pb2.Finished | None = None
        self._error: MillstreamError | None = None
        self._stop_string: str | None = None
        self._cut: int | None = None  # tokens up to the stop string's end
        self._texts: list[str] = []
        self._text_closed = True
        self._fed = 0  # tokens given to the text session
        self._confirmed = 0  # tokens that a reader may see
        self._shown = 0  # tokens that `take` returned
        self._changed = changed

    def bind(self, *, cancel: Callable[[], None], text: TextSink | None) -> None:
        """Called once, at submission: how to cancel at the engine, and the text session."""
        self._cancel = cancel
        self._text = text
        self._text_closed = text is None

    # ---- what the engine's stream says

    def accept(self, accepted: engine_pb2.Accepted) -> None:
        self._accepted = accepted
        self._changed.set()

    def advance(self) -> None:
        """Passes on the tokens that came since the last call."""
        count = len(self.token_ids)
        if self._text is None:
            self._confirmed = count
        elif not self._text_closed:
            # The stop token comes in the same message as Finished and is no text of its own.
            if self._ended_by_token and not self._include_stop:
                count -= 1
            if count > self._fed:
                self._text.feed(self.token_ids[self._fed : count])
                self._fed = count
            if self._finished is not None:
                self._text.close()
            return  # the text session's answer wakes the reader
        self._changed.set()

    def finish(self, finished: engine_pb2.Finished) -> None:
        """After the last tokens."""
        if finished.HasField("status") and self._stop_string is None:
            self.fail(from_service(finished.status))
        else:
            self._finished = finished
            self.advance()

    def fail(self, error: MillstreamError) -> None:
        """The engine refused or lost the request, or its text cannot be made."""
        if self._cut is not None and self._finished is None:
            self._finished = engine_pb2.Finished()  # the answer is whole without the engine's word
        elif not self.done:
            self._error = error
            if self._finished is None and self._cancel is not None:
                self._cancel()
            self._drop_text()
        self._changed.set()

    # ---- what the text session says

    def add_text(self, text: str) -> None:
        self._texts.append(text)

    def confirm(self, token_count: int, *, closed: bool) -> None:
        """The text session has answered for so many more tokens; `closed`: and flushed its text."""
        if not self._hold_ids:
            self._confirmed += token_count
        if closed:
            self._text_closed = True
            self._confirmed = len(self.token_ids)  # with a stop token that was no text
        self._changed.set()

    def stop(self, stop_string: str, token_count: int) -> None:
        """A stop string ends with the token number `token_count`; what comes after is dropped."""
        self._stop_string = stop_string
        self._cut = self._confirmed = token_count
        self._text_closed = True
        if self._finished is None and self._cancel is not None:
            self._cancel()
        self._changed.set()

    # ---- what the reader does

    @property
    def done(self) -> bool:
        if self._error is not None:
            return True
        return self._finished is not None and self._text_closed

    @property
    def error(self) -> MillstreamError | None:
        """Why it failed, if it did."""
        return self._error

    @property
    def never_taken(self) -> bool:
        """Whether the engine went away before it accepted the request: another may have it."""
        return self._accepted is None and isinstance(self._error, EngineUnavailable)

    @property
    def answered(self) -> bool:
        """Whether the engine took it or it failed."""
        return self._accepted is not None or self.done

    def cancel(self) -> None:
        """The reader wants no more; idempotent."""
        if self._finished is None and self._error is None and self._cancel is not None:
            self._cancel()
        self._drop_text()

    def news(self) -> Delta | None:
        """What came since the last call, None if nothing did; the last one has the finish reason.
        Raises the request's error."""
        if self._error is not None:
            raise copy(self._error)
        if self.done or self._texts or self._confirmed > self._shown:
            return self._take()
        return None

    def output(self) -> Output:
        """The whole; raises the request's error. Call it when done."""
        if self._error is not None:
            raise copy(self._error)
        delta = self._take()
        assert delta.finish_reason is not None
        assert delta.usage is not None
        assert delta.timings is not None
        assert delta.sampling is not None
        accepted = self._accepted or engine_pb2.Accepted()
        return Output(
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            usage=delta.usage,
            timings=delta.timings,
            prompt_token_ids=list(self.prompt_token_ids),
            request_id=accepted.request_id,
            sampling=delta.sampling,
            seed=delta.sampling.seed,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
        )

    # ----

    @property
    def _ended_by_token(self) -> bool:
        return self._finished is not None and self._finished.HasField("stop_token_id")

    def _drop_text(self) -> None:
        if self._text is not None and not self._text_closed:
            self._text_closed = True
            self._text.discard()

    def _take(self) -> Delta:
        shown, confirmed = self._shown, self._confirmed
        delta = Delta(
            text="".join(self._texts),
            token_ids=self.token_ids[shown:confirmed],
            sample=self._sample,
            logprobs=None if self._sampling.logprobs is None else self.logprobs[shown:confirmed],
            prompt_logprobs=self._prompt_logprobs_once(),
        )
        self._texts.clear()
        self._shown = confirmed
        return self._ended(delta) if self.done else delta

    def _prompt_logprobs_once(self) -> list[Logprob | None] | None:
        """They are whole when the first token comes."""
        wanted = self._sampling.prompt_logprobs is not None and self._sample == 0
        if not wanted or not self.prompt_logprobs:
            return None
        entries, self.prompt_logprobs = self.prompt_logprobs, []
        return entries

    def _ended(self, delta: Delta) -> Delta:
        """The last delta, with what it has besides."""
        finished = self._finished
        assert finished is not None
        if self._stop_string is None and finished.reason not in _REASONS:
            raise EngineFault(f"the engine ended the request with reason {finished.reason}")
        return replace(
            delta,
            finish_reason=FinishReason.STOP if self._cut is not None else _REASONS[finished.reason],
            stop_reason=self._stop_reason(finished),
            usage=Usage(
                prompt_tokens=len(self.prompt_token_ids),
                cached_tokens=finished.usage.cached_tokens,
                output_tokens=len(self.token_ids) if self._cut is None else self._cut,
            ),
            timings=Timings.of(finished.timings),
            sampling=self._resolved_sampling(),
        )

    def _resolved_sampling(self) -> SamplingParams:
        """What the engine made of the user's parameters, and those that are about text."""
        accepted = self._accepted or engine_pb2.Accepted()
        return replace(
            from_proto(accepted.sampling),
            stop=self._sampling.stop_strings,
            include_stop=self._sampling.include_stop,
            skip_special_tokens=self._sampling.skip_special_tokens,
        )

    def _stop_reason(self, finished: engine_pb2.Finished) -> int | str | None:
        if self._stop_string is not None:
            return self._stop_string
        return finished.stop_token_id if self._ended_by_token else None


_REASONS = {
    engine_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    engine_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
