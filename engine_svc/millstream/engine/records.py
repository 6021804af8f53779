"""What the front end and the core process tell each other, as msgpack records; one frame each.

Keys are `stream << 32 | handle`: unique in the engine, and a step's outputs group by stream with a
shift. The core sends one StepRecord a step, whatever the number of streams.
"""

from __future__ import annotations

import msgspec

from millstream.engine.config import EngineConfig
from millstream.engine.plan import Phase, RunnerInfo, TokenLogprobs
from millstream.engine.request import GrammarSpec, Request
from millstream.engine.scheduling.prefix import BlockEvent, BlockName


def make_key(stream: int, handle: int) -> int:
    return stream << 32 | handle


def stream_of(key: int) -> int:
    return key >> 32


def handle_of(key: int) -> int:
    return key & 0xFFFFFFFF


class _Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# ---- front end -> core


class Start(_Record, frozen=True):
    """The first frame: the settings. The core imports what they need."""

    config: EngineConfig


class Load(_Record, frozen=True):
    """The second: where the model lies, once that is known; None: the runner needs no folder."""

    model_dir: str | None


class Submit(_Record, frozen=True):
    """New requests, in order: of each submission the first sample, as samples_of() takes it."""

    requests: list[Request]


class Finish(_Record, frozen=True):
    """Requests to end now, as CANCELLED, DEADLINE or SHUTDOWN; unknown keys are ignored."""

    keys: list[int]
    reason: int


class AskStats(_Record, frozen=True):
    """The core answers with a StatsRecord."""

    token: int


class WatchBlocks(_Record, frozen=True):
    """The core answers with a CachedBlocks, then tells of changes as BlockEvents."""

    token: int


class UnwatchBlocks(_Record, frozen=True):
    """No more BlockEvents, please."""


class PrepareGrammar(_Record, frozen=True):
    """The core answers with a GrammarPrepared; then requests may follow the grammar, until it is
    forgotten."""

    token: int
    spec: GrammarSpec


class ForgetGrammar(_Record, frozen=True):
    """No request will follow a grammar, unless it is prepared again."""

    spec: GrammarSpec


ToCore = (
    Start
    | Load
    | Submit
    | Finish
    | AskStats
    | WatchBlocks
    | UnwatchBlocks
    | PrepareGrammar
    | ForgetGrammar
)

# ---- core -> front end


class Loaded(_Record, frozen=True):
    """The model is loaded; requests may come. `phases`: of the core's start, from its spawning."""

    info: RunnerInfo
    phases: tuple[Phase, ...] = ()


class LoadFailed(_Record, frozen=True):
    """The model cannot be loaded; `message` is one clear line."""

    message: str


class FinishedRecord(msgspec.Struct, array_like=True, frozen=True):
    """A request ended. Its last tokens are in the same StepRecord, or came before."""

    key: int
    reason: int
    stop_token_id: int | None
    message: str  # what went wrong, for ERROR
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    preemptions: int


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of a request's prompt tokens that follow those of its earlier records; the first record
    begins with the second token."""

    key: int
    logprobs: list[TokenLogprobs]


class StepRecord(_Record, frozen=True):
    """What one step produced, as parallel arrays; without tokens for what ended between steps."""

    step: int
    keys: list[int]
    token_ids: list[int]
    finished: list[FinishedRecord]
    # Parallel to token_ids, None where the request did not ask; empty if none did.
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[PromptLogprobs] = []


class Counters(msgspec.Struct, array_like=True):
    """What of a scheduler only grows, from its first request on."""

    prompt_tokens: int = 0  # admitted for the first time
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens of prompts
    prefix_cache_hits: int = 0  # tokens of prompts
    num_preemptions: int = 0
    requests_finished: int = 0


class Stats(Counters, array_like=True):
    """A scheduler at one moment: a copy of its counters, steps and gauges."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    steps: int = 0


class StatsRecord(_Record, frozen=True):
    token: int
    stats: Stats


class CachedBlocks(_Record, frozen=True):
    """What the prefix cache has at this moment, a prefix before its continuations."""

    token: int
    names: list[BlockName]


class BlockEvents(_Record, frozen=True):
    """What changed in the prefix cache since the last one, or since the first CachedBlocks."""

    events: list[BlockEvent]


class GrammarPrepared(_Record, frozen=True):
    """A grammar is compiled, or why it is not: then `has_vocabulary` is False if no grammar can,
    `has_room` if this one can later."""

    token: int
    problem: str = ""
    has_vocabulary: bool = True
    has_room: bool = True


class Fault(_Record, frozen=True):
    """The core cannot go on; it exits after this."""

    message: str


FromCore = (
    Loaded
    | LoadFailed
    | StepRecord
    | StatsRecord
    | CachedBlocks
    | BlockEvents
    | GrammarPrepared
    | Fault
)
