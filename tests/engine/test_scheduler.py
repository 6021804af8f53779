"""The scheduler's rules, one at a time; B = 4 tokens a block throughout."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.toy_engine import Engine
from tests.toy_runner import next_token, prompt_scores, reference, toy_info, toy_request

from millstream.engine.plan import StepResult, TokenLogprobs
from millstream.engine.request import FinishReason
from millstream.engine.scheduler import Scheduler


@pytest.fixture(params=[1, 2], ids=["serial", "ahead"])
def in_flight(request: pytest.FixtureRequest) -> int:
    depth: int = request.param
    return depth


# ---- what fits


def test_row_5_what_can_never_fit_is_refused_and_the_next_one_runs(in_flight: int) -> None:
    engine = Engine(toy_info(num_blocks=8, max_model_len=64, max_in_flight=in_flight))
    large = toy_request(1, list(range(40)), max_tokens=1)
    small = toy_request(2, [1, 2, 3, 4])
    assert engine.run(large, small) == [[], reference(small, engine.info)[0]]
    assert engine.finished[1].reason == FinishReason.ERROR
    assert engine.finished[1].message == "needs 10 KV blocks and there are 8"


@pytest.mark.parametrize(("max_tokens", "fits"), [(3, True), (4, False)])
def test_row_6_the_only_sequence_fills_the_pool(
    max_tokens: int, fits: bool, in_flight: int
) -> None:
    engine = Engine(toy_info(num_blocks=3, max_in_flight=in_flight))
    request = toy_request(1, list(range(10)), max_tokens=max_tokens)
    assert engine.run(request) == [reference(request, engine.info)[0] if fits else []]
    wanted = FinishReason.LENGTH if fits else FinishReason.ERROR
    assert engine.finished[1].reason == wanted
    after = toy_request(2, [5, 6])
    assert engine.run(after) == [reference(after, engine.info)[0]]


def test_rows_5_and_6_what_fills_a_large_pool_is_admitted_alone(in_flight: int) -> None:
    """Blocks are kept free for those who run already, which is nobody here."""
    info = toy_info(
        num_blocks=200, max_model_len=801, max_num_batched_tokens=256, max_in_flight=in_flight
    )
    engine = Engine(info)
    small, whole = toy_request(1, [5, 6], max_tokens=9), toy_request(2, [7] * 800, max_tokens=1)
    assert engine.run(small, whole) == [reference(each, info)[0] for each in (small, whole)]


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("prompt_len", [14, 15, 16, 17])
def test_row_20_the_context_limit(prompt_len: int, max_tokens: int, in_flight: int) -> None:
    """L = 16: prompt and output together; a prompt of 16 has no room and is refused."""
    engine = Engine(toy_info(max_model_len=16, max_in_flight=in_flight))
    request = toy_request(1, list(range(prompt_len)), max_tokens=max_tokens)
    (output,) = engine.run(request)
    assert len(output) == max(0, min(max_tokens, 16 - prompt_len))
    wanted = FinishReason.LENGTH if prompt_len < 16 else FinishReason.ERROR
    assert engine.finished[1].reason == wanted
    after = toy_request(2, [5, 6])
    assert engine.run(after) == [reference(after, engine.info)[0]]


def test_row_61_max_tokens_1_and_more_than_there_is_room_for(in_flight: int) -> None:
    engine = Engine(toy_info(max_model_len=16, max_in_flight=in_flight))
    outputs = engine.run(
        toy_request(1, [1, 2, 3], max_tokens=1), toy_request(2, [1, 2, 3], max_tokens=1000)
    )
    assert [len(output) for output in outputs] == [1, 13]
    assert {record.reason for record in engine.finished.values()} == {FinishReason.LENGTH}


# ---- the prefix cache


@pytest.mark.parametrize("prompt_len", [4, 7, 8, 9])
def test_row_7_a_fully_cached_prompt_computes_its_last_token(
    prompt_len: int, in_flight: int
) -> None:
    engine = Engine(toy_info(max_in_flight=in_flight))
    prompt = list(range(prompt_len))
    first, second = toy_request(1, prompt, max_tokens=4), toy_request(2, prompt, max_tokens=4)
    assert engine.run(first) == engine.run(second) == [reference(first, engine.info)[0]]
    assert engine.finished[1].cached_tokens == 0
    assert engine.finished[2].cached_tokens == (prompt_len - 1) // 4 * 4


def test_row_46_a_block_used_again_is_no_longer_found() -> None:
    engine = Engine(toy_info(num_blocks=3))
    x, y = list(range(8)), list(range(50, 61))
    requests = [toy_request(key, prompt, max_tokens=1) for key, prompt in enumerate([x, y, x])]
    for request in requests:
        assert engine.run(request) == [reference(request, engine.info)[0]]
    assert engine.finished[2].cached_tokens == 0


def test_row_48_salts_share_nothing() -> None:
    engine = Engine(toy_info())
    prompt = list(range(9))
    for key, salt in enumerate(["", "a", "b", "unsalted", "salt:a"]):
        engine.run(toy_request(key, prompt, cache_salt=salt, max_tokens=1))
        assert engine.finished[key].cached_tokens == 0
    engine.run(toy_request(9, prompt, cache_salt="a", max_tokens=1))
    assert engine.finished[9].cached_tokens == 8


def test_a_prefix_is_shared_within_the_step_that_computes_it() -> None:
    engine = Engine(toy_info())
    prompt = list(range(8))
    requests = [toy_request(key, [*prompt, key]) for key in range(4)]
    outputs = engine.run(*requests)
    assert [engine.finished[key].cached_tokens for key in range(4)] == [0, 8, 8, 8]
    assert outputs == [reference(request, engine.info)[0] for request in requests]
    assert engine.runner.plans[0].num_tokens == 9 + 3


def test_output_is_found_by_the_next_turn_of_a_conversation(in_flight: int) -> None:
    engine = Engine(toy_info(max_in_flight=in_flight))
    prompt = list(range(6))
    (output,) = engine.run(toy_request(1, prompt, max_tokens=8))
    engine.run(toy_request(2, [*prompt, *output, 7]))
    # 14 tokens, the KV of 13 of them computed and known: 3 full blocks.
    assert engine.finished[2].cached_tokens == 12


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    engine = Engine(toy_info(), prefix_caching=False)
    for key in range(2):
        engine.run(toy_request(key, list(range(9))))
        assert engine.finished[key].cached_tokens == 0


# ---- steps


def test_decodes_never_wait_for_a_long_prompt(in_flight: int) -> None:
    engine = Engine(toy_info(max_num_batched_tokens=4, max_in_flight=in_flight))
    engine.add(toy_request(1, [1, 2], max_tokens=20))
    engine.step()
    engine.add(toy_request(2, list(range(30)), max_tokens=2))
    plans = [engine.step() for _ in range(10)]
    for plan in plans:
        assert len(plan.decode_slots) == 1
        assert [len(chunk.token_ids) for chunk in plan.chunks] == [3]
    assert [plan.chunks[0].samples for plan in plans] == [False] * 9 + [True]
    assert len(engine.step().decode_slots) == 2


def test_requests_are_served_in_order_of_arrival() -> None:
    engine = Engine(toy_info(num_blocks=4, max_num_seqs=2))
    engine.add(
        toy_request(1, list(range(8)), max_tokens=2),  # 3 of 4 blocks in the end
        toy_request(2, list(range(20, 32)), max_tokens=2),  # 4: must wait
        toy_request(3, [1], max_tokens=2),  # would fit, and waits behind 2
    )
    assert len(engine.step().chunks) == 1
    engine.run()
    assert list(engine.finished) == [1, 2, 3]


def test_a_steady_decode_step_carries_the_same_slots_object(in_flight: int) -> None:
    engine = Engine(toy_info(max_in_flight=in_flight))
    engine.add(*(toy_request(key, [key], max_tokens=12) for key in range(3)))
    engine.step()
    plans = [engine.step() for _ in range(9)]
    assert all(plan.decode_slots is plans[0].decode_slots for plan in plans)
    assert [len(plan.block_appends) for plan in plans] == [0, 0, 0, 3, 0, 0, 0, 3, 0]


def test_one_step_ahead_computes_nothing_past_the_last_token() -> None:
    engine = Engine(toy_info(max_in_flight=2, max_num_batched_tokens=5))
    requests = [
        toy_request(key, list(range(key, 2 * key + 1)), max_tokens=key) for key in range(1, 9)
    ]
    outputs = engine.run(*requests)
    assert outputs == [reference(request, engine.info)[0] for request in requests]
    assert engine.runner.num_sampled == sum(range(1, 9))


def test_one_step_ahead_gives_a_slot_away_when_its_last_token_is_launched() -> None:
    engine = Engine(toy_info(max_in_flight=2, max_num_seqs=1))
    requests = [toy_request(key, [key], max_tokens=2) for key in range(3)]
    engine.run(*requests)
    # Two steps each, back to back: no step waits for the end of the request before.
    assert [bool(plan.starts) for plan in engine.runner.plans] == [True, False] * 3
    assert all(engine.tokens[r.key] == reference(r, engine.info)[0] for r in requests)


def test_one_step_ahead_drops_the_token_after_a_stop() -> None:
    prompt = [1, 2, 3]
    stop = next_token([*prompt, next_token(prompt, 0, 1000)], 0, 1000)
    engine = Engine(toy_info(max_in_flight=2, eos_token_ids=(stop,)))
    request = toy_request(1, prompt, max_tokens=8)
    (output,) = engine.run(request)
    assert output == reference(request, engine.info)[0]
    assert output[-1] == stop == engine.finished[1].stop_token_id
    assert engine.runner.num_sampled == 3


# ---- stops


def test_row_15_every_eos_id_counts_and_ignore_eos_ignores_them_all() -> None:
    prompt = [1, 2, 3]
    first = next_token(prompt, 0, 1000)
    second = next_token([*prompt, first], 0, 1000)
    third = next_token([*prompt, first, second], 0, 1000)
    engine = Engine(toy_info(eos_token_ids=(999, second)))
    outputs = engine.run(
        toy_request(1, prompt, max_tokens=4),
        toy_request(2, prompt, max_tokens=4, ignore_eos=True),
        toy_request(3, prompt, max_tokens=4, ignore_eos=True, stop_token_ids=(third,)),
    )
    assert [len(output) for output in outputs] == [2, 4, 3]
    stops = [engine.finished[key].stop_token_id for key in (1, 2, 3)]
    assert stops == [second, None, third]


def test_min_tokens_bans_stop_ids_until_then() -> None:
    prompt = [1, 2, 3]
    stop = next_token(prompt, 0, 1000)
    engine = Engine(toy_info(eos_token_ids=(stop,)))
    at_once = toy_request(1, prompt, max_tokens=6)
    later = toy_request(2, prompt, max_tokens=6, min_tokens=3, stop_token_ids=(7,))
    outputs = engine.run(at_once, later)
    assert outputs == [[stop], reference(later, engine.info)[0]]
    starts = [start for plan in engine.runner.plans for start in plan.starts]
    assert [start.banned_token_ids for start in starts] == [(), tuple(sorted((stop, 7)))]
    assert starts[1].min_position == 6


def test_a_stop_id_before_min_tokens_does_not_end_the_request() -> None:
    """Whatever the runner samples."""
    scheduler = Scheduler(toy_info(), prefix_caching=True)
    scheduler.add(toy_request(1, [0], max_tokens=6, min_tokens=3, stop_token_ids=(0,)), 0.0)
    records = []
    while plan := scheduler.schedule(0.0):
        records.append(scheduler.apply(StepResult(step=plan.step, token_ids=[0]), 0.0))
    assert len(records) == 4
    assert records[-1].finished[0].reason == FinishReason.STOP


# ---- preemption


def preempt_last(engine: Engine) -> None:
    engine.scheduler._preempt(engine.scheduler._least_urgent())
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("outputs", [[0], [1], [3], [4], [5], [4, 5], [1, 1], [0, 5]])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_43_and_45_preempted_at_any_output(
    outputs: list[int], prefix_caching: bool, in_flight: int
) -> None:
    """The stream equals the unpreempted one; max_tokens counts once; the resumed sequence is a
    chunk of all its known tokens, not a decode."""
    info = toy_info(max_num_batched_tokens=6, max_in_flight=in_flight)
    engine = Engine(info, prefix_caching)
    request = toy_request(1, list(range(100, 107)), max_tokens=9)
    engine.add(request)
    for count in outputs:
        while len(engine.tokens.get(1, [])) < count or not engine.scheduler.num_running:
            engine.step()
        preempt_last(engine)
        assert engine.scheduler.num_running == 0
        assert engine.scheduler.num_waiting == 1
    assert engine.run() == []
    assert engine.tokens[1] == reference(request, info)[0]
    assert engine.finished[1].preemptions == len(outputs)
    assert engine.finished[1].output_tokens == 9
    assert engine.finished[1].cached_tokens == 0  # the first admission's


def test_a_full_pool_preempts_the_last_admitted(in_flight: int) -> None:
    engine = Engine(toy_info(num_blocks=6, max_in_flight=in_flight), prefix_caching=False)
    requests = [toy_request(key, [key] * 4, max_tokens=13) for key in range(3)]
    outputs = engine.run(*requests)
    assert outputs == [reference(request, engine.info)[0] for request in requests]
    assert engine.finished[0].preemptions == 0
    assert engine.finished[2].preemptions > 0
    assert list(engine.finished) == [0, 1, 2]


def test_a_newcomer_waits_for_room_to_grow_in(in_flight: int) -> None:
    """It would fill a large pool to the last block, and be preempted by its own second token."""
    info = toy_info(
        num_blocks=200, max_model_len=801, max_num_batched_tokens=1024, max_in_flight=in_flight
    )
    engine = Engine(info)
    small, large = toy_request(1, [5] * 4, max_tokens=5), toy_request(2, [7] * 792, max_tokens=3)
    assert engine.run(small, large) == [reference(each, info)[0] for each in (small, large)]
    assert engine.finished[2].preemptions == 0


def test_batch_invariance_preempts_nobody_and_shares_prompts_alone(in_flight: int) -> None:
    """A sequence waits until all that it and the running ones may need is free; what decoding wrote
    is not found by a prompt that goes on from it."""
    info = replace(toy_info(num_blocks=6, max_in_flight=in_flight), batch_invariant=True)
    engine = Engine(info)
    requests = [toy_request(key, [key] * 4, max_tokens=5 + 8 * (key == 2)) for key in range(4)]
    assert engine.run(*requests) == [reference(request, info)[0] for request in requests]
    assert all(record.preemptions == 0 for record in engine.finished.values())
    follow_up = [*requests[3].token_ids, *engine.tokens[3], 7]
    engine.run(toy_request(9, follow_up, max_tokens=2))
    assert engine.finished[9].cached_tokens == 4


def test_the_token_pending_at_preemption_is_sent_once() -> None:
    engine = Engine(toy_info(max_in_flight=2))
    request = toy_request(1, [1, 2, 3], max_tokens=5)
    engine.add(request)
    engine.step()
    assert engine.scheduler.num_launched == 1
    preempt_last(engine)
    assert engine.launch() is None  # its last token is not known yet
    engine.collect()
    plan = engine.launch()
    assert plan is not None
    assert plan.chunks[0].token_ids[-1] == engine.tokens[1][0]
    engine.run()
    assert engine.tokens[1] == reference(request, engine.info)[0]


# ---- cancelling


def waiting(engine: Engine) -> None:
    engine.add(*(toy_request(key, [key], max_tokens=20) for key in (2, 3)))
    engine.step()
    engine.add(toy_request(1, [1, 2, 3]))


def mid_prefill(engine: Engine) -> None:
    engine.add(toy_request(1, list(range(30)), max_tokens=5))
    engine.step()


def running(engine: Engine) -> None:
    engine.add(toy_request(1, [1, 2, 3], max_tokens=20))
    for _ in range(4):
        engine.step()


def launched(engine: Engine) -> None:
    engine.add(toy_request(1, [1, 2, 3], max_tokens=20))
    engine.launch()


def preempted(engine: Engine) -> None:
    running(engine)
    preempt_last(engine)


def draining(engine: Engine) -> None:
    """Its last token is launched (and, with a serial runner, that is its only one)."""
    engine.add(toy_request(1, [1, 2, 3], max_tokens=1))
    engine.launch()
    if engine.info.max_in_flight > 1:
        engine.launch()


STATES = [waiting, mid_prefill, running, launched, preempted, draining]


@pytest.mark.parametrize("state", STATES)
def test_rows_3_and_50_cancel_in_every_state(
    state: Callable[[Engine], None], in_flight: int
) -> None:
    engine = Engine(toy_info(max_num_seqs=2, max_num_batched_tokens=8, max_in_flight=in_flight))
    state(engine)
    sent = len(engine.tokens.get(1, []))
    record = engine.cancel(1)
    assert record is not None
    assert (record.reason, record.output_tokens) == (FinishReason.CANCELLED, sent)
    assert engine.cancel(1) is None
    assert engine.cancel(12345) is None
    engine.scheduler.check_invariants()
    engine.run()
    assert len(engine.tokens.get(1, [])) == sent
    assert list(engine.finished).count(1) == 1
    # The key is free again, also while an old step of it was in flight.
    again = toy_request(4, [1, 2, 3])
    assert engine.run(again) == [reference(again, engine.info)[0]]
    assert engine.scheduler.finish(4, FinishReason.CANCELLED, engine.now) is None


def test_a_key_may_be_used_again_while_its_last_step_is_in_flight() -> None:
    engine = Engine(toy_info(max_in_flight=2))
    engine.add(toy_request(1, [1, 2, 3]))
    engine.launch()
    engine.cancel(1)
    del engine.finished[1]
    request = toy_request(1, [4, 5, 6])
    assert engine.run(request) == [reference(request, engine.info)[0]]


# ---- accounts


def test_timings_come_from_the_clock_that_is_passed_in() -> None:
    engine = Engine(toy_info(max_num_seqs=1, max_num_batched_tokens=4))
    engine.run(toy_request(1, [1, 2], max_tokens=3), toy_request(2, list(range(8)), max_tokens=2))
    first, second = engine.finished[1], engine.finished[2]
    assert (first.queue_s, first.prefill_s, first.first_token_s, first.decode_s) == (0, 1, 1, 2)
    assert (second.queue_s, second.prefill_s) == (3, 2)
    assert (second.first_token_s, second.decode_s) == (5, 1)


def test_timings_of_a_request_that_never_ran() -> None:
    engine = Engine(toy_info())
    engine.add(toy_request(1, [1]))
    engine.now = 7.0
    record = engine.cancel(1)
    assert record is not None
    assert (record.queue_s, record.prefill_s, record.first_token_s, record.decode_s) == (7, 0, 0, 0)


def test_stats_count_requests_tokens_and_blocks() -> None:
    engine = Engine(toy_info(max_num_seqs=2))
    prompt = list(range(9))
    engine.add(*(toy_request(key, prompt, max_tokens=3) for key in range(3)))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (4, 32)  # 2 shared, 1 each
    engine.run()
    assert stats.requests_finished == 0, "stats are of one moment"
    stats = engine.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_blocks_used) == (
        0,
        0,
        0,
    )
    assert (stats.prompt_tokens, stats.generation_tokens, stats.requests_finished) == (27, 9, 3)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (27, 16)
    assert stats.steps == len(engine.runner.plans)


def test_row_67_a_request_that_scores_its_prompt_fills_the_prefix_cache_and_reads_none(
    in_flight: int,
) -> None:
    engine = Engine(toy_info(max_in_flight=in_flight, max_num_batched_tokens=7))
    prompt = list(range(33))
    scored: dict[int, list[TokenLogprobs]] = {}
    for key in (1, 2):
        engine.add(toy_request(key, prompt, prompt_logprobs=3, max_tokens=1))
        while engine.scheduler.has_work:
            engine.launch()
            for piece in engine.collect().prompt_logprobs:
                scored.setdefault(piece.key, []).extend(piece.logprobs)
    engine.run(toy_request(3, prompt, max_tokens=1))
    assert scored[1] == scored[2] == prompt_scores(toy_request(0, prompt))
    assert [engine.finished[key].cached_tokens for key in (1, 2, 3)] == [0, 0, 32]
