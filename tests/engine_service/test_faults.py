"""Cores that die, raise or hang, front ends that die, signals: nobody waits, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tests.engine_health import NOT_SERVING, SERVING, HealthWatch
from tests.engine_processes import (
    ROOT,
    EngineProcess,
    Stream,
    alive,
    connect,
    engine,
    gone,
    listening_port,
    submission,
)
from tests.fake_runners import DIE_ID, HANG_ID, RAISE_ID, SLEEP_ID, tokens_after

from millstream.rpc import errors
from millstream.v1 import engine_pb2

SCRIPTED = "tests.fake_runners:scripted"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SHUTDOWN = engine_pb2.FINISH_REASON_SHUTDOWN
LENGTH = engine_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (RAISE_ID, "RuntimeError: told to by RAISE_ID"),
        (DIE_ID, "killed by SIGKILL"),
        (HANG_ID, "no step finished for 1 s"),
        (None, "killed by SIGKILL"),  # from outside, while it is busy with good requests
    ],
)
async def test_rows_25_26_a_failed_core_ends_everything(trouble: int | None, says: str) -> None:
    with engine("--step-timeout-s", "1", runner=SCRIPTED) as server:
        core = server.core_pid()
        watch = HealthWatch(server.target, "millstream.v1.Engine")
        assert await watch.next() == SERVING
        async with connect(server.target) as stub:
            streams = [Stream(stub) for _ in range(3)]
            for stream in streams:
                await stream.submit(submission(1, [10], max_tokens=4000))
                await stream.until_token(1)
            idle = Stream(stub)
            await idle.read()
            started = time.monotonic()
            if trouble is None:
                os.kill(core, signal.SIGKILL)
            else:
                await streams[0].submit(submission(2, [trouble, 5]))
            await asyncio.sleep(0.1)
            asked = stub.GetStats(engine_pb2.GetStatsRequest(), timeout=10)
            assert await watch.next() == NOT_SERVING
            for stream in (*streams, idle):
                code, details = await stream.status()
                assert code is UNAVAILABLE
                assert says in details
            assert await asked.code() is UNAVAILABLE  # row 21: a status, never silence
            assert says in await asked.details(), "ours, not that of the server's end"
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await Stream(stub).read()
            assert failure.value.code() is UNAVAILABLE
            assert time.monotonic() - started < 5
        stderr = await asyncio.to_thread(server.finish, 5)
        assert server.process.returncode == 1
        assert says in stderr
        assert await gone(core, 1)
        await watch.close()


async def test_a_reader_that_stopped_learns_of_the_end_too() -> None:
    """Its messages are held back by HTTP/2 windows, so that the server waits in a write."""
    with engine("--max-model-len", "200000") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(
                *(submission(h, [7], max_tokens=190_000, ignore_eos=True) for h in range(8))
            )
            await stream.until_token(0)
            await asyncio.sleep(0.5)
            os.kill(server.core_pid(), signal.SIGKILL)
            await asyncio.to_thread(server.finish, 5)
            assert server.process.returncode == 1
            assert (await stream.status())[0] is UNAVAILABLE


async def test_row_26_sigkill_of_the_front_end_takes_the_core_along() -> None:
    with engine(runner=SCRIPTED) as server:
        core = server.core_pid()
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, [HANG_ID, 5]))  # even while a step hangs
            while 1 not in stream.accepted:
                await stream.read()
            await asyncio.sleep(0.1)
            server.process.kill()
            assert await gone(core, 5)
            assert (await stream.status())[0] is UNAVAILABLE


async def test_rows_26_and_81_ends_during_start_up() -> None:
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        server = EngineProcess(runner="tests.fake_runners:slow_load")
        core = server.core_pid()
        listening_port(server.process.pid)  # signals are handled from here on
        started = time.monotonic()
        await asyncio.sleep(0.2)
        server.process.send_signal(number)
        server.finish(5)
        assert server.process.returncode == code
        assert time.monotonic() - started < 5
        assert await gone(core, 2)


async def test_row_26_the_core_ends_with_a_front_end_that_still_imports() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        server = EngineProcess(runner="tests.fake_runners:slow_load")
        core = server.core_pid()
        server.process.send_signal(number)
        server.finish(5)
        assert await gone(core, 2)


async def test_row_25_not_serving_while_loading() -> None:
    server = EngineProcess(runner="tests.fake_runners:slow_load")
    try:
        server.core_pid()
        port = await asyncio.to_thread(listening_port, server.process.pid)
        watch = HealthWatch(f"127.0.0.1:{port}")
        assert await watch.next() == NOT_SERVING
        assert await watch.check("millstream.v1.Engine") == NOT_SERVING
        async with connect(f"127.0.0.1:{port}") as stub:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=5)
            assert failure.value.code() is UNAVAILABLE
            assert (await Stream(stub).status())[0] is UNAVAILABLE
        await watch.close()
    finally:
        server.stop()


async def test_row_81_a_drain_lets_requests_finish() -> None:
    with engine("--drain-timeout-s", "10", runner="tests.fake_runners:paced") as server:
        core = server.core_pid()
        watch = HealthWatch(server.target)
        assert await watch.next() == SERVING
        async with connect(server.target) as stub:
            stream, idle = Stream(stub), Stream(stub)
            await stream.submit(submission(1, [10], max_tokens=100))
            await stream.until_token(1)
            await idle.read()
            server.process.send_signal(signal.SIGTERM)
            assert await watch.next() == NOT_SERVING
            await stream.submit(submission(2, [10]))
            code, details = await stream.status()
            assert (code, details) == (UNAVAILABLE, "the engine is stopping")
            assert stream.token_ids[1] == tokens_after(10, 100)
            assert stream.finished[1].reason == LENGTH
            refusal = stream.refusal(2)
            assert isinstance(refusal, errors.EngineUnavailable)
            assert (await idle.status())[0] is UNAVAILABLE
        await asyncio.to_thread(server.finish, 5)
        assert server.process.returncode == 0
        assert not alive(core)
        await watch.close()


@pytest.mark.parametrize("second_signal", [False, True])
async def test_row_81_a_drain_ends(second_signal: bool) -> None:
    """After its time, or at a second signal: three streams with work and two queued requests."""
    flags = ["--max-num-seqs", "3", "--drain-timeout-s", "30" if second_signal else "0.5"]
    with engine(*flags, runner="tests.fake_runners:paced") as server:
        core = server.core_pid()
        async with connect(server.target) as stub:
            streams = [Stream(stub) for _ in range(3)]
            for stream in streams:
                await stream.submit(submission(1, [10], max_tokens=4000))
                await stream.until_token(1)
            await streams[0].submit(submission(2, [10]), submission(3, [10]))
            while 3 not in streams[0].accepted:
                await streams[0].read()
            server.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            if second_signal:
                await asyncio.sleep(0.2)
                server.process.send_signal(signal.SIGINT)
            for stream in streams:
                assert (await stream.status())[0] is UNAVAILABLE
                for handle, finished in stream.finished.items():
                    assert finished.reason == SHUTDOWN
                    error = errors.from_status(finished.status)
                    assert isinstance(error, errors.EngineUnavailable)
                    if handle == 1:
                        count = finished.usage.output_tokens
                        assert stream.token_ids[1] == tokens_after(10, count)
            assert sorted(streams[0].finished) == [1, 2, 3]
        await asyncio.to_thread(server.finish, 5)
        assert server.process.returncode == 0
        assert time.monotonic() - started < 4
        assert not alive(core)


async def test_signals_to_the_whole_group_drain_too() -> None:
    """Ctrl-C and systemd signal every process at once: the core leaves its end to the parent."""
    with engine("--drain-timeout-s", "10", runner="tests.fake_runners:paced") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, [10], max_tokens=60))
            await stream.until_token(1)
            for pid in (server.core_pid(), server.process.pid):
                os.kill(pid, signal.SIGINT)
            assert (await stream.status())[0] is UNAVAILABLE
            assert stream.token_ids[1] == tokens_after(10, 60)
        await asyncio.to_thread(server.finish, 5)
        assert server.process.returncode == 0


async def test_the_engine_ends_when_its_parent_closes_the_control_socket() -> None:
    with engine() as server:
        core = server.core_pid()
        server._control.close()
        await asyncio.to_thread(server.finish, 5)
        assert server.process.returncode == 0
        assert not alive(core)


async def test_row_92_healthy_while_steps_advance() -> None:
    """A long chunked prefill takes far more than the step timeout in all, no step alone does."""
    flags = ["--step-timeout-s", "0.8", "--max-num-batched-tokens", "16"]
    with engine(*flags, runner="tests.fake_runners:slow_prefill") as server:
        watch = HealthWatch(server.target)
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, [*range(100), SLEEP_ID], max_tokens=5))
            reading = asyncio.create_task(stream.until_ended(1))
            while not reading.done():
                assert await watch.check() == SERVING
                await asyncio.sleep(0.1)
            await reading
            assert stream.token_ids[1] == tokens_after(SLEEP_ID, 5)
            assert stream.finished[1].timings.prefill_s > 2
            await asyncio.sleep(1.5)  # idle for longer than the timeout
            assert await watch.check() == SERVING
            stream.call.cancel()
        await watch.close()


def test_row_23_a_taken_port_is_one_clear_line() -> None:
    with engine() as server:
        second = subprocess.run(
            [
                *(sys.executable, "-m", "millstream.engine"),
                *("--runner", "instant", "--port", str(server.port)),
            ],
            capture_output=True,
            text=True,
            timeout=20,
            cwd=ROOT,
            check=False,
        )
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert f"127.0.0.1:{server.port}" in second.stderr


def test_row_30_four_engines_in_the_same_second() -> None:
    servers = [EngineProcess() for _ in range(4)]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(EngineProcess.wait_until_serving, servers))
        assert len({server.port for server in servers}) == 4
        assert len({server.core_pid() for server in servers}) == 4
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.stop()
            assert server.process.returncode == 0
