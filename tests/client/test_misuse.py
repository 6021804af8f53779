"""Wrong types, wrong threads, wrong moments: an error that says so; never a hang, never silence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.fake_services import FakeServices, fake_services

from millstream.client import AsyncClient, Client, SamplingParams
from millstream.rpc.errors import EngineFault, EngineUnavailable, InvalidArgument

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("timeout_s", lambda client: client.generate("a", timeout_s=10**400)),
        ("sampling_params", lambda client: client.generate("a", {"temperature": 0})),
        ("sampling_params", lambda client: client.generate("a", 0)),
        ("sampling_params", lambda client: client.generate(["a"], (p for p in [None]))),
        ("request_id", lambda client: client.generate("a", request_id=3)),
        ("messages", lambda client: client.chat("hi")),
        ("add_generation_prompt", lambda client: client.chat(USER, add_generation_prompt="x")),
        ("continue_final_message", lambda client: client.chat(USER, continue_final_message=1)),
        ("plain_content", lambda client: client.chat(USER, plain_content="x")),
        ("text", lambda client: client.encode(None)),
        ("text", lambda client: client.encode(3)),
        ("add_special_tokens", lambda client: client.encode("a", add_special_tokens="x")),
        ("token_ids", lambda client: client.decode(None)),
        ("token_ids", lambda client: client.decode([[1], 2])),
        ("token_ids", lambda client: client.decode(i for i in [1, 2])),
        ("skip_special_tokens", lambda client: client.decode([1], skip_special_tokens="x")),
    ],
)
async def test_a_wrong_type_is_named(
    client: AsyncClient, field: str, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field}\b") as caught:
        await call(client)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("engine", {"engine": ""}),
        ("engine", {"engine": 50051}),
        ("tokenizer", {"tokenizer": ""}),
        ("timeout_s", {"timeout_s": 0}),
        ("timeout_s", {"timeout_s": float("nan")}),
        ("timeout_s", {"timeout_s": "1"}),
        ("timeout_s", {"timeout_s": None}),
    ],
)
def test_a_client_that_cannot_be_is_refused(field: str, arguments: dict[str, Any]) -> None:
    threads = threading.active_count()
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgument, match=f"^{field}: "):
            kind(**arguments)
    assert threading.active_count() == threads


async def test_the_bad_prompt_of_a_list_is_told_by_number(client: AsyncClient) -> None:
    for bad in ("", "\ud800", [258]):  # refused by the engine, here, by the engine
        with pytest.raises(InvalidArgument) as caught:
            await client.generate(["a", "b", bad])
        assert caught.value.__notes__ == ["prompt number 2"]


def test_closing_at_once_from_many_threads(threaded_services: FakeServices) -> None:
    client = Client(threaded_services.target, threaded_services.target)
    assert client.generate("a").text == "a"
    threads = [threading.Thread(target=client.close, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(EngineUnavailable, match="closed"):
        client.generate("a")


def test_a_closed_clients_events_are_all_taken(
    threaded_services: FakeServices, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC hands late events to a loop that is closed, and asyncio logs a traceback: one for two of
    three clients on a busy machine."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    busy = [threading.Thread(target=spin, daemon=True) for _ in range(2)]
    for thread in busy:
        thread.start()
    for _ in range(4):
        with Client(threaded_services.target, threaded_services.target) as client:
            assert client.generate("a").text == "a"
    over.set()
    for thread in busy:
        thread.join()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("method", ["close", "info"])
def test_an_observer_may_not_wait_for_its_own_client(
    threaded_services: FakeServices, method: str
) -> None:
    errors = []

    def observe(message: object) -> None:
        try:
            getattr(client, method)()
        except RuntimeError as error:
            errors.append(str(error))

    with Client(threaded_services.target, threaded_services.target, observer=observe) as client:
        assert client.generate("ab").text == "ab"
    assert errors
    assert "own thread" in errors[0]


async def test_an_observer_that_raises_is_named(services: FakeServices) -> None:
    def observe(message: object) -> None:
        raise ValueError("a fault of mine")

    async with AsyncClient(services.target, services.target, observer=observe) as client:
        with pytest.raises(EngineFault, match=r"^the observer raised ValueError.*a fault of mine"):
            await client.generate("ab")


FORK = """
import gc, os, signal, sys
from millstream.client import Client

with Client(sys.argv[1], sys.argv[1]) as client:
    assert client.generate("a").text == "a"
    gc.disable()  # in the child it might end what of gRPC is the parent's
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends a child that hangs
            code = 1
            try:
                client.generate("a")
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            client.close()  # as at exit
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert client.generate("b").text == "b"
"""


def test_a_forked_child_gets_an_error_and_can_exit(threaded_services: FakeServices) -> None:
    """In a process of its own: what other libraries do at a fork of pytest is not the client's."""
    subprocess.run([sys.executable, "-c", FORK, threaded_services.target], check=True, timeout=60)


def test_an_async_client_belongs_to_one_loop(threaded_services: FakeServices) -> None:
    client = AsyncClient(threaded_services.target, threaded_services.target)

    async def generate(last: bool) -> str:
        try:
            return (await client.generate("a")).text
        finally:
            if last:
                await client.close()

    async def both() -> None:
        assert await generate(last=False) == "a"
        with pytest.raises(RuntimeError, match="event loop"):
            await asyncio.to_thread(asyncio.run, generate(last=False))
        assert await generate(last=True) == "a"

    asyncio.run(both())


def test_the_client_works_inside_a_running_loop(threaded_services: FakeServices) -> None:
    """As in a notebook."""

    async def notebook(client: Client) -> list[str]:
        return [client.generate("ab").text, "".join(d.text for d in client.stream("cd"))]

    with Client(threaded_services.target, threaded_services.target) as client:
        assert asyncio.run(notebook(client)) == ["ab", "cd"]


async def test_a_broken_stream_leaves_no_task_behind() -> None:
    """Its writer slept on, and Python told of a pending task that was destroyed."""
    async with fake_services() as services:
        client = AsyncClient(services.target, services.target, timeout_s=2)
        await client.generate("a")
        before = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        for _ in range(3):
            services.engine.break_after_tokens = 1
            with pytest.raises(EngineUnavailable):
                await client.generate("abc")
            assert (await client.generate("a")).text == "a"
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert names.count("EngineStream._write") == 1
        assert "EngineStream._write" in before
        await client.close()


async def test_too_many_stop_strings(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgument, match=r"^stop: at most"):
        await client.generate("a", SamplingParams(stop=[f"{i}" for i in range(100_000)]))
