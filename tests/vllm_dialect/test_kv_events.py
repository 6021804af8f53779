"""SubscribeKvEvents: what subscribers hear is what the engine's prefix cache does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common
from tests.engine_processes import EngineProcess, connect, engine, eventually
from tests.fake_runners import BLOCK_SIZE
from tests.vllm_dialect.calls import complete

from millstream.engine.scheduling.prefix import BlockName, BlockRemoved, BlockStored, extend_names
from millstream.engine.vllm_dialect import kv_events
from millstream.engine.vllm_dialect.kv_events import Batches, block_hash
from millstream.v1 import engine_pb2

NUM_BLOCKS = 2 * 128 // BLOCK_SIZE


@pytest.fixture(scope="module")
def server(byte_model_dir: Path) -> Iterator[EngineProcess]:
    """A small pool, so that blocks are soon forgotten."""
    with engine("--max-num-seqs", "2", "--max-model-len", "128") as started:
        yield started


class Subscriber:
    """The prefix cache as a subscriber sees it: block hash -> the whole prefix that ends there."""

    def __init__(self, stub: vllm_grpc.VllmEngineStub) -> None:
        self.call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.last_number = 0

    async def read_snapshot(self) -> None:
        more = True
        while more:
            batch = await self.read()
            assert batch.HasField("snapshot")
            more = batch.snapshot.index + 1 < batch.snapshot.count
        assert batch.snapshot.blocks == len(self.prefixes)

    async def read(self) -> common.KvEventBatch:
        batch = await self.call.read()
        self.last_number += 1
        assert batch.sequence_number == self.last_number
        for event in batch.events:
            self._apply(event)
        return batch

    async def follow(self) -> None:
        while True:
            await self.read()

    def _apply(self, event: common.KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                assert self.last_number == 1
            case "removed":
                for gone in event.removed.block_hashes:
                    del self.prefixes[gone]
            case "stored":
                stored = event.stored
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.prefixes
                (block,) = stored.blocks
                assert block.block_hash not in self.prefixes
                assert block.block_size == len(block.token_ids) == BLOCK_SIZE
                before = () if parent is None else self.prefixes[parent]
                self.prefixes[block.block_hash] = (*before, *block.token_ids)


@pytest.fixture
async def stub(server: EngineProcess) -> AsyncIterator[vllm_grpc.VllmEngineStub]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield vllm_grpc.VllmEngineStub(channel)


async def test_events_equal_the_pools_truth(stub: vllm_grpc.VllmEngineStub) -> None:
    """After each request: who followed from the start knows what a newcomer is told, and that
    predicts how much of the next prompt the engine finds in its cache."""
    rng = random.Random(1)
    families = [[rng.randrange(500) for _ in range(100)] for _ in range(3)]
    early = Subscriber(stub)
    await early.read_snapshot()
    following = asyncio.create_task(early.follow())
    hits = removals = 0
    for _ in range(40):
        prompt = rng.choice(families)[: rng.randint(1, 100)]
        late = Subscriber(stub)
        await late.read_snapshot()
        late.call.cancel()

        async def agree(late: Subscriber = late) -> bool:
            return early.prefixes == late.prefixes

        assert await eventually(agree, 5)
        known = set(early.prefixes.values())
        usable = (len(prompt) - 1) // BLOCK_SIZE
        expected = 0
        while expected < usable and tuple(prompt[: (expected + 1) * BLOCK_SIZE]) in known:
            expected += 1
        before = len(early.prefixes)
        done = await complete(stub, prompt, max_tokens=rng.randint(1, 20), stream=False)
        assert done.cached_tokens == expected * BLOCK_SIZE
        hits += expected
        removals += len(early.prefixes) < before
    assert hits > 20
    assert len(early.prefixes) <= NUM_BLOCKS
    following.cancel()
    early.call.cancel()


async def test_events_come_while_a_request_runs(stub: vllm_grpc.VllmEngineStub) -> None:
    subscriber = Subscriber(stub)
    await subscriber.read_snapshot()
    running = asyncio.create_task(complete(stub, [600] * 40, max_tokens=30, ignore_eos=True))
    async with asyncio.timeout(10):
        while not any(prefix[0] == 600 for prefix in subscriber.prefixes.values()):
            await subscriber.read()
    await running
    subscriber.call.cancel()


async def test_history_is_not_kept(stub: vllm_grpc.VllmEngineStub) -> None:
    call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=3))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_salted_blocks_say_so(server: EngineProcess, stub: vllm_grpc.VllmEngineStub) -> None:
    subscriber = Subscriber(stub)
    await subscriber.read_snapshot()
    async with connect(server.target) as ours:
        stream = ours.Generate()
        submission = engine_pb2.Submission(handle=1, token_ids=[700] * 20, cache_salt="mine")
        submission.sampling.max_tokens = 1
        await stream.write(engine_pb2.GenerateRequest(submit=[submission]))
        batch = await subscriber.read()
        stored = next(e.stored for e in batch.events if e.HasField("stored"))
        assert stored.cache_salt == "mine"
        stream.cancel()
    subscriber.call.cancel()


async def test_no_prefix_cache_no_events() -> None:
    with engine("--no-prefix-caching") as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            call = vllm_grpc.VllmEngineStub(channel).SubscribeKvEvents(
                common.SubscribeKvEventsRequest()
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stopping_engine_ends_subscriptions() -> None:
    server = EngineProcess("--drain-timeout-s", "20")
    server.wait_until_serving()
    async with grpc.aio.insecure_channel(server.target) as channel:
        subscriber = Subscriber(vllm_grpc.VllmEngineStub(channel))
        await subscriber.read_snapshot()
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(5):
                await subscriber.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the engine is stopping"
        await asyncio.wait_for(stopping, 5)


def test_long_snapshots_and_bursts_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "EVENTS_PER_BATCH", 2)
    names: list[BlockName] = []
    extend_names(names, "", list(range(20)), 4, 5)
    batches = Batches()
    cached = list(batches.snapshot([BlockStored(name) for name in names]))
    assert [batch.sequence_number for batch in cached] == [1, 2, 3]
    assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in cached] == [
        (0, 3, 5), (1, 3, 5), (2, 3, 5),
    ]  # fmt: skip
    assert [event.WhichOneof("data") for event in cached[0].events] == ["cleared", *["stored"] * 2]
    live = list(batches.live([BlockRemoved(name.digest) for name in names]))
    assert [batch.sequence_number for batch in live] == [4, 5, 6]
    assert [event.event_id for batch in live for event in batch.events] == [1, 2, 3, 4, 5]
    gone = [h for batch in live for event in batch.events for h in event.removed.block_hashes]
    assert gone == [block_hash(name.digest) for name in names]


def test_hashes_are_64_bits_with_a_sign() -> None:
    assert block_hash(b"\xff" * 8 + b"rest") == -1
    assert block_hash(b"\x00" * 7 + b"\x05" + b"rest") == 5
