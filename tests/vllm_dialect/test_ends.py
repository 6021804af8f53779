"""Ends before the end: aborts, hang-ups, drains, a dead core; nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.engine_processes import EngineProcess, engine, eventually
from tests.fake_runners import DIE_ID, SLEEP_ID, VOCAB_SIZE, tokens_after
from tests.tiny_tokenizers import byte_tokenizer
from tests.vllm_dialect.calls import Call, complete, freed_within, refusal, request
from tests.vllm_dialect.conftest import MAX_NUM_SEQS

from millstream.rpc import errors


async def test_row_50_abort_in_every_state(
    channel: grpc.aio.Channel, stub: vllm_grpc.VllmEngineStub
) -> None:
    async def abort(*request_ids: str) -> None:
        await stub.Abort(vllm.AbortRequest(request_ids=request_ids), timeout=10)

    await abort("unknown")
    running = [
        Call(stub, request([10], request_id=f"running-{i}", max_tokens=200))
        for i in range(MAX_NUM_SEQS)
    ]
    for call in running:
        await call.until_token()
    waiting = Call(stub, request([10], request_id="waiting", max_tokens=200))
    await asyncio.sleep(0.05)
    await abort("waiting", "waiting", "running-0")
    aborted = await waiting.to_end()
    assert (aborted.finish_reason, list(aborted.output_ids)) == ("abort", [])
    ended = await running[0].to_end()
    assert ended.finish_reason == "abort"
    assert list(ended.output_ids) == tokens_after(10, len(ended.output_ids))
    await abort("waiting", "running-0")  # they are gone

    prefill = Call(stub, request([SLEEP_ID], request_id="prefill", max_tokens=200))
    await asyncio.sleep(0.1)
    await abort("prefill")
    assert (await prefill.to_end()).finish_reason == "abort"
    await abort(*(f"running-{i}" for i in range(MAX_NUM_SEQS)))
    for call in running[1:]:
        assert (await call.to_end()).finish_reason == "abort"
    assert await freed_within(channel, 2)
    assert (await complete(stub, [10], request_id="waiting", max_tokens=1)).output_ids == [11]


async def test_row_50_abort_while_the_tokenizer_loads(tmp_path: Path) -> None:
    """The first stop string loads it; here from a pipe, which holds the load up."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    with engine("--model", str(tmp_path)) as server:
        os.mkfifo(tmp_path / "tokenizer.json")
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = vllm_grpc.VllmEngineStub(channel)
            message = request("A", request_id="early", stop=["C"], max_tokens=50)
            early = asyncio.create_task(refusal(stub, message))
            left = Call(stub, request("A", stop=["C"], max_tokens=50))
            assert list((await complete(stub, [1], max_tokens=1)).output_ids) == [2]
            await asyncio.sleep(0.1)
            await stub.Abort(vllm.AbortRequest(request_ids=["early"]))
            left.call.cancel()
            late = Call(stub, request("A", stop=["C"], max_tokens=50))
            await asyncio.to_thread(
                (tmp_path / "tokenizer.json").write_text, byte_tokenizer().to_str()
            )
            assert isinstance(await early, errors.Cancelled)
            assert (await late.to_end()).matched_stop_str == "C"
            assert await freed_within(channel, 2)


async def test_abort_ends_every_sample(stub: vllm_grpc.VllmEngineStub) -> None:
    call = Call(stub, request([10], request_id="many", n=3, max_tokens=200))
    await call.until_token()
    await stub.Abort(vllm.AbortRequest(request_ids=["many"]))
    await call.to_end()
    assert [c.finish_reason for c in call.completes.values()] == ["abort"] * 3


async def test_two_requests_with_one_id(stub: vllm_grpc.VllmEngineStub) -> None:
    first = Call(stub, request([10], request_id="same", max_tokens=100))
    await first.until_token()
    error = await refusal(stub, request([20], request_id="same"))
    assert isinstance(error, errors.DuplicateHandle)
    assert error.field == "request_id"
    assert (await first.to_end()).finish_reason == "length"
    assert (await complete(stub, [20], request_id="same", max_tokens=1)).output_ids == [21]
    nameless = await asyncio.gather(*(complete(stub, [30], max_tokens=20) for _ in range(3)))
    assert [done.completion_tokens for done in nameless] == [20] * 3


async def test_row_3_a_client_that_hangs_up(
    channel: grpc.aio.Channel, stub: vllm_grpc.VllmEngineStub
) -> None:
    running = Call(stub, request([10], max_tokens=200))
    await running.until_token()
    prefill = Call(stub, request([SLEEP_ID], max_tokens=200))
    await asyncio.sleep(0.1)
    running.call.cancel()
    prefill.call.cancel()
    assert await freed_within(channel, 2)


async def test_random_traffic_leaves_nothing(
    channel: grpc.aio.Channel, stub: vllm_grpc.VllmEngineStub
) -> None:
    """Completions, stop strings, aborts and hang-ups mixed: each gets its own tokens."""
    rng = random.Random(0)

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() / 4)
        last = rng.randrange(32, 50)
        stop = [chr(0x21 + last + 3) + chr(0x21 + last + 4)] if rng.random() < 0.5 else []
        message = request(
            [7, last], request_id=f"{number}", stop=stop, max_tokens=rng.randint(1, 12),
            stream=rng.random() < 0.5, n=rng.choice([1, 1, 2]),
        )  # fmt: skip
        call = Call(stub, message)
        fate = rng.random()
        if fate < 0.15:
            await asyncio.sleep(rng.random() / 20)
            call.call.cancel()
            return
        if fate < 0.3:
            await stub.Abort(vllm.AbortRequest(request_ids=[f"{number}"]))
        await call.to_end()
        assert len(call.completes) == message.sampling_params.n
        for done in call.completes.values():
            assert list(done.output_ids) == tokens_after(last, len(done.output_ids))
            if done.finish_reason == "stop":
                assert done.matched_stop_str == stop[0] and len(done.output_ids) == 4
            if done.finish_reason == "length":
                assert len(done.output_ids) == message.sampling_params.max_tokens

    await asyncio.gather(*(one(number) for number in range(120)))
    assert await freed_within(channel, 2)


async def test_a_dead_core_ends_the_call_unavailable() -> None:
    with engine("--max-num-seqs", "2", runner="tests.fake_runners:scripted") as mortal:
        async with grpc.aio.insecure_channel(mortal.target) as channel:
            stub = vllm_grpc.VllmEngineStub(channel)
            call = Call(stub, request([10], max_tokens=4000))
            await call.until_token()
            error = await refusal(stub, request([DIE_ID]))
            assert isinstance(error, errors.EngineUnavailable)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.to_end()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("drain_timeout_s", "whole"), [("10", True), ("0.1", False)])
async def test_row_81_a_stopping_engine(drain_timeout_s: str, whole: bool) -> None:
    """What runs may end within the drain's time; what is new is for another engine."""
    server = EngineProcess(
        *("--max-num-seqs", "2", "--drain-timeout-s", drain_timeout_s),
        runner="tests.fake_runners:scripted",
    )
    server.wait_until_serving()
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = vllm_grpc.VllmEngineStub(channel)
        call = Call(stub, request([10], max_tokens=100))
        await call.until_token()
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))

        async def unhealthy() -> bool:
            return not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy

        assert await eventually(unhealthy, 5)
        assert isinstance(await refusal(stub, request([1])), errors.EngineUnavailable)
        if whole:
            assert list((await call.to_end()).output_ids) == tokens_after(10, 100)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.to_end()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, 10)
