"""What one step does: decided by the scheduler, carried out by a runner. Both sides are frozen.

A plan names sequences by *slot*, an index below max_num_seqs into state that the runner keeps (on
the device): a slot's block-table row, its count of computed tokens, its last sampled token and its
sampling parameters. Per-slot state is sent in full when a sequence takes the slot and as a diff
afterwards, so a steady decode step carries nothing but the slots' numbers.

With a runner that works one step ahead, plan N+1 is launched before the tokens of plan N are known
on the host: a decode's input token is whatever the slot sampled last. Steps are computed in order,
so a block or slot that plan N still touches may be given away by plan N+1. One thing may be written
while the step before is computed: the blocks that a plan without starts appends to block tables.
That step, the only one in flight, had the same sequences in these slots, and reads no entry behind
their contexts.

Within a step, a layer writes the KV of all chunks before any attention of that layer reads: the
cached blocks of a sequence that starts may be filled by an earlier chunk of the same plan.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from millstream.engine.request import GrammarSpec, Sampling

Phase = tuple[str, float]  # a part of a start: (name, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStart:
    """A sequence takes a slot: first admission, or resumption after preemption."""

    slot: int
    sampling: Sampling
    # Stop ids (EOS ids included unless ignored) must not be sampled at positions below this:
    # prompt length + min_tokens. The position of a token is its index in prompt + output.
    min_position: int
    banned_token_ids: tuple[int, ...]  # those stop ids; empty when min_tokens is 0
    num_computed_tokens: int  # found in the prefix cache; a multiple of the block size
    block_ids: tuple[int, ...]  # the slot's block table so far: the cached blocks and new ones
    # Prompt and output so far, if sampling.needs_token_ids; else empty.
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens whose ids the host knows: a piece of a prompt, or of a preempted sequence.

    [0 ........ start)[start ........ start+len(token_ids))     positions in prompt + output
      KV computed       computed by this step
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool  # the chunk ends the known tokens, so the next token is sampled
    # prompt_logprobs: the ids that follow token_ids[first_target], [first_target + 1], ... in the
    # prompt, whose log probabilities are wanted.
    first_target: int = 0
    target_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step. Everything is applied in the order of the fields."""

    step: int
    starts: tuple[SlotStart, ...] = ()
    # (slot, block id): appended to the slot's block table; only of slots that started earlier.
    block_appends: tuple[tuple[int, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    # Slots that advance by one token, which is the one that the slot sampled last.
    decode_slots: tuple[int, ...] = ()
    # Set by a runner of several ranks: a slot of the plan needs all of a row's logits in one place
    # when it samples.
    whole_rows: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.decode_slots)

    @property
    def has_targets(self) -> bool:
        """Whether tokens of prompts are scored."""
        return any(chunk.target_ids for chunk in self.chunks)


class TokenLogprobs(NamedTuple):
    """Log probabilities where one token is: log_softmax, in float32, of the model's own logits,
    before penalties, bias, masks, temperature and filters. Never NaN."""

    logprob: float  # of the token that is there
    # The likeliest ones, likeliest first; as many as the request asked for.
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens that a plan sampled: one for each chunk that samples, then one a decode slot."""

    step: int
    token_ids: list[int]
    # Parallel to token_ids, None where the request did not ask; empty if none did.
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    # For each chunk that has targets, of each of these.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    # Why a row's token is none that the request asked for, by the row: the request has failed.
    problems: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What a runner tells once it is loaded."""

    vocab_size: int  # rows of the embedding
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # most tokens of prompt and output together
    max_num_seqs: int  # slots
    max_num_batched_tokens: int
    block_size: int  # tokens a KV block
    num_blocks: int  # usable blocks: ids 1..num_blocks; block 0 is the runner's scratch
    max_in_flight: int = 1  # plans launched and not yet collected; 2 is one step ahead
    # False: the KV of equal prefixes may differ between prompts (dynamic RoPE), so no prefix cache.
    prefix_sharing: bool = True
    structured_output: bool = False  # whether it can follow grammars
    # Whether a token's bits are the same in every batch. Decoding rounds otherwise than chunks do:
    # what it wrote to the KV cache is then neither computed again in chunks nor shared.
    batch_invariant: bool = False
    phases: tuple[Phase, ...] = field(default=(), compare=False)  # of loading the model


class Runner(Protocol):
    """Carries plans out, in order. One thread only calls it."""

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: Plan) -> None:
        """Starts a step; at most info.max_in_flight are launched and not collected."""

    def collect(self) -> StepResult:
        """Waits for the oldest launched step."""

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        """Compiles a grammar beside the loop, before a request that follows it is launched; the
        future may have a GrammarError, and is held while there are such requests. Only if
        info.structured_output."""

    def close(self) -> None:
        """Frees what the runner holds."""


@runtime_checkable
class PreparesAhead(Protocol):
    """A runner that can use the time in which there is nothing to run."""

    def prepare_ahead(self) -> bool:
        """Does a piece of what a later step would have to do first, of some ten milliseconds. False
        if there is none left. Only while no step is launched."""
