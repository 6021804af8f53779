"""Client: the same names and answers as AsyncClient, from any thread, with Ctrl-C."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fake_services import FakeServices
from tests.fake_tokens import EOS

from millstream.client import AsyncClient, Client, SamplingParams
from millstream.rpc.errors import EngineUnavailable, InvalidArgument
from millstream.v1 import engine_pb2

ENDLESS = SamplingParams(ignore_eos=True)


@pytest.fixture
def client(threaded_services: FakeServices) -> Iterator[Client]:
    with Client(threaded_services.target, threaded_services.target, timeout_s=2) as running:
        yield running


def test_names_and_parameters_are_those_of_async_client() -> None:
    names = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert names == {name for name in vars(Client) if not name.startswith("_")}
    for name in names | {"__init__"}:
        ours, theirs = getattr(Client, name), getattr(AsyncClient, name)
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        ), name
        assert ours.__doc__


def test_generate_chat_and_streams(client: Client) -> None:
    output = client.generate("hello")
    assert (output.text, output.token_ids) == ("hello", [*b"hello", EOS])
    assert [o.text for o in client.generate(["a", [98]])] == ["a", "b"]
    assert client.chat([{"role": "user", "content": "hi"}]).text == "user:hi"
    assert "".join(delta.text for delta in client.stream("streamed")) == "streamed"
    turns = [{"role": "user", "content": "hi"}]
    assert "".join(delta.text for delta in client.chat_stream(turns)) == "user:hi"
    assert client.decode(client.encode("round")) == "round"
    assert client.health().ok
    info = client.info().engine
    assert info is not None
    assert info.model == "fake"
    with pytest.raises(InvalidArgument, match="top_p"):
        client.generate("x", SamplingParams(top_p=2))
    with pytest.raises(ValueError, match="surrogate"):
        client.stream("\ud83d")


def test_leaving_a_loop_cancels(client: Client, threaded_services: FakeServices) -> None:
    threaded_services.engine.step_s = 0.002
    for _ in client.stream("abc", ENDLESS):
        break
    _wait(lambda: list(threaded_services.engine.ended.values()) == [_CANCELLED])
    with pytest.raises(ZeroDivisionError):
        _ = [1 / 0 for _ in client.stream("abc", ENDLESS)]
    _wait(lambda: list(threaded_services.engine.ended.values()) == [_CANCELLED] * 2)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_cancels_the_request(
    client: Client, threaded_services: FakeServices, stream: bool
) -> None:
    threaded_services.engine.step_s = 0.005

    def interrupt() -> None:
        _wait(lambda: threaded_services.engine.live > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(client.stream("abc", ENDLESS)) if stream else client.generate("abc", ENDLESS)
    thread.join()
    _wait(lambda: list(threaded_services.engine.ended.values()) == [_CANCELLED])
    assert client.generate("still usable").text == "still usable"


def test_many_threads_share_a_client(client: Client, threaded_services: FakeServices) -> None:
    texts = [f"thread {i}" for i in range(40)]
    with ThreadPoolExecutor(16) as pool:
        assert [o.text for o in pool.map(client.generate, texts)] == texts
    assert threaded_services.engine.streams == 1


def test_two_clients_at_once_log_nothing(
    threaded_services: FakeServices, caplog: pytest.LogCaptureFixture
) -> None:
    target = threaded_services.target
    texts = [f"text {i}" for i in range(200)]
    caplog.set_level(logging.WARNING)
    with (
        Client(target, target) as one,
        Client(target, target) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        both = pool.map(lambda i: (one, other)[i % 2].generate(texts[i]).text, range(200))
        assert list(both) == texts
    assert not caplog.records


def test_a_closed_client_refuses(threaded_services: FakeServices) -> None:
    client = Client(threaded_services.target, threaded_services.target)
    stream = client.stream("abc", ENDLESS)
    next(stream)
    client.close()
    client.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        client.generate("x")
    with pytest.raises(EngineUnavailable, match="closed"):
        next(stream)


_CANCELLED = engine_pb2.FINISH_REASON_CANCELLED


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
