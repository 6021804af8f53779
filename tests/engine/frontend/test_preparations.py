"""Requests on hold: whatever happens, the core has the grammar of each request that it is sent."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest
from tests.toy_runner import toy_request

from millstream.engine.frontend.clients import Client
from millstream.engine.frontend.preparations import HeldSubmission, Preparations
from millstream.engine.frontend.streams import Hold, Stream
from millstream.engine.request import GrammarKind, GrammarSpec
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
    def __init__(self, client: int = 0) -> None:
        self.client = Client(client)
        self.holds: list[Hold] = []

    def hold(self, handle: int, hold: Hold) -> None:
        self.holds.append(hold)


async def test_a_client_with_many_grammars_does_not_keep_another_one_waiting() -> None:
    """The core is asked for a few at a time, by turns."""
    asked: list[str] = []
    done: dict[str, asyncio.Event] = {}

    async def prepare(spec: GrammarSpec) -> None:
        asked.append(spec.text)
        done[spec.text] = asyncio.Event()
        await done[spec.text].wait()

    preparations = Preparations(
        prepare,
        lambda spec: None,
        on_ready=lambda held: None,
        on_refused=lambda held, error: None,
    )
    for client, count in ((1, 100), (2, 2)):
        stream = cast(Stream, FakeStream(client))
        for i in range(count):
            wanted = grammar(1000 * client + i)
            preparations.hold(
                HeldSubmission(
                    stream=stream, samples=[toy_request(i, [1])], grammar=wanted, timers=[None]
                )
            )
    await asyncio.sleep(0.01)
    at_once = len(asked)
    assert at_once < 10 and all(text.startswith("a{1") for text in asked)
    for text in asked[:2]:
        done[text].set()
    await asyncio.sleep(0.01)
    assert asked[at_once:] == ["a{2000}", "a{2001}"]


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
            assert preparations.num_ids_held >= request.num_ids
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
    assert preparations.num_held == preparations.num_ids_held == 0
    assert len(core.kept) == MAX_READY, "the last ones are kept, and nothing else"
    assert all(preparations.is_ready(each) for each in core.kept)
