"""Message sizes and what large messages cost the others."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.engine_processes import Stream, connect, engine, submission
from tests.fake_runners import tokens_after

from millstream.rpc import errors


async def test_row_24_a_prompt_beyond_grpcs_default_limit() -> None:
    """1.4 M ids of 3 bytes are more than 4 MiB; answers are split long before such sizes."""
    with engine("--max-model-len", "2100000", "--max-num-batched-tokens", "524288") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(
                submission(1, [151643] * 1_400_000),
                submission(2, [500] * 2_000_000, max_tokens=3),
            )
            await stream.until_ended(1, 2)
            refusal = errors.from_status(stream.rejected[1].status)
            assert isinstance(refusal, errors.InvalidArgument)  # read, and beyond the vocabulary
            assert stream.token_ids[2] == tokens_after(500, 3)
            stream.call.cancel()


async def test_row_24_too_large_is_a_clear_error() -> None:
    with engine("--max-message-bytes", str(2**20)) as server, engine() as default:
        for target in (server.target, default.target):
            async with connect(target, max_message_bytes=2**30) as stub:
                stream = Stream(stub)
                await stream.read()
                assert stream.ready is not None
                limit = stream.ready.limits.max_message_bytes
                large = submission(1, [1])
                large.cache_salt = "x" * limit
                await stream.submit(large)
                code, details = await stream.status()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(limit) in details
                again = Stream(stub)  # the connection goes on
                await again.submit(submission(1, [10], max_tokens=1))
                await again.until_ended(1)
                again.call.cancel()


async def test_row_88_health_answers_while_a_million_ids_are_read() -> None:
    flags = ["--max-model-len", "1100000", "--max-num-seqs", "2"]
    with engine(*flags, "--max-num-batched-tokens", "262144") as server:
        large = submission(1, [900] * 1_000_000, max_tokens=3)
        async with (
            connect(server.target) as stub,
            grpc.aio.insecure_channel(server.target) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            stream = Stream(stub)
            await stream.submit(large)
            reading = asyncio.create_task(stream.until_ended(1))
            slowest_s = 0.0
            while not reading.done():
                began = time.monotonic()
                await health.Check(health_pb2.HealthCheckRequest())
                slowest_s = max(slowest_s, time.monotonic() - began)
                await asyncio.sleep(0.005)
            await reading
            assert stream.token_ids[1] == tokens_after(900, 3)
            assert slowest_s < 1.5, "measured: 0.13 s on an idle machine"
            stream.call.cancel()
