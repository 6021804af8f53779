"""Supervisor with real core processes: start, failure, stuck, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.engine_processes import eventually, gone
from tests.fake_runners import DIE_ID, HANG_ID, tokens_after

from millstream.engine.channel import framed
from millstream.engine.config import EngineConfig
from millstream.engine.frontend.supervisor import Supervisor
from millstream.engine.records import FinishedRecord, StepRecord, Submit, ToCore
from millstream.engine.request import FinishReason, Request, Sampling
from millstream.engine.startup.spawn import spawn_core
from millstream.rpc.errors import EngineUnavailable
from millstream.rpc.server import StartError


class Core:
    """A supervisor and all that its core said."""

    def __init__(self, runner: str, step_timeout_s: float = 30) -> None:
        config = EngineConfig(
            runner=f"tests.fake_runners:{runner}", step_timeout_s=step_timeout_s, max_model_len=512
        )
        self.supervisor = Supervisor(config, spawn_core(config), on_step=self._on_step)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedRecord] = {}
        self._changed = asyncio.Event()

    def _on_step(self, step: StepRecord) -> None:
        for key, token_id in zip(step.keys, step.token_ids, strict=True):
            self.tokens.setdefault(key, []).append(token_id)
        self.finished.update((record.key, record) for record in step.finished)
        self._changed.set()

    async def until_finished(self, *keys: int) -> None:
        async with asyncio.timeout(10):
            while not set(keys) <= set(self.finished):
                self._changed.clear()
                await self._changed.wait()

    @property
    def pid(self) -> int:
        return self.supervisor._process.pid


@contextlib.asynccontextmanager
async def started(runner: str, step_timeout_s: float = 30) -> AsyncIterator[Core]:
    core = Core(runner, step_timeout_s)
    try:
        await core.supervisor.load(None)
        yield core
    finally:
        await core.supervisor.close()
    assert await gone(core.pid, 0)


def request(key: int, token_ids: list[int], max_tokens: int = 5) -> Request:
    return Request(key=key, token_ids=token_ids, sampling=Sampling(max_tokens=max_tokens))


async def test_row_89_starts_after_grpc_has_threads() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), 0.1)
        async with started("echo") as core:
            core.supervisor.submit([request(1, [10]), request(2, [20])])
            assert core.supervisor.num_live == 2
            await core.until_finished(1, 2)
            assert core.tokens == {1: tokens_after(10, 5), 2: tokens_after(20, 5)}
            assert core.supervisor.num_live == 0
            assert (await core.supervisor.stats()).requests_finished == 2


async def test_samples_travel_as_one_request() -> None:
    """128 samples with a large bias took a record of 100 MB, and the core a second to read it."""
    bias = tuple((token_id, 0.5) for token_id in range(900))
    sampling = Sampling(max_tokens=2, n=128, seed=2**64 - 1, logit_bias=bias)
    first = Request(key=5, token_ids=[10], sampling=sampling)
    async with started("echo") as core:
        sent: list[ToCore] = []
        channel = core.supervisor._channel
        assert channel is not None
        send, channel.send = channel.send, sent.append  # type: ignore[method-assign]
        core.supervisor.submit([first])
        (record,) = sent
        assert len(framed(record)) < 2 * len(framed(Submit([first])))
        assert core.supervisor.num_live == 128
        assert core.supervisor.num_ids == 128 * first.num_ids
        send(record)
        await core.until_finished(*range(5, 133))
        assert all(core.tokens[key] == tokens_after(10, 2) for key in range(5, 133))
        assert core.supervisor.num_live == core.supervisor.num_ids == 0


async def test_finish_is_obeyed_and_unknown_keys_are_ignored() -> None:
    async with started("paced") as core:
        core.supervisor.submit([request(1, [10], 400)])
        core.supervisor.finish([1, 77], FinishReason.DEADLINE)
        core.supervisor.finish([1], FinishReason.CANCELLED)
        await core.until_finished(1)
        assert core.finished[1].reason == FinishReason.DEADLINE
        assert list(core.finished) == [1]


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        ("refuses_to_load", "dtype float16 is not supported on this device (and a second line)"),
        ("no_such_function", "no_such_function"),
        ("dies_while_loading", "killed by SIGKILL"),
    ],
)
async def test_what_keeps_it_from_loading(runner: str, says: str) -> None:
    core = Core(runner)
    with pytest.raises(StartError) as failure:
        await core.supervisor.load(None)
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)
    await core.supervisor.close()
    assert await gone(core.pid, 0)


async def test_a_core_that_dies_before_the_model_is_found() -> None:
    core = Core("echo")
    os.kill(core.pid, signal.SIGKILL)
    core.supervisor._process.wait()
    with pytest.raises(StartError, match="was killed by SIGKILL"):
        await core.supervisor.load(None)
    await core.supervisor.close()


async def test_signals_to_the_process_group_never_end_a_core() -> None:
    """Not even in its first milliseconds: a Ctrl-C is the front end's business."""
    core = Core("echo")
    for _ in range(50):
        os.kill(core.pid, signal.SIGINT)
        os.kill(core.pid, signal.SIGTERM)
        await asyncio.sleep(0.005)
    await core.supervisor.load(None)
    status = await asyncio.to_thread(Path(f"/proc/{core.pid}/status").read_text)
    assert "SigBlk:\t0000000000000000\n" in status  # its own children hear theirs
    await core.supervisor.close()


