"""A request as the scheduler takes it: validated, with every default filled in.

A request is made anew in the front end and in the core, or in LLM: hence msgspec's structs, since a
frozen dataclass of so many fields takes six times as long. gc=False: none is part of a cycle.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

GREEDY_BELOW = 1e-5  # temperatures below this are greedy; nothing is ever divided by them


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are the proto's FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5
    SHUTDOWN = 6


class GrammarKind(enum.IntEnum):
    """How a GrammarSpec says what the output must be: the cases of structured_output."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What the output must be, as the user wrote it."""

    kind: GrammarKind
    text: str = ""  # of CHOICE a JSON array of strings, of JSON_OBJECT nothing


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Resolved sampling parameters. Ranges are validation/sampling.py's; this type is never out of
    them."""

    max_tokens: int  # already clamped to the context limit
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no filter
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # ascending, without repeats; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # none is empty
    logprobs: int | None = None  # so many likeliest besides the token's own; None: none at all
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    n: int = 1  # samples of the prompt, of which this is one

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def follows_tokens(self) -> bool:
        """Whether what may be sampled next depends on the tokens before, so that the host must
        know them all."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def needs_token_ids(self) -> bool:
        """Whether a slot that starts must know the tokens so far."""
        return self.has_penalties or self.follows_tokens


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one submission asks for."""

    key: int  # names the request between the front end and the core
    token_ids: list[int]  # the prompt, at least one id
    sampling: Sampling
    request_id: str = ""  # for logs
    cache_salt: str = ""
    priority: int = 0  # smaller is served first
    client: int = 0  # whose it is: clients share the engine fairly

    @property
    def num_ids(self) -> int:
        """Token ids that it holds; what else is large counts for as many as take its memory."""
        sampling = self.sampling
        grammar = 0 if sampling.grammar is None else len(sampling.grammar.text) // 8
        return (
            len(self.token_ids)
            + len(sampling.stop_token_ids)
            + 3 * len(sampling.logit_bias)
            + len(sampling.allowed_token_ids)
            + sum(map(len, sampling.bad_words))
            + grammar
        )

    @property
    def num_ids_of_all(self) -> int:
        """The same of all samples of its prompt together."""
        return self.sampling.n * self.num_ids


def samples_of(first: Request) -> list[Request]:
    """A request for each sample of the prompt, with consecutive keys and seeds, that share all that
    is large. The prompt's log probabilities come with the first."""
    return [first, *(_sample(first, index) for index in range(1, first.sampling.n))]


def _sample(first: Request, index: int) -> Request:
    seed = (first.sampling.seed + index) % (1 << 64)
    sampling = replace(first.sampling, seed=seed, prompt_logprobs=None)
    return replace(first, key=first.key + index, sampling=sampling)
