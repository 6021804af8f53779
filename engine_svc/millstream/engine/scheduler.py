"""Scheduler: decides what each step computes, and says what became of it.

One notion, computed tokens catching up with known ones, covers everything: a prompt is caught up
with in chunks, a preempted sequence (prompt and output) likewise, a decode is behind by one. A step
gives every decoding sequence its token first, and what is left of the token budget to chunks:

    waiting -----admit-----> prefilling ------> decoding -----> draining / finished
       ^                         |                 |
       '-- preempt: the least urgent first, to the front

Who is admitted next is scheduling/waiting.py's: by priority, fairly among clients, in order of
arrival. Nobody overtakes the next one when that has to wait for blocks, and nobody gives up a slot
for it. While a prompt is in the making, those are admitted that pass it between its chunks
(scheduling/prefilling.py). Blocks for all known tokens are taken at admission, one more whenever a
decode fills its last; when there is none, the running sequence of the lowest priority (the largest
number), of several the last admitted, gives up its blocks and computes again later. The most
urgent, first admitted one so always gets on, and it fits by itself.

With a runner that works one step ahead, schedule() is called while the tokens of the last plan are
pending. Lengths are known without them: nothing is launched past the last token, and a sequence
gives up its slot and blocks as soon as that one is launched. A stop id is seen one step late, and
the surplus token is dropped.

Pure: no clock, no threads, no I/O. Not thread-safe.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import asdict

from millstream.engine.plan import Chunk, Plan, RunnerInfo, SlotStart, StepResult
from millstream.engine.records import Counters, FinishedRecord, Stats, StepRecord
from millstream.engine.request import FinishReason, Request
from millstream.engine.scheduling.holdings import Holdings
from millstream.engine.scheduling.launched import Launched
from millstream.engine.scheduling.prefilling import Prefilling
from millstream.engine.scheduling.prefix import BlockEvent, BlockName
from millstream.engine.scheduling.waiting import WaitingQueue
from millstream.engine.sequence import Sequence, Status, never_fits


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.admission


class Scheduler:
    """Owns every sequence and the block pool. Times are seconds of one monotonic clock."""

    def __init__(self, info: RunnerInfo, prefix_caching: bool) -> None:
        self.info = info
        self._holdings = Holdings(info, prefix_caching)
        self._sequences: dict[int, Sequence] = {}  # by key, until they finish
        self._waiting = WaitingQueue()
        self._prefilling = Prefilling(self._holdings.tokens_to_compute)
        # In order of their first tokens. Replaced, never changed in place: plans in flight have it.
        self._decoding: list[Sequence] = []
        self._decode_slots: tuple[int, ...] = ()
        self._decoding_changed = False  # some of _decoding are no longer running
        self._launched: deque[Launched] = deque()
        self._step = 0
        self._num_admissions = 0
        self._counters = Counters()

    # ---- requests come and go

    def add(self, request: Request, now: float) -> FinishedRecord | None:
        """Queues a request. One that can never fit, which validation refuses, ends here at once."""
        assert request.key not in self._sequences, "the front end reused a live key"
        sequence = Sequence.create(request, self.info, now)
        self._sequences[request.key] = sequence
        self._waiting.add(sequence)
        problem = never_fits(self.info, sequence.prompt_len, request.sampling.max_tokens)
        return self._end(sequence, FinishReason.ERROR, now, message=problem) if problem else None

    def finish(self, key: int, reason: FinishReason, now: float) -> FinishedRecord | None:
        """Ends a request in whatever state; None if there is none (any more). No token of it comes
        out afterwards."""
        sequence = self._sequences.get(key)
        return None if sequence is None else self._end(sequence, reason, now)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        message: str = "",
    ) -> FinishedRecord:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._release(sequence)
            self._waiting.stopped(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.key]
        self._counters.requests_finished += 1
        return sequence.finished_record(reason, now, stop_token_id, message)

    # ---- a step is decided

    def schedule(self, now: float) -> Plan | None:
        """The next step, which must be launched; None if nothing can be computed now."""
        self._refresh_decoding()
        block_appends = self._extend_decodes()
        self._refresh_decoding()
        decoding, decode_slots = self._decoding, self._decode_slots
        for sequence in decoding:
            sequence.num_computed_tokens += 1
        starts: list[SlotStart] = []
        chunks: list[Chunk] = []
        sampled: list[Sequence] = []
        scored: list[Sequence] = []
        # Never below 0: a sequence begins to decode only with budget to spare.
        budget = self.info.max_num_batched_tokens - len(decoding)
        # Whole steps count: what passes a prompt decodes beside it afterwards.
        reserved = -(-self.info.max_num_batched_tokens // 2)
        while budget > 0 and (next_up := self._next_up(starts, budget - reserved, now)):
            chunk = next_up.take_chunk(budget)
            chunks.append(chunk)
            self._holdings.register(next_up)
            budget -= len(chunk.token_ids)
            self._prefilling.note_chunk(next_up, is_last=chunk.samples)
            if chunk.samples:
                sampled.append(next_up)
            if chunk.target_ids:
                scored.append(next_up)
        if not decoding and not chunks:
            return None
        if sampled:
            self._decoding = [*decoding, *sampled]
            self._decode_slots = (*decode_slots, *(sequence.slot for sequence in sampled))
        self._step += 1
        rows = [*sampled, *decoding] if sampled else decoding
        self._launched.append(Launched(self._step, rows, len(sampled), scored))
        return Plan(
            step=self._step,
            starts=tuple(starts),
            block_appends=block_appends,
            chunks=tuple(chunks),
            decode_slots=decode_slots,
        )

    def _refresh_decoding(self) -> None:
        if self._decoding_changed:
            running = Status.RUNNING
            self._decoding = [item for item in self._decoding if item.status is running]
            self._decode_slots = tuple([item.slot for item in self._decoding])
            self._decoding_changed = False

    def _extend_decodes(self) -> tuple[tuple[int, int], ...]:
        """Makes room for one more token of each decoding sequence; the new blocks by slot."""
        due = [item for item in self._decoding if item.num_computed_tokens == item.compute_limit]
        if not due:
            return ()
        for sequence in due:
            if sequence.num_computed_tokens == sequence.max_computed_tokens:
                self._release(sequence)
                self._waiting.stopped(sequence)
                sequence.status = Status.DRAINING
        due.sort(key=_urgency)
        appends: list[tuple[int, int]] = []
        for sequence in due:  # an earlier one may preempt a later one, never the reverse
            while sequence.status is Status.RUNNING and not self._holdings.has_block:
                self._preempt(self._least_urgent())
            if sequence.status is Status.RUNNING:
                appends.append(self._holdings.extend(sequence))
        return tuple(appends)

    def _least_urgent(self) -> Sequence:
        """Of the lowest priority the last admitted. One runs."""
        return max(self._running(), key=_urgency)

    def _running(self) -> list[Sequence]:
        decoding = [item for item in self._decoding if item.status is Status.RUNNING]
        return [*decoding, *self._prefilling]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of its priority; what it knows stays, what it computed may be found
        again in the prefix cache."""
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self._waiting.put_back(sequence)
        self._counters.num_preemptions += 1

    def _next_up(self, starts: list[SlotStart], spare_tokens: int, now: float) -> Sequence | None:
        """Whose chunk is next in this step; None if nobody's can be."""
        first = self._waiting.first() if self._holdings.has_slot else None
        passes = first is not None and self._prefilling.gives_way_to(first, spare_tokens)
        if first is None or not passes or not self._admit(first, now):
            return self._prefilling.top
        starts.append(first.slot_start())
        return first

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Gives a sequence a slot, which is free, and blocks for all its known tokens; whether
        there were as many."""
        # Of a preempted one, the last token may come with a plan in flight.
        if sequence.num_pending_tokens or not self._holdings.take(sequence):
            return False
        self._waiting.admit(sequence)
        sequence.status = Status.RUNNING
        sequence.admission = self._num_admissions
        self._num_admissions += 1
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = sequence.num_computed_tokens
            self._counters.prompt_tokens += sequence.prompt_len
            self._counters.prefix_cache_queries += sequence.prompt_len
            self._counters.prefix_cache_hits += sequence.cached_tokens
        return True

    def _release(self, sequence: Sequence) -> None:
        """Takes slot and blocks from a running sequence."""
        self._holdings.give_back(sequence)
        if not self._prefilling.remove(sequence):
            self._decoding_changed = True

    # ---- who watches the prefix cache

    def watch_blocks(self) -> list[BlockName]:
        """What the prefix cache has, a prefix before its continuations; from now on
        take_block_events() tells what changes."""
        return self._holdings.pool.watch()

    def unwatch_blocks(self) -> None:
        """Nobody takes events any longer."""
        self._holdings.pool.unwatch()

    def take_block_events(self) -> list[BlockEvent]:
        """What changed in the prefix cache since the last call; nothing while nobody watches."""
        return self._holdings.pool.take_events()

    # ---- a step is done

    def apply(self, result: StepResult, now: float) -> StepRecord:
        """What the oldest launched step produced, and who ended with it."""
        launched = self._launched.popleft()
        assert result.step == launched.step, "results come in the order of the plans"
        for sequence in launched.rows[: launched.num_chunk_rows]:
            if sequence.first_token_at is None:
                sequence.first_token_at = now
        finished = [
            self._end(launched.rows[row], FinishReason.ERROR, now, message=problem)
            for row, problem in result.problems.items()
            if launched.rows[row].status is not Status.FINISHED
        ]
        keys: list[int] = []
        token_ids: list[int] = []
        gone = Status.FINISHED
        logprobs, prompt_logprobs = launched.logprobs_of_the_living(result)
        for sequence, token_id in zip(launched.rows, result.token_ids, strict=True):
            if sequence.status is gone:
                continue
            known = sequence.token_ids
            known.append(token_id)
            keys.append(sequence.key)
            token_ids.append(token_id)
            sequence.last_token_at = now
            if token_id in sequence.stop_token_ids and (
                len(known) > sequence.min_position or token_id in sequence.end_token_ids
            ):
                stop = FinishReason.STOP
                finished.append(self._end(sequence, stop, now, stop_token_id=token_id))
            elif len(known) == sequence.max_len:
                finished.append(self._end(sequence, FinishReason.LENGTH, now))
        self._counters.generation_tokens += len(keys)
        return StepRecord(launched.step, keys, token_ids, finished, logprobs, prompt_logprobs)

    # ---- what there is

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._holdings.num_slots_used

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_launched(self) -> int:
        """Plans whose results were not applied yet."""
        return len(self._launched)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._launched)

    def stats(self) -> Stats:
        """Gauges and counters at this moment."""
        return Stats(
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            kv_blocks_used=self._holdings.pool.num_used,
            kv_blocks_total=self._holdings.pool.num_blocks,
            steps=self._step,
            **asdict(self._counters),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError where the parts disagree. Slow: for tests and idle moments."""
        running, in_the_making = self._running(), len(list(self._prefilling))
        num_decoding = len(running) - in_the_making
        assert num_decoding <= self.info.max_num_batched_tokens, "decodes do not fit in a step"
        self._prefilling.check_invariants()
        self._holdings.check_invariants(running)
        for key, sequence in self._sequences.items():
            sequence.check_invariants(self.info.block_size)
            assert sequence.key == key
            assert (sequence.status is Status.RUNNING) == (sequence in running)
        waiting = [item for item in self._sequences.values() if item.status is Status.WAITING]
        self._waiting.check_invariants(waiting, running)
