"""Generate and Abort over a socket: tokens, stop strings, refusals, ends of every kind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.engine_processes import EngineProcess, engine, eventually
from tests.fake_runners import DIE_ID, EOS_TOKEN_ID, SLEEP_ID, VOCAB_SIZE, tokens_after
from tests.tiny_tokenizers import byte_ids, byte_tokenizer
from tests.vllm_dialect.calls import Call, complete, refusal, request
from tests.vllm_dialect.conftest import MAX_MODEL_LEN, MAX_NUM_SEQS

from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc


async def freed_within(channel: grpc.aio.Channel, seconds: float) -> bool:
    """Whether no sequence and no block is held, soon enough."""
    stub: Any = engine_pb2_grpc.EngineStub(channel)

    async def freed() -> bool:
        now = await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=10)
        return not (now.num_requests_running or now.num_requests_waiting or now.kv_blocks_used)

    return await eventually(freed, seconds)


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens(stub: vllm_grpc.VllmEngineStub, stream: bool) -> None:
    call = Call(stub, request([10, 20], stream=stream, max_tokens=5))
    done = await call.to_end()
    assert list(done.output_ids) == tokens_after(20, 5)
    assert (done.finish_reason, done.prompt_tokens, done.index) == ("length", 2, 0)
    assert bool(call.chunks) == stream


async def test_the_ends_that_the_engine_sees(stub: vllm_grpc.VllmEngineStub) -> None:
    at_eos = await complete(stub, [EOS_TOKEN_ID - 3])
    assert list(at_eos.output_ids) == tokens_after(EOS_TOKEN_ID - 3, 3)
    assert (at_eos.finish_reason, at_eos.WhichOneof("matched_stop")) == ("stop", None)
    past = await complete(stub, [EOS_TOKEN_ID - 3], ignore_eos=True, max_tokens=5)
    assert list(past.output_ids) == tokens_after(EOS_TOKEN_ID - 3, 5)
    at_id = await complete(stub, [10], stop_token_ids=[15], max_tokens=50)
    assert (at_id.finish_reason, at_id.matched_token_id) == ("stop", 15)
    at_limit = await complete(stub, [10] * (MAX_MODEL_LEN - 2))
    assert (at_limit.finish_reason, at_limit.completion_tokens) == ("length", 2)
    truncated = await complete(stub, [*range(500)], truncate_prompt_tokens=3, max_tokens=1)
    assert (truncated.prompt_tokens, *truncated.output_ids) == (3, 500)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stops", "expected", "matched"),
    [
        (["DEF"], "BCDEF", "DEF"),  # over three tokens
        (["XYZ", "D"], "BCD", "D"),
        (["CD", "BCDEX"], "BCD", "CD"),  # waits for an earlier start that does not come
        (["AB"], None, None),  # the prompt is no part of the text
        (["nope"], None, None),
    ],
)
async def test_rows_1_11_12_stop_strings(
    stub: vllm_grpc.VllmEngineStub,
    stream: bool,
    stops: list[str],
    expected: str | None,
    matched: str | None,
) -> None:
    done = await complete(stub, "A", stream=stream, stop=stops, max_tokens=20)
    text = byte_ids(expected) if expected else tokens_after(byte_ids("A")[0], 20)
    assert list(done.output_ids) == text
    assert done.finish_reason == ("stop" if matched else "length")
    assert done.matched_stop_str == (matched or "")


async def test_row_1_a_stop_string_frees_the_engine_at_once(
    channel: grpc.aio.Channel, stub: vllm_grpc.VllmEngineStub
) -> None:
    call = Call(stub, request("A", stop=["C"], max_tokens=200))
    started = time.monotonic()
    await call.to_end()
    assert await freed_within(channel, 0.3)
    assert time.monotonic() - started < 1, "200 tokens take a second"


async def test_stop_strings_wait_for_min_tokens(stub: vllm_grpc.VllmEngineStub) -> None:
    done = await complete(stub, "A", stop=["C", "FG"], min_tokens=3, max_tokens=20)
    assert list(done.output_ids) == byte_ids("BCDEFG")


async def test_special_tokens_are_text_unless_they_are_skipped(
    stub: vllm_grpc.VllmEngineStub,
) -> None:
    prompt, stop = [255], ["<|im_start|>"]  # then 256, 257: <|endoftext|>, <|im_start|>
    shown = await complete(stub, prompt, stop=stop, max_tokens=5)
    assert list(shown.output_ids) == [256, 257]
    skipped = await complete(stub, prompt, stop=stop, max_tokens=5, skip_special_tokens=True)
    assert len(skipped.output_ids) == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_samples(stub: vllm_grpc.VllmEngineStub, stream: bool) -> None:
    call = Call(stub, request([10], stream=stream, n=3, max_tokens=4))
    await call.to_end()
    assert sorted(call.completes) == [0, 1, 2]
    assert all(list(c.output_ids) == tokens_after(10, 4) for c in call.completes.values())


async def test_log_probabilities(stub: vllm_grpc.VllmEngineStub) -> None:
    call = Call(stub, request([10], logprobs=2, max_tokens=3))
    await call.to_end()
    for chunk in call.chunks:
        logprobs = chunk.output_logprobs
        assert list(logprobs.token_ids) == list(chunk.token_ids)
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(chunk.token_ids)
        assert all(len(top.values) == 2 for top in logprobs.top_logprobs)
    done = await complete(stub, [10, 11], stream=False, logprobs=0, prompt_logprobs=1, max_tokens=3)
    assert len(done.output_logprobs.token_logprobs) == 3
    assert not done.output_logprobs.top_logprobs
    assert list(done.input_logprobs.token_ids) == [10, 11]
    values = [one.HasField("value") for one in done.input_logprobs.token_logprobs]
    assert values == [False, True]


INVALID = errors.InvalidArgument
REFUSED_PARAMS: list[tuple[dict[str, Any], type[errors.MillstreamError]]] = [
    ({"temperature": math.nan}, INVALID),
    ({"top_p": -0.5}, INVALID),
    ({"min_p": math.inf}, INVALID),
    ({"max_tokens": 0}, INVALID),
    ({"min_tokens": 5, "max_tokens": 4}, INVALID),
    ({"logprobs": 21}, INVALID),
    ({"logprobs": -1}, errors.Unsupported),
    ({"stop": [""]}, INVALID),
    ({"stop_token_ids": [VOCAB_SIZE]}, INVALID),
    ({"logit_bias": {VOCAB_SIZE: 1}}, INVALID),
    ({"structural_tag": "{}"}, errors.Unsupported),
]


@pytest.mark.parametrize(("params", "kind"), REFUSED_PARAMS)
async def test_a_refused_parameter_is_named(
    stub: vllm_grpc.VllmEngineStub, params: dict[str, Any], kind: type[errors.MillstreamError]
) -> None:
    error = await refusal(stub, request([1], **params))
    assert type(error) is kind
    assert error.field == f"sampling_params.{next(iter(params))}"
    assert error.message.startswith(error.field)


@pytest.mark.parametrize(
    ("message", "kind", "field"),
    [
        (request([]), INVALID, "tokenized.input_ids"),
        (vllm.GenerateRequest(), INVALID, "tokenized.input_ids"),
        (request([VOCAB_SIZE]), INVALID, "tokenized.input_ids"),
        (request([1] * MAX_MODEL_LEN), errors.PromptTooLong, "tokenized.input_ids"),
        (vllm.GenerateRequest(text="hi"), errors.Unsupported, "text"),
    ],
)
async def test_a_refused_prompt_is_named(
    stub: vllm_grpc.VllmEngineStub,
    message: vllm.GenerateRequest,
    kind: type[errors.MillstreamError],
    field: str,
) -> None:
    error = await refusal(stub, message)
    assert type(error) is kind
    assert error.field == field


async def test_stop_strings_need_a_tokenizer() -> None:
    with engine("--max-num-seqs", "2") as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = vllm_grpc.VllmEngineStub(channel)
            error = await refusal(stub, request([1], stop=["a"]))
            assert isinstance(error, errors.NoTokenizer)
            assert error.field == "sampling_params.stop"
            assert list((await complete(stub, [1], max_tokens=2)).output_ids) == [2, 3]


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
