"""One vLLM generation: the engine's messages about its samples, as the messages of that protocol.

Tokens go out as they come, but those that come after a stop string never do. So while a match
waits for one that may yet start earlier, the tokens behind it wait too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as vllm

from millstream.rpc.errors import from_status
from millstream.tokenizer.detokenizer import Detokenizer
from millstream.v1 import engine_pb2

_FINISH_REASONS = {
    engine_pb2.FINISH_REASON_STOP: "stop",
    engine_pb2.FINISH_REASON_LENGTH: "length",
    engine_pb2.FINISH_REASON_CANCELLED: "abort",
}


@dataclass(frozen=True, slots=True)
class Position:
    """The log probabilities of one token."""

    logprob: float
    top: vllm.TopLogProbs


def positions(columns: engine_pb2.Logprobs) -> Iterator[Position]:
    """The rows of parallel arrays."""
    start = 0
    counts = columns.top_counts or [0] * len(columns.token_logprobs)
    for logprob, count in zip(columns.token_logprobs, counts, strict=True):
        stop = start + count
        top = vllm.TopLogProbs(
            values=columns.top_logprobs[start:stop], token_ids=columns.top_token_ids[start:stop]
        )
        yield Position(logprob, top)
        start = stop


@dataclass(slots=True)
class Sample:
    """One of a request's n outputs."""

    index: int
    detokenizer: Detokenizer | None  # looks for stop strings, if there are any
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)  # one for each, or none at all
    num_sent: int = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        stopped = self.detokenizer.stopped if self.detokenizer else None
        return stopped.stop if stopped else None

    def add(self, token_ids: Sequence[int], logprobs: list[Position]) -> bool:
        """More tokens, while no stop string was met; whether one is met now. What comes after it
        is dropped."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if self.detokenizer is None:
            return False
        self.detokenizer.extend(token_ids)
        return self._cut(self.detokenizer)

    def flush(self) -> None:
        """There are no more: a match that waits is one."""
        if self.detokenizer is not None and self.stop_string is None:
            self.detokenizer.flush()
            self._cut(self.detokenizer)

    def _cut(self, detokenizer: Detokenizer) -> bool:
        if detokenizer.stopped is None:
            return False
        del self.token_ids[detokenizer.stopped.token_count :]
        return True

    def take(self) -> slice:
        """The tokens that may be sent and were not."""
        start = self.num_sent
        self.num_sent = self.detokenizer.settled_count if self.detokenizer else len(self.token_ids)
        return slice(start, self.num_sent)

    def output_logprobs(self, part: slice) -> vllm.OutputLogProbs | None:
        """Of these tokens; None if they were not asked for."""
        rows = self.logprobs[part]
        if not rows:
            return None
        return vllm.OutputLogProbs(
            token_logprobs=[row.logprob for row in rows],
            token_ids=self.token_ids[part],
            top_logprobs=[row.top for row in rows] if any(row.top.values for row in rows) else (),
        )


class Generation:
    """The samples of one request. `detokenizer` makes one for each, if there are stop strings."""

    def __init__(
        self,
        prompt: list[int],
        *,
        stream: bool,
        logprobs: bool,
        prompt_logprobs: bool,
        eos_token_ids: Iterable[int],
        detokenizer: Callable[[], Detokenizer] | None,
    ) -> None:
        self._prompt = prompt
        self._stream = stream
        self._wants_logprobs = logprobs
        self._wants_prompt_logprobs = prompt_logprobs
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._samples: dict[int, Sample] = {}
        self._prompt_logprobs: list[Position] = []
        self.stopped: list[int] = []  # handles that met a stop string in the last message

    def take(self, message: engine_pb2.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """What a message of the engine says in the other protocol. Raises the error of a request
        that was refused or failed; UnknownTokenId for an id that the tokenizer does not know."""
        self.stopped = []
        for rejected in message.rejected:
            raise from_status(rejected.status)
        for piece in message.prompt_logprobs:
            self._prompt_logprobs.extend(positions(piece.logprobs))
        for sample in self._add(message.output):
            if self._stream:
                yield from self._chunk(sample)
        for finished in message.finished:
            yield from self._finish(finished)

    def _add(self, output: engine_pb2.StepOutput) -> list[Sample]:
        """Hands each sample its tokens; those that got any."""
        rows = list(positions(output.logprobs)) if self._wants_logprobs else []
        counts = output.counts or [1] * len(output.handles)
        samples = []
        start = 0
        for handle, count in zip(output.handles, counts, strict=True):
            sample, part = self._sample(handle), slice(start, start + count)
            start += count
            if sample.stop_string is not None:
                continue
            samples.append(sample)
            if sample.add(output.token_ids[part], rows[part]):
                self.stopped.append(handle)
        return samples

    def _sample(self, handle: int) -> Sample:
        if (sample := self._samples.get(handle)) is None:
            detokenizer = self._detokenizer() if self._detokenizer else None
            sample = self._samples[handle] = Sample(handle, detokenizer)
        return sample

    def _chunk(self, sample: Sample) -> Iterator[vllm.GenerateResponse]:
        first = sample.num_sent == 0
        part = sample.take()
        token_ids = sample.token_ids[part]
        if token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=token_ids,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(token_ids),  # of this chunk, as vLLM counts
                output_logprobs=sample.output_logprobs(part),
                input_logprobs=self._input_logprobs() if first else None,
                index=sample.index,
            )
            yield vllm.GenerateResponse(chunk=chunk)

    def _finish(self, finished: engine_pb2.Finished) -> Iterator[vllm.GenerateResponse]:
        sample = self._sample(finished.handle)
        sample.flush()
        reason = _FINISH_REASONS.get(finished.reason)
        if reason is None and sample.stop_string is None:
            raise from_status(finished.status)
        if self._stream:
            yield from self._chunk(sample)
        whole = slice(0, len(sample.token_ids))
        complete = vllm.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason="stop" if sample.stop_string is not None else reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(sample.token_ids),
            cached_tokens=finished.usage.cached_tokens,
            # A stream has had them already, chunk by chunk.
            output_logprobs=None if self._stream else sample.output_logprobs(whole),
            input_logprobs=None if self._stream else self._input_logprobs(),
            index=sample.index,
        )
        if sample.stop_string is not None:
            complete.matched_stop_str = sample.stop_string
        elif (
            finished.HasField("stop_token_id") and finished.stop_token_id not in self._eos_token_ids
        ):
            complete.matched_token_id = finished.stop_token_id
        yield vllm.GenerateResponse(complete=complete)

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        """Of the whole prompt; the first token has none. None if they were not asked for."""
        if not self._wants_prompt_logprobs:
            return None
        rows = self._prompt_logprobs
        tops = [vllm.TopLogProbs(), *(row.top for row in rows)]
        return vllm.InputLogProbs(
            token_logprobs=[
                vllm.InputTokenLogProb(),
                *(vllm.InputTokenLogProb(value=row.logprob) for row in rows),
            ],
            token_ids=self._prompt,
            top_logprobs=tops if any(top.values for top in tops) else (),
        )
