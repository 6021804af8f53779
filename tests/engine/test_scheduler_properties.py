"""Random traffic through small pools: whatever is batched, chunked, shared, preempted or cancelled,
each request gets the tokens that it would get alone, and nothing is left behind."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs
from tests.toy_runner import ToyRunner, prompt_scores, reference, toy_info, toy_request

from millstream.engine.plan import Plan, RunnerInfo, TokenLogprobs
from millstream.engine.records import FinishedRecord, StepRecord
from millstream.engine.request import FinishReason, Request
from millstream.engine.scheduler import Scheduler
from millstream.engine.sequence import Sequence, Status

BLOCK_SIZE = 4
SEEDS = 600


def random_info(rng: random.Random) -> RunnerInfo:
    return toy_info(
        vocab_size=rng.choice([8, 60]),
        eos_token_ids=rng.choice([(), (1,), (2, 5)]),
        max_model_len=rng.choice([24, 64]),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 16, 64]),
        block_size=BLOCK_SIZE,
        num_blocks=rng.randint(3, 12),
        max_in_flight=rng.choice([1, 2, 2, 3]),
    )


def random_requests(rng: random.Random, info: RunnerInfo) -> list[Request]:
    """Prompts that share prefixes, some of them equal, some of them several samples of one prompt,
    of a few clients and priorities; every request fits by itself."""
    capacity = min(info.num_blocks * BLOCK_SIZE + 1, info.max_model_len)
    families = [[rng.randrange(info.vocab_size) for _ in range(capacity)] for _ in range(3)]
    priorities, num_clients = rng.choice([[0], [-5, 0, 3]]), rng.randint(1, 3)
    requests: list[Request] = []
    for _ in range(rng.randint(1, 12)):
        prompt_len = rng.randint(1, capacity - 1)
        shared = rng.choice([0, 4, 8, prompt_len // 2, prompt_len])
        prompt = rng.choice(families)[:prompt_len]
        prompt[shared:] = [rng.randrange(info.vocab_size) for _ in prompt[shared:]]
        if rng.random() < 0.3:  # equal blocks behind unequal ones
            prompt[0] = rng.randrange(info.vocab_size)
        max_tokens = rng.randint(1, capacity - prompt_len)
        first = toy_request(
            len(requests),
            prompt,
            cache_salt=rng.choice(["", "", "a", "b"]),
            priority=rng.choice(priorities),
            client=rng.randrange(num_clients),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            seed=rng.randrange(3),
            stop_token_ids=rng.choice([(), (3,), (4, 6)]),
            ignore_eos=rng.random() < 0.5,
            bad_words=rng.choice([(), (), ((1, 2),)]),  # only so that starts know the tokens
            logprobs=rng.choice([None, None, 1]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        requests += samples(first, rng.choice([1, 1, 1, rng.randint(2, 4)]))
    return requests


class Traffic:
    """A scheduler and a toy runner, and what came out of them for each request."""

    def __init__(self, info: RunnerInfo, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(info, prefix_caching)
        self.runner = ToyRunner(info)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.finished: dict[int, FinishedRecord] = {}
        self.first_token_s: dict[int, float] = {}
        self.arrived_at: dict[int, float] = {}
        self.admitted: dict[int, int] = {}  # running ones: how many were admitted before
        self.num_admitted = 0
        self.seen: Counter[str] = Counter()
        self.now = 0.0

    def add(self, request: Request) -> None:
        self.tokens[request.key], self.logprobs[request.key] = [], []
        self.prompt_logprobs[request.key] = []
        self.arrived_at[request.key] = self.now
        self.note(self.scheduler.add(request, self.now))

    def finish(self, key: int) -> None:
        self.note(self.scheduler.finish(key, FinishReason.CANCELLED, self.now))
        assert self.scheduler.finish(key, FinishReason.CANCELLED, self.now) is None

    def launch(self) -> bool:
        if self.scheduler.num_launched == self.runner.info.max_in_flight:
            return False
        plan = self.schedule()
        if plan is None:
            assert self.scheduler.num_launched or not self.scheduler.has_work, "stuck"
            return False
        self.runner.launch(plan)
        return True

    def schedule(self) -> Plan | None:
        """Decides a step, and checks who was admitted and who preempted."""
        ran = {s.key: s for s in self.sequences(Status.RUNNING)}
        in_the_making = self.scheduler._prefilling.top
        plan = self.scheduler.schedule(self.now)
        waiting, running = self.sequences(Status.WAITING), self.sequences(Status.RUNNING)
        by_slot = {s.slot: s for s in running}
        admitted_now = [by_slot[start.slot] for start in plan.starts] if plan else []
        stayed = [s for s in running if s.key in ran and s not in admitted_now]
        if in_the_making in stayed and plan is not None:
            self.check_its_part(plan, in_the_making, admitted_now)
        for preempted in (s for s in waiting if s.key in ran):
            for other in stayed:
                assert self.rank(preempted) > self.rank(other), "an urgent one was preempted"
                self.seen["preempted by rank"] += (
                    other.request.priority < preempted.request.priority
                )
        for admitted in admitted_now:
            self.admitted[admitted.key] = self.num_admitted
            self.num_admitted += 1
            for other in waiting:
                assert admitted.request.priority <= other.request.priority, "not whose turn it was"
                if share(admitted) == share(other) and not other.preemptions:
                    assert admitted.preemptions or admitted.arrived_at <= other.arrived_at
                    self.seen["overtaking nobody"] += 1
        return plan

    def check_its_part(self, plan: Plan, top: Sequence, admitted: list[Sequence]) -> None:
        """A prompt in the making has half of each step, or what decodes leave where nobody passed
        it, but for more urgent ones."""
        budget = self.runner.info.max_num_batched_tokens
        for_chunks = budget - len(plan.decode_slots)
        chunk = next((chunk for chunk in plan.chunks if chunk.slot == top.slot), None)
        urgent = [s for s in admitted if s.request.priority < top.request.priority]
        self.seen["passed by an urgent one"] += bool(urgent)
        if not urgent and for_chunks:
            assert chunk is not None
            least = min(for_chunks, -(-budget // 2))
            assert chunk.samples or len(chunk.token_ids) >= least, "it has too little"
            self.seen["passed by a short one"] += plan.chunks[0] is not chunk

    def sequences(self, status: Status) -> list[Sequence]:
        return [s for s in self.scheduler._sequences.values() if s.status is status]

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.request.priority, self.admitted[sequence.key]

    def collect(self) -> None:
        if self.scheduler.num_launched:
            record: StepRecord = self.scheduler.apply(self.runner.collect(), self.now)
            assert len(set(record.keys)) == len(record.keys) == len(record.token_ids)
            for piece in record.prompt_logprobs:
                assert not self.tokens[piece.key] and piece.key not in self.finished, "late"
                self.prompt_logprobs[piece.key] += piece.logprobs
            logprobs = record.logprobs or [None] * len(record.keys)
            for key, token_id, entry in zip(record.keys, record.token_ids, logprobs, strict=True):
                assert key not in self.finished, "a token after the end"
                self.tokens[key].append(token_id)
                self.logprobs[key].append(entry)
                self.first_token_s.setdefault(key, self.now - self.arrived_at[key])
            for finished in record.finished:
                self.note(finished)

    def note(self, finished: FinishedRecord | None) -> None:
        if finished is not None:
            assert finished.key not in self.finished, "ended twice"
            self.finished[finished.key] = finished


def samples(first: Request, count: int) -> list[Request]:
    """As validation makes them of a submission with n: consecutive keys and seeds."""
    return [
        structs.replace(
            first,
            key=first.key + i,
            sampling=structs.replace(first.sampling, seed=first.sampling.seed + i),
        )
        for i in range(count)
    ]


def share(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.request.client


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 100))
def test_random_traffic(first_seed: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 100):
        seen += run_traffic(seed)
    # The traffic is worth something only while it meets all of these.
    rare = ("stop", "length", "cancelled", "preempted", "cached", "scored", "surplus")
    rare += ("preempted by rank", "overtaking nobody")
    assert all(seen[event] >= 10 for event in rare), seen
    assert min(seen["passed by an urgent one"], seen["passed by a short one"]) >= 3, seen


def test_batch_invariant_traffic() -> None:
    """Nobody is ever preempted, and everybody ends."""
    for seed in range(SEEDS, SEEDS + 100):
        run_traffic(seed, batch_invariant=True)


def run_traffic(seed: int, *, batch_invariant: bool = False) -> Counter[str]:
    rng = random.Random(seed)
    info = replace(random_info(rng), batch_invariant=batch_invariant)
    prefix_caching = rng.random() < 0.7
    traffic = Traffic(info, prefix_caching)
    requests = random_requests(rng, info)
    arriving = list(reversed(requests))
    arrival_rate, cancel_rate = rng.choice([0.1, 0.5, 1.0]), rng.choice([0.0, 0.0, 0.02, 0.1])
    for _ in range(20_000):
        traffic.now += 1
        if arriving and rng.random() < arrival_rate:
            traffic.add(arriving.pop())
        if rng.random() < cancel_rate:
            traffic.finish(rng.randrange(len(requests) + 1))  # in any state, or unknown
        if rng.random() < 0.5:
            traffic.launch()
        else:
            traffic.collect()
        traffic.scheduler.check_invariants()
        if not arriving and not traffic.scheduler.has_work:
            break
    assert not traffic.scheduler.has_work, f"seed {seed} does not end"
    stats = traffic.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_blocks_used) == (
        0,
        0,
        0,
    )
    assert stats.requests_finished == len(requests)
    assert stats.generation_tokens == sum(map(len, traffic.tokens.values()))
    assert prefix_caching or stats.prefix_cache_hits == 0
    assert not (batch_invariant and stats.num_preemptions)
    for request in requests:
        check_outcome(request, traffic, info)
        check_logprobs(request, traffic)
    reasons = Counter(FinishReason(record.reason) for record in traffic.finished.values())
    return traffic.seen + Counter(
        stop=reasons[FinishReason.STOP],
        length=reasons[FinishReason.LENGTH],
        cancelled=reasons[FinishReason.CANCELLED],
        preempted=stats.num_preemptions,
        cached=stats.prefix_cache_hits,
        scored=sum(map(len, traffic.prompt_logprobs.values())),
        surplus=traffic.runner.num_sampled - stats.generation_tokens,
    )


def check_logprobs(request: Request, traffic: Traffic) -> None:
    """Rows 66 and 67: parallel to the tokens, and of the prompt complete, once, whatever is in the
    prefix cache."""
    got, sampling = traffic.tokens[request.key], request.sampling
    entries, of_prompt = traffic.logprobs[request.key], traffic.prompt_logprobs[request.key]
    asked = [None if sampling.logprobs is None else [token_id] for token_id in got]
    assert [entry and entry.top_token_ids for entry in entries] == asked
    wanted = prompt_scores(request) if sampling.prompt_logprobs is not None else []
    assert of_prompt == (wanted if got else wanted[: len(of_prompt)])


def check_outcome(request: Request, traffic: Traffic, info: RunnerInfo) -> None:
    wanted, reason = reference(request, info)
    got, record = traffic.tokens[request.key], traffic.finished[request.key]
    if record.reason == FinishReason.CANCELLED:
        assert got == wanted[: len(got)]
    else:
        assert (got, record.reason) == (wanted, reason)
    assert record.stop_token_id == (got[-1] if record.reason == FinishReason.STOP else None)
    assert record.prompt_tokens == len(request.token_ids)
    assert record.output_tokens == len(got)
    assert 0 <= record.cached_tokens < record.prompt_tokens
    if got:
        assert record.first_token_s == traffic.first_token_s[request.key]
        assert record.first_token_s == record.queue_s + record.prefill_s
