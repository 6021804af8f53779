"""Who is served when: priorities, clients that queue much and little, and the samples of a prompt.

A step takes one second, so the waiting times (queue_s) are in steps."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.toy_engine import Engine
from tests.toy_runner import reference, toy_info, toy_request

from millstream.engine.request import FinishReason, Request

GREEDY, MODEST = 1, 2  # clients
SLOTS, OUTPUT = 4, 8
SHARES = [(0, 5000), (5000, 6000), (6000, 7000)]  # keys of three clients


def crowded(num_queued: int, *, in_flight: int = 1) -> Engine:
    """An engine whose slots are all taken by one client, which has queued so many more."""
    engine = Engine(toy_info(max_num_seqs=SLOTS, num_blocks=64, max_in_flight=in_flight))
    engine.add(*(short(key, GREEDY) for key in range(SLOTS + num_queued)))
    engine.step()
    return engine


def short(key: int, client: int, **options: int) -> Request:
    return toy_request(key, [key % 1000, key // 1000], max_tokens=OUTPUT, client=client, **options)


def finish(engine: Engine, *keys: int) -> list[float]:
    """Steps until these ended; how many steps each waited for a slot."""
    while not all(key in engine.finished for key in keys):
        engine.step()
    return [engine.finished[key].queue_s for key in keys]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_thousand_queued_requests_do_not_delay_another_clients_one(in_flight: int) -> None:
    engine = crowded(1000, in_flight=in_flight)
    engine.add(short(5000, MODEST))
    waited = finish(engine, 5000)[0]
    print(f"with 1,000 of another client queued, one request waited {waited:g} steps")
    assert waited <= OUTPUT, "it has the first slot that comes free"
    assert engine.scheduler.num_waiting > 980
    engine.run()
    assert {record.reason for record in engine.finished.values()} == {FinishReason.LENGTH}
    last = max(record.queue_s for record in engine.finished.values())
    print(f"the last of the 1,000 waited {last:g} steps")
    assert last >= 1000 / SLOTS * (OUTPUT - 1), "slots were never idle, and never more than there"


def test_newcomers_wait_for_one_admission_of_each_client_before_them() -> None:
    engine = crowded(1000)
    clients = range(MODEST, MODEST + 40)
    engine.add(*(short(5000 + client, client) for client in clients))
    waited = finish(engine, *(5000 + client for client in clients))
    assert waited == sorted(waited), "in order of arrival"
    # 40 requests through 4 slots, all of them before any other of the 1,000.
    assert max(waited) <= (len(clients) / SLOTS) * OUTPUT


def test_scarce_slots_are_shared_equally_however_much_is_queued() -> None:
    engine = crowded(1000)
    engine.add(*(short(5000 + i, MODEST) for i in range(100)))
    engine.add(*(short(6000 + i, 3) for i in range(1000)))
    for _ in range(30 * OUTPUT):
        engine.step()
    ended = [sum(first <= key < end for key in engine.finished) for first, end in SHARES]
    assert sum(ended) > 90
    assert max(ended) - min(ended) <= SLOTS, ended


def test_a_clients_own_requests_keep_their_order() -> None:
    engine = crowded(20)
    engine.run()
    assert list(engine.finished) == list(range(SLOTS + 20))


def test_smaller_priorities_first_then_arrival() -> None:
    engine = crowded(10)
    urgent = [short(100 + i, GREEDY, priority=-1) for i in range(6)]
    more_urgent = [short(200 + i, MODEST, priority=-(2**31)) for i in range(2)]
    patient = short(300, 3, priority=2**31 - 1)
    engine.add(patient, *urgent, *more_urgent)
    engine.run()
    order = [key for key in engine.finished if key >= SLOTS]
    assert order == [200, 201, *range(100, 106), *range(4, 14), 300]


def test_nobody_gives_up_a_slot_for_a_priority() -> None:
    """A running request is preempted for lack of blocks only."""
    engine = crowded(0)
    engine.add(short(100, MODEST, priority=-1))
    assert finish(engine, 100) == [OUTPUT - 1]
    assert all(record.preemptions == 0 for record in engine.finished.values())


def test_a_full_pool_preempts_the_lowest_priority_latest_admitted_first() -> None:
    engine = Engine(toy_info(num_blocks=9, max_num_seqs=4), prefix_caching=False)
    priorities = {0: 5, 1: 0, 2: 5, 3: 0}
    requests = [
        toy_request(key, [key] * 4, max_tokens=13, priority=priority)
        for key, priority in priorities.items()
    ]
    engine.add(*requests)
    preempted: list[int] = []
    while len(preempted) < 2:
        engine.step()
        waiting = [key for key in priorities if engine.scheduler._sequences[key].preemptions]
        preempted += [key for key in waiting if key not in preempted]
    assert preempted == [2, 0]
    outputs = engine.run()
    outputs = [engine.tokens[request.key] for request in requests]
    assert outputs == [reference(request, engine.info)[0] for request in requests]
    assert [engine.finished[key].preemptions > 0 for key in range(4)] == [True, False, True, False]
    assert list(engine.finished) == [1, 3, 0, 2]


def test_the_last_block_is_the_urgent_ones() -> None:
    """Both need one at once; the patient one, admitted first, is given none that is taken back."""
    engine = Engine(toy_info(num_blocks=3, max_num_batched_tokens=6), prefix_caching=False)
    patient = toy_request(1, [1] * 3, max_tokens=6, priority=1)
    urgent = toy_request(2, [2] * 4, max_tokens=5)
    engine.add(patient)
    engine.step()
    engine.add(urgent)
    engine.run()
    appends = [plan.block_appends for plan in engine.runner.plans if plan.block_appends]
    assert [len(each) for each in appends] == [1]
    assert [engine.finished[key].preemptions for key in (1, 2)] == [1, 0]
    assert engine.tokens[1] == reference(patient, engine.info)[0]


def test_an_urgent_prompt_in_the_making_is_not_preempted_for_a_patient_decode() -> None:
    engine = Engine(toy_info(num_blocks=8, max_num_batched_tokens=4), prefix_caching=False)
    patient = toy_request(1, [1, 2], max_tokens=20, priority=1)
    urgent = toy_request(2, list(range(24)), max_tokens=4)
    engine.add(patient)
    engine.step()
    engine.add(urgent)
    engine.run()
    assert [engine.finished[key].preemptions for key in (1, 2)] == [1, 0]
    for request in (patient, urgent):
        assert engine.tokens[request.key] == reference(request, engine.info)[0]


# ---- samples of one prompt


def samples(count: int) -> list[Request]:
    first = toy_request(1, list(range(11)), max_tokens=5, seed=7)
    return [
        structs.replace(first, key=1 + i, sampling=structs.replace(first.sampling, seed=7 + i))
        for i in range(count)
    ]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_share_the_prompts_blocks(prefix_caching: bool) -> None:
    """Full blocks of the prompt, through the prefix cache; without one, each computes its own."""
    engine = Engine(toy_info(num_blocks=32), prefix_caching)
    requests = samples(4)
    engine.add(*requests)
    plan = engine.step()
    assert len(plan.chunks) == 4, "one step for all of them"
    used = engine.scheduler.stats().kv_blocks_used
    assert used == (2 + 4 * 1 if prefix_caching else 4 * 3)  # 11 tokens: 2 full blocks of 4
    assert plan.num_tokens == (11 + 3 * 3 if prefix_caching else 4 * 11)
    engine.run()
    outputs = [engine.tokens[request.key] for request in requests]
    assert outputs == [reference(request, engine.info)[0] for request in requests]
    assert len(set(map(tuple, outputs))) == 4
    cached = [engine.finished[request.key].cached_tokens for request in requests]
    assert cached == ([0, 8, 8, 8] if prefix_caching else [0, 0, 0, 0])


def test_cancelling_a_sample_leaves_the_others() -> None:
    engine = Engine(toy_info())
    requests = samples(3)
    engine.add(*requests)
    engine.step()
    engine.step()
    engine.cancel(1)  # the one that computed the shared blocks
    engine.run()
    for request in requests[1:]:
        assert engine.tokens[request.key] == reference(request, engine.info)[0]
