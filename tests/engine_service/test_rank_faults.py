"""An engine over several processes: whichever dies, all end, streams hear of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tests.engine_health import NOT_SERVING, SERVING, HealthWatch
from tests.engine_processes import ROOT, EngineProcess, Stream, connect, submission
from tests.rank_processes import all_end, descendants, shared_memory, wait_for_ranks
from tests.tiny_models import make_tiny_model

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
WITHIN_S = 5
START_S = 90  # each process imports torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines, and ends those that a test has left."""
    started: list[EngineProcess] = []

    def start(ranks: int = 2) -> EngineProcess:
        started.append(
            EngineProcess(
                *("--model", str(folder), "--device", "cpu", "--threads", "1"),
                *("--tensor-parallel-size", str(ranks)),
                runner="model",
            )
        )
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.finish()


Start = Callable[..., EngineProcess]


@pytest.mark.parametrize("victim", ["rank", "idle rank", "core", "front end"])
async def test_rows_25_and_26_sigkill(start: Start, victim: str) -> None:
    before = shared_memory()
    server = start()
    await asyncio.to_thread(server.wait_until_serving, START_S)
    pid = server.process.pid
    (rank,) = wait_for_ranks(pid, 1)
    everyone = [pid, *descendants(pid)]
    watch = HealthWatch(server.target, "millstream.v1.Engine")
    assert await watch.next() == SERVING
    async with connect(server.target) as stub:
        streams = [Stream(stub) for _ in range(3)]
        for stream in streams:
            if victim == "idle rank":
                await stream.read()
            else:
                await stream.submit(submission(1, [10], max_tokens=500, ignore_eos=True))
                await stream.until_token(1)
        started = time.monotonic()
        dies = {"core": server.core_pid(), "front end": pid}.get(victim, rank)
        os.kill(dies, signal.SIGKILL)
        if victim != "front end":
            assert await watch.next() == NOT_SERVING
        for stream in streams:
            code, details = await stream.status()
            assert code is UNAVAILABLE
            if victim.endswith("rank"):
                assert "rank 1 of 2 was killed by SIGKILL" in details
        assert time.monotonic() - started < WITHIN_S
    stderr = await asyncio.to_thread(server.finish, WITHIN_S)
    assert all_end(everyone, WITHIN_S)
    assert shared_memory() <= before
    if victim.endswith("rank"):
        assert server.process.returncode == 1
        assert "rank 1 of 2 was killed by SIGKILL" in stderr
    await watch.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", ["no rank yet", "a rank is starting", "loading"])
def test_row_26_start_up_that_ends_half_way(
    start: Start, stage: str, number: signal.Signals
) -> None:
    before = shared_memory()
    server = start(ranks=4)
    pid = server.process.pid
    core = server.core_pid()
    if stage != "no rank yet":
        wait_for_ranks(pid, 1 if stage == "a rank is starting" else 3)
    if stage == "loading":
        time.sleep(1)  # torch is being imported, or the ranks meet
    everyone = [pid, core, *descendants(pid)]
    os.kill(pid, number)
    server.finish(WITHIN_S)
    assert all_end(everyone, WITHIN_S)
    assert shared_memory() <= before


def test_row_30_two_engines_in_the_same_second(start: Start) -> None:
    """Twenty times is the script's matter: tests/bench/rank_starts.py."""
    servers = [start() for _ in range(2)]
    everyone: list[int] = []
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(EngineProcess.wait_until_serving, servers, [START_S] * 2))
        for server in servers:
            everyone += [server.process.pid, *descendants(server.process.pid)]
        assert len(everyone) == len(set(everyone)) >= 6
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.stop()
            assert server.process.returncode == 0
    assert all_end(everyone, 1)


def test_row_56_nine_heads_over_two_ranks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    refused = subprocess.run(
        [
            *(sys.executable, "-m", "millstream.engine", "--port", "0", "--model", str(folder)),
            *("--tensor-parallel-size", "2", "--device", "cpu"),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr == (
        "millstream-engine: error: tensor_parallel_size: 9 attention heads (num_attention_heads) "
        "cannot be split over 2 ranks\n"
    )
