"""Message sizes, what large messages cost the others, and requests larger than the KV cache."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.engine_processes import Stream, connect, engine, submission
from tests.fake_runners import tokens_after
from tests.toy_runner import reference, toy_info, toy_request

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
            refusal = stream.refusal(1)
            assert isinstance(refusal, errors.InvalidArgument)  # read, and beyond the vocabulary
            assert stream.token_ids[2] == tokens_after(500, 3)
            stream.call.cancel()


async def test_row_24_too_large_is_a_clear_error() -> None:
    with engine("--max-message-bytes", str(2**22)) as server, engine() as default:
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


async def test_rows_5_and_6_what_never_fits_is_refused_and_blocks_nobody() -> None:
    """64 blocks of 4 tokens; prompt and output together need one slot less than tokens."""
    with engine("--max-model-len", "512", runner="tests.toy_runner:create") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(
                submission(1, [5] * 300),
                submission(2, [5] * 200, max_tokens=58, seed=0),
                submission(3, [5] * 200, max_tokens=57, seed=0),
                submission(4, [1, 2, 3, 4], max_tokens=4, seed=0),
            )
            await stream.until_ended(1, 2, 3, 4)
            for handle in (1, 2):
                refusal = stream.refusal(handle)
                assert isinstance(refusal, errors.NeverFits)
                assert refusal.retry_after_s is None, "it is of no use to come again"
            info = toy_info(max_model_len=512)
            for handle, prompt, max_tokens in ((3, [5] * 200, 57), (4, [1, 2, 3, 4], 4)):
                request = toy_request(handle, prompt, max_tokens=max_tokens)
                assert stream.token_ids[handle] == reference(request, info)[0]
            stream.call.cancel()
