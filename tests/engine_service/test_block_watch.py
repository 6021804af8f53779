"""Who watches the prefix cache: order, late watchers, slow ones, and the core told when none is
left."""

from __future__ import annotations

import asyncio
import queue
from typing import cast

import pytest
from tests.toy_runner import ToyRunner, toy_info, toy_request

from millstream.engine.channel import CoreChannel
from millstream.engine.core import EngineCore
from millstream.engine.core_process import _obey
from millstream.engine.frontend import block_watch
from millstream.engine.frontend.block_watch import BlockWatchers
from millstream.engine.frontend.supervisor import Supervisor
from millstream.engine.records import (
    BlockEvents,
    CachedBlocks,
    Finish,
    FromCore,
    Submit,
    ToCore,
    UnwatchBlocks,
    WatchBlocks,
)
from millstream.engine.request import FinishReason
from millstream.engine.scheduling.prefix import BlockEvent, BlockName, BlockRemoved, BlockStored
from millstream.rpc.errors import EngineUnavailable, FellBehind


class FakeCore:
    def __init__(self) -> None:
        self.asked: list[int | None] = []  # None: watch no longer

    def watch_blocks(self, token: int) -> None:
        self.asked.append(token)

    def unwatch_blocks(self) -> None:
        self.asked.append(None)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def as_supervisor(core: FakeCore) -> Supervisor:
    return cast(Supervisor, core)


def name(number: int) -> BlockName:
    return BlockName(bytes([number]), None, b"", "")


def stored(*numbers: int) -> list[BlockEvent]:
    return [BlockStored(name(number)) for number in numbers]


async def test_a_watcher_hears_what_is_cached_then_what_changes(core: FakeCore) -> None:
    watchers = BlockWatchers()
    with watchers.open(as_supervisor(core)) as watcher:
        (token,) = core.asked
        assert token is not None
        watchers.on_record(BlockEvents(stored(9)))  # another watcher's; in our answer already
        watchers.on_record(CachedBlocks(token, [name(1), name(2)]))
        assert await watcher.next() == stored(1, 2)
        watchers.on_record(BlockEvents(stored(3)))
        watchers.on_record(BlockEvents([BlockRemoved(b"\1")]))
        assert await watcher.next() == [*stored(3), BlockRemoved(b"\1")]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watcher.next(), 0.01)
    assert core.asked == [token, None]


async def test_an_empty_cache_is_told_of_too(core: FakeCore) -> None:
    watchers = BlockWatchers()
    with watchers.open(as_supervisor(core)) as watcher:
        watchers.on_record(CachedBlocks(0, []))
        assert await watcher.next() == []


async def test_watchers_come_and_go_apart(core: FakeCore) -> None:
    watchers = BlockWatchers()
    with watchers.open(as_supervisor(core)) as first:
        watchers.on_record(CachedBlocks(0, []))
        await first.next()
        with watchers.open(as_supervisor(core)) as second:
            watchers.on_record(BlockEvents(stored(1)))
            watchers.on_record(CachedBlocks(1, [name(1)]))
            watchers.on_record(BlockEvents(stored(2)))
            assert await first.next() == stored(1, 2)
            assert await second.next() == stored(1, 2)
        assert core.asked == [0, 1]
        watchers.on_record(BlockEvents(stored(3)))
        assert await first.next() == stored(3)
    assert core.asked == [0, 1, None]
    watchers.on_record(CachedBlocks(1, []))  # an answer to who is gone


async def test_who_reads_too_slowly_is_cut_off_alone(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_watch, "MAX_EVENTS_WAITING", 3)
    watchers = BlockWatchers()
    with watchers.open(as_supervisor(core)) as slow, watchers.open(as_supervisor(core)) as fast:
        for token in (0, 1):
            watchers.on_record(CachedBlocks(token, [name(1)]))
        await fast.next()
        watchers.on_record(BlockEvents(stored(2, 3, 4)))  # with the cached one, four: as allowed
        assert await fast.next() == stored(2, 3, 4)
        watchers.on_record(BlockEvents(stored(5)))
        assert await fast.next() == stored(5)
        with pytest.raises(FellBehind):
            await slow.next()
        watchers.on_record(BlockEvents(stored(6)))
        with pytest.raises(FellBehind):
            await slow.next()


async def test_the_end_of_the_engine_ends_every_watch(core: FakeCore) -> None:
    watchers = BlockWatchers()
    with watchers.open(as_supervisor(core)) as watcher:
        watchers.fail(EngineUnavailable("the engine is stopping"))
        with pytest.raises(EngineUnavailable, match="stopping"):
            await watcher.next()


def test_the_core_tells_what_is_cached_between_the_right_events() -> None:
    """A request that ends names its last blocks; whoever asks in the same turn hears of them once:
    as a change before the answer, or in the answer."""
    info = toy_info(block_size=4, num_blocks=16)
    core = EngineCore(ToyRunner(info), prefix_caching=True)
    channel = RecordingChannel()
    asked: list[int] = []

    def obey(command: ToCore) -> None:
        _obey(core, command, asked, cast(CoreChannel, channel), queue.SimpleQueue())

    obey(WatchBlocks(0))
    obey(Submit([toy_request(1, list(range(9)), max_tokens=8)]))
    for _ in range(4):
        core.step()
    obey(Finish([1], int(FinishReason.CANCELLED)))
    obey(WatchBlocks(1))
    first, changes, second = channel.records
    assert first == CachedBlocks(0, [])
    assert isinstance(changes, BlockEvents) and isinstance(second, CachedBlocks)
    assert changes.events == [BlockStored(cached) for cached in second.names] != []
    assert core.take_block_events() == []
    obey(UnwatchBlocks())
    obey(Submit([toy_request(2, list(range(50, 60)), max_tokens=8)]))
    core.step()
    assert core.take_block_events() == []


class RecordingChannel:
    def __init__(self) -> None:
        self.records: list[FromCore] = []

    def send(self, record: FromCore) -> None:
        self.records.append(record)
