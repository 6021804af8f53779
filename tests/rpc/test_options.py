"""Options of servers and channels, as a pair."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.engine_processes import engine

from millstream.rpc import options
from millstream.rpc.health import Health
from millstream.rpc.options import Options, address, channel_options, is_local, server_options


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.1.2.3:1", True),
        ("[::1]:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:localhost:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/tmp/socket", True),
        ("unix-abstract:name", True),
        ("example.org:50051", False),
        ("10.0.0.1:50051", False),
        ("localhost.example.org:1", False),
    ],
)
def test_http_proxy_does_not_capture_local_targets(target: str, local: bool) -> None:
    assert is_local(target) == local
    assert (("grpc.enable_http_proxy", 0) in channel_options(target)) == local


def test_row_24_both_sides_have_the_same_bounded_limit() -> None:
    server, channel = dict(server_options()), dict(channel_options("localhost:1"))
    names = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    limits = {options[name] for options in (server, channel) for name in names}
    assert limits == {64 * 2**20}
    assert dict(server_options(5))[names[0]] == dict(channel_options("a:1", 5))[names[1]] == 5


def test_row_86_what_clients_ping_servers_allow() -> None:
    server, channel = dict(server_options()), dict(channel_options("localhost:1"))
    allowed = int(server["grpc.http2.min_ping_interval_without_data_ms"])
    assert int(channel["grpc.keepalive_time_ms"]) > allowed
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.http2.max_ping_strikes"] == 0


async def test_row_86_even_an_eager_client_is_not_sent_away() -> None:
    """A client pings an idle stream as often as it can, once a second: gRPC's default server sends
    it away at the third ping, ours does not."""

    async def sent_away(options: Options) -> bool:
        server = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(Health(()), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        eager = [
            ("grpc.keepalive_time_ms", 100),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=eager) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await asyncio.sleep(4)
            away = watch.done()
            watch.cancel()
        await server.stop(0)
        return bool(away)

    assert await asyncio.gather(sent_away(server_options()), sent_away([])) == [False, True]


async def test_a_service_that_answers_no_ping_is_lost_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is suspended, and its kernel holds the connection: gRPC's own limit is a minute."""
    monkeypatch.setattr(options, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(options, "KEEPALIVE_TIMEOUT_MS", 1000)
    with engine() as suspended:
        target = suspended.target
        async with grpc.aio.insecure_channel(target, options=channel_options(target)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            suspended.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(10):
                    with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                        await watch.read()
            finally:
                suspended.process.send_signal(signal.SIGCONT)


async def test_row_23_a_second_server_cannot_have_the_port() -> None:
    first = grpc.aio.server(options=server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    second = grpc.aio.server(options=server_options())
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(0)


def test_addresses_are_targets() -> None:
    assert address("127.0.0.1", 5) == "127.0.0.1:5"
    assert address("::1", 5) == "[::1]:5"
    assert is_local(address("::1", 5))


async def test_row_82_thousands_of_calls_at_once_are_all_answered() -> None:
    """gRPC's default server resets calls at random while more than 1000 wait to be looked at: a
    client hears CANCELLED, or INTERNAL."""

    async def num_lost(options: Options) -> int:
        server = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(Health(()), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            calls = [check(health_pb2.HealthCheckRequest()) for _ in range(4000)]
            codes = [await call.code() for call in calls]
        await server.stop(0)
        return sum(code is not grpc.StatusCode.OK for code in codes)

    assert await num_lost(server_options()) == 0
    assert await num_lost([]) > 0, "gRPC does not do so any more"
