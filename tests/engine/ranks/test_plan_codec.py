"""Plans of a real scheduler, there and back."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from millstream.engine.plan import Plan, RunnerInfo, SlotStart, StepResult
from millstream.engine.ranks.plan_codec import PREPARE_AHEAD, PlanDecoder, PlanEncoder
from millstream.engine.request import Request, Sampling
from millstream.engine.scheduler import Scheduler


def as_others_see_it(start: SlotStart) -> SlotStart:
    sampling = start.sampling
    return replace(
        start,
        min_position=start.min_position - sampling.min_tokens,
        banned_token_ids=(),
        sampling=Sampling(
            max_tokens=1,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            seed=sampling.seed,
        ),
    )


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        max_tokens=rng.randint(1, 30),
        temperature=rng.choice([0.0, 1e-6, 0.6, 1.7]),
        seed=rng.choice([0, 1, (1 << 63) + 5, (1 << 64) - 1, rng.getrandbits(64)]),
        top_k=rng.choice([0, 5]),
        min_tokens=rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(5))
def test_plans_come_back_as_they_were(seed: int) -> None:
    """With preemption, prefix hits, long chunks, cancels, and what is no plan between them; steady
    decodes keep their tuple."""
    rng = random.Random(seed)
    info = RunnerInfo(
        vocab_size=50,
        eos_token_ids=(0,),
        max_model_len=60,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([4, 40]),
        block_size=4,
        num_blocks=24,
    )
    scheduler = Scheduler(info, prefix_caching=True)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    now, steady = 0.0, 0
    last: tuple[Plan, Plan] | None = None
    for key in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 25))]
        scheduler.add(Request(key=key, token_ids=prompt, sampling=random_sampling(rng)), now)
    while scheduler.has_work:
        now += 1
        plan = scheduler.schedule(now)
        assert plan is not None
        plan = replace(plan, whole_rows=rng.random() < 0.5)
        words = encoder.encode(plan)
        if rng.random() < 0.2:
            assert decoder.decode(array("q", PREPARE_AHEAD)) is None
        decoded = decoder.decode(array("q", words))
        assert decoded == replace(plan, starts=tuple(map(as_others_see_it, plan.starts)))
        if last is not None and plan.decode_slots is last[0].decode_slots:
            assert decoded.decode_slots is last[1].decode_slots
            steady += bool(plan.decode_slots)
            if not (plan.starts or plan.block_appends or plan.chunks):
                assert len(words) == 6
        last = plan, decoded
        samples = sum(chunk.samples for chunk in plan.chunks) + len(plan.decode_slots)
        token_ids = [rng.randrange(50) for _ in range(samples)]
        scheduler.apply(StepResult(step=plan.step, token_ids=token_ids), now)
    assert steady