async def test_a_core_that_is_never_asked_to_load_ends() -> None:
    core = Core("echo")

    async def reads() -> bool:
        return len(os.listdir(f"/proc/{core.pid}/task")) > 1

    assert await eventually(reads, 10)
    await core.supervisor.close()
    assert core.supervisor._process.returncode == 0  # at the end of file, not killed


async def test_a_dead_core_fails_at_once() -> None:
    async with started("scripted") as core:
        core.supervisor.submit([request(1, [DIE_ID])])
        asked = asyncio.create_task(core.supervisor.stats())
        async with asyncio.timeout(2):
            assert "SIGKILL" in await asyncio.shield(core.supervisor.failed)
        with pytest.raises(EngineUnavailable):
            await asked
        with pytest.raises(EngineUnavailable):
            await core.supervisor.stats()
        core.supervisor.submit([request(2, [10])])  # to nobody: no error, no hang


async def test_a_stuck_core_is_killed_and_an_idle_one_is_not() -> None:
    async with started("scripted", step_timeout_s=0.4) as core:
        await asyncio.sleep(1)
        assert not core.supervisor.failed.done()
        begun = time.monotonic()
        core.supervisor.submit([request(1, [HANG_ID])])
        async with asyncio.timeout(3):
            assert "no step finished for 0.4 s" in await asyncio.shield(core.supervisor.failed)
        assert time.monotonic() - begun > 0.35
        assert await gone(core.pid, 1)


async def test_a_stopped_core_is_stuck_and_does_not_survive() -> None:
    async with started("paced", step_timeout_s=0.4) as core:
        core.supervisor.submit([request(1, [10], 400)])
        os.kill(core.pid, signal.SIGSTOP)
        async with asyncio.timeout(3):
            assert "stuck" in await asyncio.shield(core.supervisor.failed)


async def test_a_front_end_that_was_held_up_does_not_blame_the_core() -> None:
    async with started("paced", step_timeout_s=0.4) as core:
        core.supervisor.submit([request(1, [10], 300)])
        await asyncio.sleep(0.05)
        time.sleep(1)  # noqa: ASYNC251 - the event loop is what is held up
        await core.until_finished(1)
        assert not core.supervisor.failed.done()


async def test_close_needs_no_cooperation() -> None:
    async with started("scripted") as core:
        core.supervisor.submit([request(1, [HANG_ID])])
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        await core.supervisor.close()
        await core.supervisor.close()
        assert time.monotonic() - begun < 1
        assert await gone(core.pid, 0)
