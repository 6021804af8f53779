"""Who passes a long prompt between its chunks, and what that leaves to it."""

from __future__ import annotations

import pytest
from tests.toy_engine import Engine
from tests.toy_runner import reference, toy_info, toy_request

from millstream.engine.plan import Plan

BUDGET = 8  # tokens a step
LONG = list(range(48))


@pytest.fixture(params=[1, 2], ids=["serial", "ahead"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """In the middle of a long prompt of priority 0, with key 1."""
    depth: int = request.param
    engine = Engine(toy_info(max_num_batched_tokens=BUDGET, max_in_flight=depth, num_blocks=64))
    engine.add(toy_request(1, LONG, max_tokens=4))
    engine.step()
    return engine


def sizes(plan: Plan) -> list[int]:
    return [len(chunk.token_ids) for chunk in plan.chunks]


def check_outputs(engine: Engine, *requests: tuple[int, list[int]]) -> None:
    engine.run()
    for key, prompt in ((1, LONG), *requests):
        assert (
            engine.tokens[key] == reference(toy_request(key, prompt, max_tokens=4), engine.info)[0]
        )


def test_a_more_urgent_prompt_passes_however_long_it_is(engine: Engine) -> None:
    urgent = list(range(100, 119))
    engine.add(toy_request(2, urgent, priority=-1, max_tokens=4))
    plans = [engine.step() for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[8], [8], [3, 5], [7]]
    assert [chunk.samples for chunk in plans[2].chunks] == [True, False]
    check_outputs(engine, (2, urgent))


def test_a_less_urgent_prompt_waits(engine: Engine) -> None:
    engine.add(toy_request(2, [7], priority=1, max_tokens=4))
    assert [sizes(engine.step()) for _ in range(4)] == [[8]] * 4
    check_outputs(engine, (2, [7]))


def test_prompts_between_chunks_wait_for_each_other_by_priority(engine: Engine) -> None:
    for key, priority in ((2, -1), (3, -2)):
        engine.add(toy_request(key, [key] * 20, priority=priority, max_tokens=4))
        engine.step()
    engine.run()
    first = {key: engine.finished[key].first_token_s + key for key in (1, 2, 3)}
    assert first[3] < first[2] < first[1]
    check_outputs(engine, (2, [2] * 20), (3, [3] * 20))


@pytest.mark.parametrize(("length", "passes"), [(1, True), (4, True), (5, False)])
def test_a_short_prompt_passes_in_half_of_a_step(engine: Engine, length: int, passes: bool) -> None:
    short = list(range(200, 200 + length))
    engine.add(toy_request(2, short, max_tokens=4))
    assert sizes(engine.step()) == ([length, BUDGET - length] if passes else [BUDGET])
    check_outputs(engine, (2, short))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_what_the_prefix_cache_has_of_a_prompt_does_not_count(prefix_caching: bool) -> None:
    """As of a conversation that goes on."""
    engine = Engine(toy_info(max_num_batched_tokens=BUDGET, num_blocks=64), prefix_caching)
    earlier, asked = list(range(100, 120)), [7, 8]
    (answer,) = engine.run(toy_request(0, earlier, max_tokens=5))  # the last is not computed
    engine.add(toy_request(1, LONG, max_tokens=4))
    engine.step()
    conversation = [*earlier, *answer, *asked]
    engine.add(toy_request(2, conversation, max_tokens=4))
    assert sizes(engine.step()) == ([1 + len(asked), 5] if prefix_caching else [BUDGET])
    check_outputs(engine, (2, conversation))


def test_short_prompts_without_end_leave_half_of_each_step(engine: Engine) -> None:
    steps, done, key = 1, False, 2
    while not done:
        engine.add(*(toy_request(key + i, [key + i] * 2, max_tokens=1) for i in range(6)))
        key += 6
        plan = engine.step()
        assert sum(sizes(plan)) == BUDGET
        (long,) = [chunk for chunk in plan.chunks if chunk.slot == 0]
        steps, done = steps + 1, long.samples
        assert done or len(long.token_ids) == BUDGET / 2
    assert steps <= 2 * len(LONG) / BUDGET


def test_short_prompts_that_decode_for_long_leave_half_of_each_step_too() -> None:
    """Each that passes is a decode in the steps after: they must not leave less and less."""
    budget, length = 16, 160
    engine = Engine(
        toy_info(
            max_num_batched_tokens=budget, max_num_seqs=budget, num_blocks=200, max_model_len=200
        )
    )
    engine.add(toy_request(1, list(range(length)), max_tokens=1))
    steps = passed = 0
    while 1 not in engine.finished:
        key = 2 + 8 * steps
        engine.add(*(toy_request(key + i, [key + i], max_tokens=100) for i in range(8)))
        plan = engine.step()
        steps, passed = steps + 1, passed + len(plan.starts)
    assert passed == 1 + budget / 2
    assert steps <= 2 * length / budget


def test_a_prompt_that_is_nearly_done_is_not_passed() -> None:
    """It is the shorter one, and others may share what it computes."""
    engine = Engine(toy_info(max_num_batched_tokens=32))
    prompt = list(range(16))
    engine.add(toy_request(1, list(range(100, 124)), max_tokens=1))
    engine.add(*(toy_request(key, prompt, max_tokens=4, seed=key) for key in (2, 3)))
    assert [sizes(engine.step()) for _ in range(2)] == [[24, 8], [8, 4]]
    engine.run()
    assert [engine.finished[key].cached_tokens for key in (2, 3)] == [0, 12]


def test_who_passed_is_preempted_before_the_prompt_that_it_passed() -> None:
    """The first admitted of a priority always gets on."""
    engine = Engine(toy_info(max_num_batched_tokens=8, num_blocks=9), prefix_caching=False)
    long, short = toy_request(1, list(range(28)), max_tokens=8), toy_request(2, [9], max_tokens=20)
    engine.add(long)
    engine.step()
    engine.add(short)
    engine.run()
    assert [engine.finished[key].preemptions for key in (1, 2)] == [0, 1]
    assert engine.tokens[1] == reference(long, engine.info)[0]
    assert engine.tokens[2] == reference(short, engine.info)[0]


def test_a_prompt_that_was_passed_can_be_cancelled(engine: Engine) -> None:
    engine.add(toy_request(2, [7] * 20, priority=-1, max_tokens=4))
    engine.step()
    engine.cancel(1)
    engine.scheduler.check_invariants()
    engine.run()
    assert engine.tokens[2] == reference(toy_request(2, [7] * 20, max_tokens=4), engine.info)[0]
    assert engine.scheduler.stats().kv_blocks_used == 0
