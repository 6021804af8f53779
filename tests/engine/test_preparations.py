"""Requests on hold: whatever happens, the core has the grammar of each request that it is sent."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from tests.toy_runner import toy_request

from millstream.engine.preparations import HeldSubmission, Preparations
from millstream.engine.request import GrammarKind, GrammarSpec
from millstream.engine.streams import Hold, Stream
from millstream.rpc.errors import EngineUnavailable, InvalidArgument

MAX_READY = 64


def grammar(number: int) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, text=f"a{{{number}}}")


class FakeCore:
    """Keeps a grammar from when it hears of it until it is told to forget it. Compiling takes a few
    turns of the loop; of every seventh grammar it fails."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.kept: set[GrammarSpec] = set()

    async def prepare(self, spec: GrammarSpec) -> None:
        self.kept.add(spec)
        for _ in range(self._rng.randrange(20)):
            await asyncio.sleep(0)
        if spec == grammar(0) or int(spec.text[2:-1]) % 7 == 0:
            raise InvalidArgument("sampling.regex: no")

    def forget(self, spec: GrammarSpec) -> None:
        self.kept.discard(spec)  # of a request that was gone at once it has not heard


class FakeStream:
    def __init__(self) -> None:
        self.holds: list[Hold] = []

    def hold(self, handle: int, hold: Hold) -> None:
        self.holds.append(hold)


@pytest.mark.parametrize("seed", range(8))
async def test_no_grammar_is_forgotten_while_a_request_may_come_with_it(seed: int) -> None:
    rng = random.Random(seed)
    core, stream = FakeCore(rng), FakeStream()
    ended: list[HeldSubmission] = []
    lost: list[HeldSubmission] = []  # for an assertion in a task is heard by nobody

    def on_ready(held: HeldSubmission) -> None:
        ended.append(held)
        if held.grammar not in core.kept:
            lost.append(held)

    preparations = Preparations(
        core.prepare,
        core.forget,
        on_ready=on_ready,
        on_refused=lambda held, error: ended.append(held),
    )
    num_held = at_once = 0
    for key in range(2000):
        wanted = grammar(rng.randrange(rng.choice([3, 50, 400])))
        if preparations.is_ready(wanted):
            assert wanted in core.kept
            at_once += 1
        else:
            request = toy_request(key, [1])
            preparations.hold(
                HeldSubmission(
                    stream=cast(Stream, stream), samples=[request], grammar=wanted, timers=[None]
                )
            )
            num_held += 1
        if stream.holds and rng.random() < 0.2:
            hold = stream.holds.pop(rng.randrange(len(stream.holds)))
            if not hold.task.done():
                if rng.random() < 0.5:
                    hold.give_up(EngineUnavailable("its time is up"))
                else:  # its stream is closed
                    hold.task.cancel()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    await asyncio.gather(*(hold.task for hold in stream.holds), return_exceptions=True)
    await asyncio.sleep(0.01)
    assert not lost
    assert at_once > 100 and num_held > 500 and len(ended) > 300
    assert preparations.num_held == 0
    assert len(core.kept) == MAX_READY, "the last ones are kept, and nothing else"
    assert all(preparations.is_ready(each) for each in core.kept)
