"""200 requests with random cancels, disconnects and deadlines leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

import grpc
import pytest
from tests.engine_processes import alive

from millstream.client import AsyncClient, Client, SamplingParams, launch
from millstream.rpc.errors import Cancelled, DeadlineExceeded, EngineUnavailable
from millstream.v1 import engine_pb2, engine_pb2_grpc

NUM_REQUESTS = 200


@pytest.mark.slow
def test_chaos_leaves_nothing_behind(default_model_dir: Path) -> None:
    others = _descendants(os.getpid())
    with launch(str(default_model_dir), max_num_seqs=16) as client:
        targets = (client.engine_target, client.tokenizer_target)
        outcomes = asyncio.run(_chaos(*targets, seed=2))
        stats = _settled_stats(client)
        assert stats.num_requests_running == stats.num_requests_waiting == 0
        assert stats.kv_blocks_used == 0
        # The client's own stream and nothing else.
        assert stats.open_streams <= 1
        assert stats.requests_finished >= NUM_REQUESTS // 2
        assert sum(outcomes.values()) == NUM_REQUESTS
        assert all(outcomes[kind] > 0 for kind in ("done", "left", "cancelled", "deadline"))
        assert client.generate("still here", SamplingParams(max_tokens=2)).usage.output_tokens == 2
        processes = _descendants(os.getpid()) - others
        assert len(processes) >= 3  # the engine, its core, the tokenizer
    assert not [pid for pid in processes if alive(pid)]


async def _chaos(engine: str, tokenizer: str, *, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    outcomes = dict.fromkeys(("done", "left", "cancelled", "deadline", "disconnected"), 0)
    clients = [AsyncClient(engine=engine, tokenizer=tokenizer) for _ in range(4)]
    doomed = AsyncClient(engine=engine, tokenizer=tokenizer)
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_REQUESTS):
            is_doomed = number % 20 == 0
            client = doomed if is_doomed else clients[number % 4]
            one = _one(client, random.Random(rng.random()), outcomes, is_doomed=is_doomed)
            group.create_task(one)
        await asyncio.sleep(2)
        await doomed.close()  # a client that goes away with requests in flight
    for client in clients:
        await client.close()
    return outcomes


async def _one(
    client: AsyncClient, rng: random.Random, outcomes: dict[str, int], *, is_doomed: bool
) -> None:
    await asyncio.sleep(rng.random() * 2)
    prompt = " ".join(["word"] * rng.randint(1, 60))
    params = SamplingParams(
        max_tokens=rng.randint(1, 24), stop=["the"] if rng.random() < 0.2 else ()
    )
    try:
        match rng.choice(("run", "leave", "cancel", "deadline")):
            case "run":
                await client.generate(prompt, params)
                outcomes["done"] += 1
            case "leave":
                stream = client.stream(prompt, params)
                async for _ in stream:
                    break
                await stream.aclose()
                outcomes["left"] += 1
            case "cancel":
                task = asyncio.ensure_future(client.generate(prompt, params))
                await asyncio.sleep(rng.random())
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                outcomes["cancelled"] += 1
            case _:
                await client.generate(prompt, params, timeout_s=0.001 + rng.random() * 0.5)
                outcomes["done"] += 1
    except DeadlineExceeded:
        outcomes["deadline"] += 1
    except (Cancelled, EngineUnavailable):
        assert is_doomed  # nobody else's request fails
        outcomes["disconnected"] += 1


def _descendants(pid: int) -> set[int]:
    """Processes below this one."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), set()).add(int(entry.parent.name))
    found, todo = set(), [pid]
    while todo:
        new = children.get(todo.pop(), set())
        found |= new
        todo += new
    return found


def _settled_stats(client: Client) -> engine_pb2.GetStatsResponse:
    """The engine's stats once it is idle, or after 10 s."""
    deadline = time.monotonic() + 10
    with grpc.insecure_channel(client.engine_target) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        while True:
            stats = stub.GetStats(engine_pb2.GetStatsRequest())
            idle = not (stats.num_requests_running or stats.num_requests_waiting)
            if (idle and stats.open_streams <= 1) or time.monotonic() > deadline:
                return stats
            time.sleep(0.1)
