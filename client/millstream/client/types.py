"""What the client gives back: outputs, stream deltas, usage, timings, health. Plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Self

from millstream.rpc.sampling_params import SamplingParams
from millstream.v1 import engine_pb2, tokenizer_pb2


class FinishReason(enum.StrEnum):
    """Why a request ended. Only the first two come with an output; the others are exceptions."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, as the engine measured it, in seconds."""

    queue_s: float = 0.0  # from submission until it was first scheduled
    prefill_s: float = 0.0  # from then until its first token
    first_token_s: float = 0.0  # from submission until its first token
    decode_s: float = 0.0  # from its first token until its last
    preemptions: int = 0

    @classmethod
    def of(cls, message: engine_pb2.Timings) -> Self:
        return cls(
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            first_token_s=message.first_token_s,
            decode_s=message.decode_s,
            preemptions=message.preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log probability of a token: log_softmax of the model's logits, before penalties, bias,
    temperature and filters."""

    token_id: int
    logprob: float
    text: str | None = None  # of the token by itself; None in deltas, and without a tokenizer
    top: list[Logprob] = field(default_factory=list)  # the likeliest in its place, as many as asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The whole answer to one prompt."""

    text: str  # "" with detokenize=False
    token_ids: list[int]  # with the EOS or stop token that ended the request
    finish_reason: FinishReason
    stop_reason: int | str | None  # the EOS or stop token's id, or the stop string, that matched
    usage: Usage
    timings: Timings
    prompt_token_ids: list[int]
    request_id: str
    seed: int | None  # gives the same answer again
    sampling: SamplingParams  # every parameter as it was resolved; gives the same answer again
    other_samples: list[Output] = field(default_factory=list)  # with n > 1: this is the first
    logprobs: list[Logprob] | None = None  # parallel to token_ids, if asked for
    # Parallel to prompt_token_ids, if asked for: None for the first token. Of the first sample.
    prompt_logprobs: list[Logprob | None] | None = None

    @property
    def samples(self) -> list[Output]:
        """All n samples of the prompt."""
        return [self, *self.other_samples]

    def to_dict(self) -> dict[str, Any]:
        """nano-vllm's form of a result."""
        return {"text": self.text, "token_ids": self.token_ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new in a stream: joined texts and ids equal those of the Output. The last delta has
    `finish_reason` and what follows it; it may have text and ids too."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    sampling: SamplingParams | None = None  # as in Output
    sample: int = 0  # of which of the n samples: 0 to n - 1; each has a last delta
    logprobs: list[Logprob] | None = None  # parallel to token_ids, if asked for
    prompt_logprobs: list[Logprob | None] | None = None  # as in Output; in its first delta


class Health(enum.StrEnum):
    """The health of a service, as grpc.health.v1 tells it."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    ABSENT = "no such service there"  # another one listens: an engine at the tokenizer's port, say
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesHealth:
    """The health of the services that a client is for; None where it is for only the other."""

    engine: Health | None
    tokenizer: Health | None

    @property
    def ok(self) -> bool:
        return {self.engine, self.tokenizer} <= {Health.SERVING, None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesInfo:
    """What the services say of themselves (the messages of engine.proto and tokenizer.proto)."""

    engine: engine_pb2.EngineInfo | None
    tokenizer: tokenizer_pb2.TokenizerInfo | None
