"""Sequence: a request as the scheduler sees it, and the arithmetic of how far one can go.

    [0 ........ prompt_len)[prompt_len ........ known)[known .... known + pending)
      prompt                 output, ids known          sampled by a launched step, not yet known
    [0 ........................... num_computed_tokens)
      KV written, or to be written by a launched step

Positions are indices in prompt + output. While a sequence decodes, its computed tokens are one
fewer than its known and pending ones: the last token's KV is written by the step that reads it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from millstream.engine.plan import Chunk, RunnerInfo, SlotStart
from millstream.engine.records import FinishedRecord
from millstream.engine.request import FinishReason, Request
from millstream.engine.scheduling.prefix import BlockName, extend_names


def never_fits(info: RunnerInfo, prompt_len: int, max_tokens: int) -> str:
    """Why a request could not run even with the engine to itself; "" if it could. max_tokens may
    go past the context limit. The KV of the last token is never written."""
    max_len = min(prompt_len + max_tokens, info.max_model_len)
    if not 0 < prompt_len < max_len:
        return f"no room for output after {prompt_len} of at most {info.max_model_len} tokens"
    needed = -(-(max_len - 1) // info.block_size)
    if needed > info.num_blocks:
        return f"needs {needed} KV blocks and there are {info.num_blocks}"
    return ""


class Status(enum.Enum):
    """Where a sequence stands. Only a running one holds a slot and blocks."""

    WAITING = enum.auto()  # not admitted yet, or preempted
    RUNNING = enum.auto()
    DRAINING = enum.auto()  # its last token is being computed: no later step concerns it
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable state of one request; owned and changed by the Scheduler alone."""

    request: Request
    key: int
    token_ids: list[int]  # prompt and output, as far as known
    prompt_len: int
    max_len: int  # token_ids never grows past this
    stop_token_ids: frozenset[int]  # EOS ids included, unless ignored
    end_token_ids: frozenset[int]  # EOS ids where a grammar has the last word on the end
    min_position: int  # stop ids count from this position on, but for end_token_ids
    arrived_at: float

    status: Status = Status.WAITING
    # A preempted sequence keeps its count until it is admitted again, so that num_pending_tokens
    # stays right while its last step is in flight.
    num_computed_tokens: int = 0
    admission: int = -1  # how many were admitted before it was, the last time
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    # Tokens may be computed up to here without the scheduler's attention: the end of the block
    # table, or of the request.
    compute_limit: int = 0
    names: list[BlockName] = field(default_factory=list)  # of leading blocks
    num_registered_blocks: int = 0  # leading blocks that the prefix cache was told of
    # The first prompt position whose log probability no launched step has computed; prompt_len
    # when none is wanted (any more).
    next_target: int = 0

    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0

    @classmethod
    def create(cls, request: Request, info: RunnerInfo, now: float) -> Sequence:
        """The sequence of a new request; `now` in seconds of any monotonic clock."""
        sampling = request.sampling
        prompt_len = len(request.token_ids)
        structured = sampling.grammar is not None
        eos_token_ids = () if sampling.ignore_eos and not structured else info.eos_token_ids
        return cls(
            request=request,
            key=request.key,
            token_ids=list(request.token_ids),
            prompt_len=prompt_len,
            max_len=min(prompt_len + sampling.max_tokens, info.max_model_len),
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            end_token_ids=frozenset(eos_token_ids if structured else ()),
            min_position=prompt_len + sampling.min_tokens,
            arrived_at=now,
            # Nothing comes before the first token that it could follow from.
            next_target=prompt_len if sampling.prompt_logprobs is None else 1,
        )

    @property
    def num_pending_tokens(self) -> int:
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def max_computed_tokens(self) -> int:
        return self.max_len - 1

    def most_blocks(self, block_size: int) -> int:
        """Blocks that it may come to need."""
        return -(-self.max_computed_tokens // block_size)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """What must not be sampled below min_position."""
        return tuple(sorted(self.stop_token_ids)) if self.min_position > self.prompt_len else ()

    def slot_start(self) -> SlotStart:
        """What the runner must know of it now that it has taken a slot."""
        sampling = self.request.sampling
        return SlotStart(
            slot=self.slot,
            sampling=sampling,
            min_position=self.min_position,
            banned_token_ids=self.banned_token_ids,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=tuple(self.block_ids),
            token_ids=tuple(self.token_ids) if sampling.needs_token_ids else (),
        )

    @property
    def wants_targets(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed."""
        return self.next_target < self.prompt_len

    def take_chunk(self, budget_tokens: int) -> Chunk:
        """What follows its computed tokens, `budget_tokens` at most, for a step that is about to be
        launched: computed from now on. It has a slot, and blocks for them."""
        start = self.num_computed_tokens
        token_ids = tuple(self.token_ids[start : start + budget_tokens])
        self.num_computed_tokens = stop = start + len(token_ids)
        first_target, target_ids = self._take_targets(start, stop)
        return Chunk(
            slot=self.slot,
            start=start,
            token_ids=token_ids,
            samples=stop == len(self.token_ids),
            first_target=first_target,
            target_ids=target_ids,
        )

    def _take_targets(self, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """The targets of a chunk [start, stop) that is about to be launched: Chunk.first_target
        and target_ids."""
        first = max(start + 1, self.next_target)
        after = min(stop + 1, self.prompt_len)
        if first >= after:
            return 0, ()
        self.next_target = after
        return first - 1 - start, tuple(self.token_ids[first:after])

    def block_names(self, start: int, stop: int, block_size: int) -> list[BlockName]:
        """The prefix-cache names of the blocks [start, stop), whose tokens must be known."""
        extend_names(self.names, self.request.cache_salt, self.token_ids, block_size, stop)
        return self.names[start:stop]

    def check_invariants(self, block_size: int) -> None:
        """Raises AssertionError where the fields disagree."""
        computed, known = self.num_computed_tokens, len(self.token_ids)
        running = self.status is Status.RUNNING
        assert running == (self.slot >= 0) == bool(self.block_ids), "only a running one holds any"
        assert self.prompt_len <= known < self.max_len, "ended and not finished"
        assert computed <= self.max_computed_tokens, "computes what nobody reads"
        assert 0 < self.next_target <= self.prompt_len, "scores what is no prompt"
        if running:
            backed = len(self.block_ids) * block_size
            assert computed <= self.compute_limit == min(backed, self.max_computed_tokens)
            assert self.num_registered_blocks <= min(computed, known) // block_size

    def finished_record(
        self, reason: FinishReason, now: float, stop_token_id: int | None, message: str
    ) -> FinishedRecord:
        """The account of a sequence that ends at `now`. A phase that it never left lasts until
        then; one that it never reached takes 0 seconds."""
        arrived, scheduled, first = self.arrived_at, self.scheduled_at, self.first_token_at
        return FinishedRecord(
            key=self.key,
            reason=int(reason),
            stop_token_id=stop_token_id,
            message=message,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.token_ids) - self.prompt_len,
            queue_s=(now if scheduled is None else scheduled) - arrived,
            prefill_s=0.0 if scheduled is None else (now if first is None else first) - scheduled,
            first_token_s=0.0 if first is None else first - arrived,
            decode_s=0.0 if first is None else self.last_token_at - first,
            preemptions=self.preemptions,
        )
