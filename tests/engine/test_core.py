"""EngineCore's loop, and the runner that answers at once."""

import dataclasses
import itertools
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

import pytest
from tests.toy_runner import ToyRunner, reference, toy_info, toy_request

from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.instant_runner import InstantRunner, create
from millstream.engine.records import FinishedRecord
from millstream.engine.request import FinishReason, GrammarKind, GrammarSpec


def make_core(max_in_flight: int = 2, **info: Any) -> tuple[EngineCore, ToyRunner]:
    runner = ToyRunner(toy_info(max_in_flight=max_in_flight, **info))
    clock = itertools.count(1.0)
    return EngineCore(runner, prefix_caching=True, clock=lambda: next(clock)), runner


def run(core: EngineCore) -> tuple[dict[int, list[int]], list[FinishedRecord]]:
    tokens: dict[int, list[int]] = {}
    finished: list[FinishedRecord] = []
    while core.has_work:
        record = core.step()
        for key, token_id in zip(record.keys, record.token_ids, strict=True):
            tokens.setdefault(key, []).append(token_id)
        finished += record.finished
    return tokens, finished


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_request_gets_its_tokens_and_one_finish(max_in_flight: int) -> None:
    core, runner = make_core(max_in_flight, num_blocks=8, max_num_seqs=3)
    requests = [toy_request(key, list(range(key + 1)), max_tokens=key + 1) for key in range(8)]
    for request in requests:
        core.submit(request)
    tokens, finished = run(core)
    assert tokens == {r.key: reference(r, runner.info)[0] for r in requests}
    assert sorted(record.key for record in finished) == list(range(8))
    core.scheduler.check_invariants()
    assert core.stats().requests_finished == 8


def test_the_next_step_is_launched_before_this_one_is_collected() -> None:
    core, runner = make_core(max_in_flight=2)
    core.submit(toy_request(1, [1, 2, 3], max_tokens=4))
    core.step()
    assert len(runner.plans) == 2
    core.step()
    assert len(runner.plans) == 3


def test_what_ends_between_steps_is_told_by_the_next_one() -> None:
    core, _ = make_core()
    core.submit(toy_request(1, [1], max_tokens=4))
    core.submit(toy_request(2, [1], max_tokens=40))
    core.step()
    core.finish([2, 77], FinishReason.DEADLINE)
    core.finish([2], FinishReason.CANCELLED)
    tokens, finished = run(core)
    assert len(tokens[1]) == 3  # the first one came with the first step
    assert 2 not in tokens
    assert [(record.key, record.reason) for record in finished] == [
        (2, FinishReason.DEADLINE),
        (1, FinishReason.LENGTH),
    ]


def test_a_request_that_cannot_fit_ends_with_an_error() -> None:
    core, runner = make_core()
    core.submit(toy_request(1, list(range(65))))
    record = core.step()
    assert [(r.key, r.reason) for r in record.finished] == [(1, FinishReason.ERROR)]
    assert record.finished[0].message
    assert not core.has_work
    assert runner.plans == []


def test_steps_in_flight_of_cancelled_requests_are_collected() -> None:
    core, _ = make_core()
    core.submit(toy_request(1, [1, 2, 3]))
    core.step()
    core.finish([1], FinishReason.SHUTDOWN)
    assert core.has_work
    tokens, finished = run(core)
    assert tokens == {}
    assert [record.reason for record in finished] == [FinishReason.SHUTDOWN]
    assert core.scheduler.num_launched == 0


def test_a_step_with_nothing_to_do_is_empty() -> None:
    core, _ = make_core()
    record = core.step()
    assert (record.keys, record.token_ids, record.finished) == ([], [], [])


class GrammarRunner(ToyRunner):
    """Forgets a grammar that nobody holds."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(toy_info(), structured_output=True))
        self.kept: WeakValueDictionary[GrammarSpec, Future[None]] = WeakValueDictionary()

    def prepare_grammar(self, spec: GrammarSpec) -> Future[None]:
        return self.kept.setdefault(spec, Future())


def test_a_grammar_is_kept_while_a_request_follows_it_or_may() -> None:
    runner = GrammarRunner()
    core = EngineCore(runner, prefix_caching=True)
    spec = GrammarSpec(kind=GrammarKind.REGEX, text="a")
    core.prepare_grammar(spec)
    core.submit(toy_request(1, [1], max_tokens=3, grammar=spec))
    core.submit(toy_request(2, [1], max_tokens=9, grammar=spec))
    core.submit(toy_request(3, list(range(65)), grammar=spec))  # never fits
    core.forget_grammar(spec)
    core.step()
    core.finish([2], FinishReason.CANCELLED)
    assert spec in runner.kept
    run(core)
    assert not runner.kept, "nobody follows it any more"
    core.prepare_grammar(spec)
    assert spec in runner.kept
    core.forget_grammar(spec)
    core.forget_grammar(spec)
    assert not runner.kept


def test_close_closes_the_runner() -> None:
    core, runner = make_core()
    core.close()
    assert runner.closed


def test_the_instant_runner_counts_up_and_never_ends_a_request() -> None:
    info = toy_info(vocab_size=6, eos_token_ids=(0, 3), max_in_flight=2, num_blocks=5)
    core = EngineCore(InstantRunner(info), prefix_caching=True)
    core.submit(toy_request(1, [5, 4], max_tokens=6))
    core.submit(toy_request(2, [2], max_tokens=14))  # together more than the pool: preempted
    tokens, finished = run(core)
    assert tokens[1] == [5, 1, 2, 4, 5, 1]
    assert tokens[2] == [4, 5, 1, 2] * 3 + [4, 5]
    assert {record.reason for record in finished} == {FinishReason.LENGTH}


def test_the_instant_runner_takes_its_limits_from_the_config() -> None:
    info = create(EngineConfig()).info
    assert (info.vocab_size, info.max_num_seqs, info.max_model_len) == (32000, 256, 8192)
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=5, max_model_len=100, block_size=8)
    info = create(config, None).info
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (3, 5)
    assert (info.max_model_len, info.block_size, info.num_blocks) == (100, 8, 3 * 13)
