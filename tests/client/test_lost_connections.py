"""Connections that end while requests are on them, by neither side's wish."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests import fake_services
from tests.engine_processes import engine
from tests.fake_services import FakeServices

from millstream.client import AsyncClient, SamplingParams
from millstream.rpc import options
from millstream.rpc.errors import EngineUnavailable

ENDLESS = SamplingParams(ignore_eos=True)
SHORT = SamplingParams(ignore_eos=True, max_tokens=50)


async def test_a_connection_that_has_had_its_time_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As some proxies do: GOAWAY, and what is not done a while later is cut off."""
    age = [("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", 300)]
    monkeypatch.setattr(fake_services, "server_options", lambda: [*options.server_options(), *age])
    services = FakeServices()
    await services.start()
    services.engine.step_s = 0.005
    async with AsyncClient(services.target, services.target, timeout_s=2) as client:
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match=f"the engine at {services.target} is"):
                await client.generate([1, 2, 3], ENDLESS, detokenize=False)
            assert (await client.generate("hello")).text == "hello"
    await services.stop()


async def test_an_engine_that_is_suspended_is_left_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had not accepted goes to another; when it goes on it is as good as before."""
    monkeypatch.setattr(options, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_MS", 1000)
    with engine() as suspended, engine() as other:
        alone = AsyncClient(suspended.target, None)
        async with AsyncClient([suspended.target, other.target], None) as both, alone:
            for client in (alone, both):
                await client.generate([[1]] * 4, SHORT, detokenize=False)
            suspended.process.send_signal(signal.SIGSTOP)
            try:
                moved, (lost,) = await asyncio.gather(
                    both.generate([[1]] * 8, SHORT, detokenize=False),
                    alone.generate([[1]], SHORT, detokenize=False, return_exceptions=True),
                )
            finally:
                suspended.process.send_signal(signal.SIGCONT)
            assert len(await alone.generate([[1]] * 4, SHORT, detokenize=False)) == 4
    assert [len(output.token_ids) for output in moved] == [50] * 8
    assert isinstance(lost, EngineUnavailable)
    assert "ping timeout" in str(lost)
