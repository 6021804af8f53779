"""The channel between front end and core: whole records whatever the chunks; the end of file."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable

import msgspec
import pytest

from millstream.engine.channel import CoreChannel, FrontChannel, socket_pair
from millstream.engine.config import EngineConfig
from millstream.engine.plan import RunnerInfo
from millstream.engine.records import (
    AskStats,
    Fault,
    Finish,
    FinishedRecord,
    FromCore,
    Load,
    Loaded,
    LoadFailed,
    Start,
    Stats,
    StatsRecord,
    StepRecord,
    Submit,
    ToCore,
    make_key,
)
from millstream.engine.request import Request, Sampling

INFO = RunnerInfo(
    vocab_size=10,
    eos_token_ids=(1, 2),
    max_model_len=16,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    block_size=4,
    num_blocks=8,
)
SAMPLING = Sampling(max_tokens=5, seed=2**64 - 1, stop_token_ids=(3, 4), temperature=0.25)
FINISHED = FinishedRecord(make_key(2**20, 2**32 - 1), 1, None, "", 1, 0, 2, 0.5, 0.25, 1.0, 2.0, 0)
TO_CORE: list[ToCore] = [
    Start(EngineConfig(max_num_seqs=3, step_timeout_s=0.5)),
    Load(None),
    Load("/a/folder"),
    Submit([Request(key=2**40, token_ids=[1, 2**31], sampling=SAMPLING, cache_salt="é")]),
    Submit([Request(key=1, token_ids=list(range(300_000)), sampling=SAMPLING)]),
    Finish([1, 2**63], 3),
    AskStats(7),
]
FROM_CORE: list[FromCore] = [
    Loaded(INFO),
    LoadFailed("no"),
    StepRecord(1, [], [], []),
    StepRecord(2, [2**40, 5], [1, 2], [FINISHED]),
    StepRecord(3, list(range(2**40, 2**40 + 300_000)), list(range(300_000)), []),
    StatsRecord(7, Stats(num_requests_running=1, generation_tokens=2)),
    Fault("why"),
    Loaded(INFO, (("imports", 1.5),)),
]


def frames_of(records: list[FromCore]) -> bytes:
    """The bytes that a core writes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received: list[bytes] = []

        def drain() -> None:
            while data := ours.recv(1 << 20):
                received.append(data)

        reader = threading.Thread(target=drain)
        reader.start()
        channel = CoreChannel(theirs)
        for record in records:
            channel.send(record)
        theirs.shutdown(socket.SHUT_RDWR)
        reader.join()
        return b"".join(received)


async def test_records_travel_both_ways() -> None:
    front, core = socket_pair()
    got: list[FromCore] = []
    closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    channel = await FrontChannel.open(front, on_record=got.append, on_closed=closed.set_result)
    core_channel = CoreChannel(core)
    received: list[ToCore] = []

    def core_side() -> None:
        while (record := core_channel.receive()) is not None:
            received.append(record)
        received.append(AskStats(-1))  # the end of file came

    thread = threading.Thread(target=core_side)
    thread.start()
    for record in TO_CORE:
        channel.send(record)
    for answer in FROM_CORE:
        await asyncio.to_thread(core_channel.send, answer)
    async with asyncio.timeout(10):
        while len(got) < len(FROM_CORE) or len(received) < len(TO_CORE):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert got == FROM_CORE
    assert received == TO_CORE
    channel.close()
    await asyncio.to_thread(thread.join, 5)
    assert received[-1] == AskStats(-1)
    assert await closed is None
    channel.send(AskStats(1))  # to nobody: dropped
    core.close()


@pytest.mark.parametrize("seed", range(5))
def test_any_chunking_gives_the_same_records(seed: int) -> None:
    rng = random.Random(seed)
    records = [record for record in FROM_CORE if record != FROM_CORE[4]]
    data = frames_of(records)
    got: list[FromCore] = []
    channel = FrontChannel(got.append, lambda error: None)
    start = 0
    while start < len(data):
        stop = start + rng.choice([1, 2, 3, 7, 50])
        channel.data_received(data[start:stop])
        start = stop
    assert got == records


async def test_the_cores_end_closes_the_channel() -> None:
    front, core = socket_pair()
    closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    await FrontChannel.open(front, on_record=lambda record: None, on_closed=closed.set_result)
    core.sendall(b"\x05\x00\x00\x00ab")  # half a frame
    core.close()
    async with asyncio.timeout(5):
        assert await closed is None


@pytest.mark.parametrize("factory", [None, "uvloop"])
def test_a_broken_frame_closes_the_channel_with_its_error(factory: str | None) -> None:
    async def run() -> Exception | None:
        front, core = socket_pair()
        closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        await FrontChannel.open(front, on_record=lambda record: None, on_closed=closed.set_result)
        core.sendall(b"\x02\x00\x00\x00ab")
        async with asyncio.timeout(5):
            error = await closed
        core.close()
        return error

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if factory is not None:
        loop_factory = pytest.importorskip(factory).new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert isinstance(runner.run(run()), msgspec.ValidationError | msgspec.DecodeError)


def test_the_front_ends_end_is_none() -> None:
    front, core = socket_pair()
    front.sendall(b"\x05\x00")
    front.close()
    with core:
        assert CoreChannel(core).receive() is None
