"""Generate, GetEngineInfo and GetStats against one real engine process with a fake runner."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.engine_processes import EngineProcess, Stream, connect, engine, eventually, submission
from tests.fake_runners import EOS_TOKEN_ID, VOCAB_SIZE, tokens_after

from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc

MAX_MODEL_LEN = 512
STOP, LENGTH = engine_pb2.FINISH_REASON_STOP, engine_pb2.FINISH_REASON_LENGTH
OK = grpc.StatusCode.OK


@pytest.fixture(scope="module")
def server() -> Iterator[EngineProcess]:
    with engine("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64") as started:
        yield started


@pytest.fixture
async def stub(server: EngineProcess) -> AsyncIterator[engine_pb2_grpc.EngineStub]:
    async with connect(server.target) as connected:
        yield connected
        stats = await connected.GetStats(engine_pb2.GetStatsRequest())
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        assert stats.kv_blocks_used == 0


async def test_ready_tells_what_get_engine_info_tells(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.read()
    info = (await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())).engine
    assert stream.ready == info
    assert (info.api_version, info.model) == ("v1", "tests.fake_runners:echo")
    assert (info.vocab_size, list(info.eos_token_ids)) == (VOCAB_SIZE, [EOS_TOKEN_ID])
    assert (info.max_model_len, info.limits.max_num_seqs) == (MAX_MODEL_LEN, 64)
    assert info.limits.max_message_bytes == 64 * 2**20
    assert info.server_version
    stream.call.cancel()


async def test_a_request_from_submission_to_finish(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(submission(7, [10, 20], max_tokens=3, temperature=0))
    await stream.call.done_writing()
    assert (await stream.status())[0] is OK
    assert stream.token_ids == {7: [21, 22, 23]}
    finished = stream.finished[7]
    assert (finished.reason, finished.HasField("status")) == (LENGTH, False)
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (2, 3)
    assert 0 < finished.timings.first_token_s < 5
    assert stream.accepted[7].request_id


async def test_row_02_unset_is_not_zero(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(
        submission(1),
        submission(2, temperature=0.0),
        submission(3, seed=0),
        submission(4),
    )
    await stream.until_ended(1, 2, 3, 4)
    unset = stream.accepted[1].sampling
    assert (unset.temperature, unset.top_p, unset.repetition_penalty) == (1, 1, 1)
    assert unset.max_tokens == MAX_MODEL_LEN - 3
    assert unset.top_k == 0
    assert stream.accepted[2].sampling.temperature == 0
    assert stream.accepted[3].sampling.seed == 0
    assert stream.accepted[4].sampling.seed != unset.seed
    stream.call.cancel()


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 40])
async def test_row_10_no_token_is_lost_or_doubled(
    stub: engine_pb2_grpc.EngineStub, max_tokens: int
) -> None:
    stream = Stream(stub)
    to_eos = EOS_TOKEN_ID - 4  # three tokens, then EOS
    await stream.submit(
        submission(1, [50], max_tokens=max_tokens), submission(2, [to_eos], max_tokens=max_tokens)
    )
    await stream.until_ended(1, 2)
    assert stream.token_ids[1] == tokens_after(50, max_tokens)
    assert stream.token_ids[2] == tokens_after(to_eos, min(max_tokens, 4))
    assert stream.finished[2].reason == (STOP if max_tokens >= 4 else LENGTH)
    if max_tokens >= 4:
        assert stream.finished[2].stop_token_id == EOS_TOKEN_ID
    for message in stream.messages:
        for finished in message.finished:
            assert finished.handle in message.output.handles, "last tokens come with the end"
    stream.call.cancel()


@pytest.mark.parametrize(
    ("token_ids", "kind"),
    [
        ([VOCAB_SIZE], errors.InvalidArgument),
        ([1, 2**31 - 1], errors.InvalidArgument),
        ([], errors.InvalidArgument),
        ([1] * MAX_MODEL_LEN, errors.PromptTooLong),
    ],
)
async def test_rows_17_19_20_a_bad_prompt_is_refused_alone(
    stub: engine_pb2_grpc.EngineStub,
    token_ids: list[int],
    kind: type[errors.MillstreamError],
) -> None:
    stream = Stream(stub)
    good = submission(2, [VOCAB_SIZE - 1], max_tokens=4, ignore_eos=True)
    await stream.submit(submission(1, token_ids), good)
    await stream.until_ended(1, 2)
    refusal = stream.refusal(1)
    assert type(refusal) is kind
    assert refusal.field == "token_ids"
    assert stream.token_ids == {2: [0, 1, 2, 3]}
    stream.call.cancel()


async def test_row_20_the_context_limit(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    for prompt_len, room in ((MAX_MODEL_LEN - 1, 1), (MAX_MODEL_LEN - 2, 2)):
        prompt = [1] * prompt_len
        await stream.submit(
            submission(1, prompt, max_tokens=1), submission(2, prompt, max_tokens=5)
        )
        await stream.until_ended(1, 2)
        assert len(stream.token_ids[1]) == 1
        assert len(stream.token_ids[2]) == room
        assert stream.accepted[2].sampling.max_tokens == room
        assert stream.finished[2].reason == LENGTH
        stream.forget(1)
        stream.forget(2)
    stream.call.cancel()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_row_18_floats_are_finite(stub: engine_pb2_grpc.EngineStub, value: float) -> None:
    fields = [
        *("temperature", "top_p", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ]
    stream = Stream(stub)
    await stream.submit(
        submission(99, [5], max_tokens=50),
        *(submission(i, **{name: value}) for i, name in enumerate(fields)),
    )
    await stream.until_ended(99, *range(len(fields)))
    for i, name in enumerate(fields):
        refusal = stream.refusal(i)
        assert isinstance(refusal, errors.InvalidArgument)
        assert refusal.field == f"sampling.{name}"
    assert stream.token_ids[99] == tokens_after(5, 50)
    stream.call.cancel()


async def test_rows_61_and_63_max_tokens_and_stop_ids(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(
        submission(1, max_tokens=0),
        submission(2, max_tokens=1),
        submission(3, max_tokens=10**6),
        submission(4, stop_token_ids=[VOCAB_SIZE], min_tokens=1),
        submission(5, [10], stop_token_ids=[15], max_tokens=50),
        submission(6, [10], stop_token_ids=[12], min_tokens=5, max_tokens=8),
    )
    await stream.until_ended(1, 2, 3, 4, 5, 6)
    assert stream.refusal(1).field == "sampling.max_tokens"
    assert len(stream.token_ids[2]) == 1
    assert stream.accepted[3].sampling.max_tokens == MAX_MODEL_LEN - 3
    assert stream.refusal(4).field == "sampling.stop_token_ids"
    assert stream.token_ids[5] == [11, 12, 13, 14, 15]
    assert (stream.finished[5].reason, stream.finished[5].stop_token_id) == (STOP, 15)
    assert stream.token_ids[6] == tokens_after(10, 8)  # past 12, which min_tokens forbids as stop
    stream.call.cancel()


async def test_rows_66_and_67_log_probabilities_line_up(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    """Message by message; of a prompt no later than the first token. What a request that asked
    beside others that did not gets is what the fake runner makes up of its tokens."""
    stream = Stream(stub)
    await stream.submit(
        submission(1, [10], max_tokens=40, logprobs=2),
        submission(2, [20], max_tokens=40),
        submission(3, [*range(30, 60)], max_tokens=5, prompt_logprobs=1),
    )
    await stream.until_ended(1, 2, 3)
    of: dict[int, list[float]] = {1: [], 2: [], 3: []}
    of_prompt: list[float] = []
    for message in stream.messages:
        output = message.output
        for piece in message.prompt_logprobs:
            assert piece.handle == 3 and not of[3], "late"
            of_prompt += piece.logprobs.token_logprobs
            assert list(piece.logprobs.top_counts) == [1] * len(piece.logprobs.token_logprobs)
        if not output.HasField("logprobs"):
            assert 1 not in output.handles
            continue
        columns = output.logprobs
        assert len(columns.token_logprobs) == len(output.token_ids)
        assert sum(columns.top_counts) == len(columns.top_token_ids) == len(columns.top_logprobs)
        logprobs = iter(columns.token_logprobs)
        for handle, count in zip(
            output.handles, output.counts or [1] * len(output.handles), strict=True
        ):
            of[handle] += [next(logprobs) for _ in range(count)]
    assert of[1] == [-i / 16 for i in tokens_after(10, 40)]
    assert all(map(math.isnan, of[2] + of[3]))
    assert of_prompt == [-i / 16 for i in range(31, 60)]
    stream.call.cancel()


async def test_unsupported_fields_are_refused_never_ignored(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(stub)
    await stream.submit(submission(1, stop=["b"]), submission(2, include_stop=True))
    await stream.until_ended(1, 2)
    for handle in (1, 2):
        assert isinstance(stream.refusal(handle), errors.Unsupported)
    stream.call.cancel()


async def test_duplicate_handles(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(submission(1, [10], max_tokens=200), submission(1, [20]))
    await stream.until_ended(1)
    assert isinstance(stream.refusal(1), errors.DuplicateHandle)
    while 1 not in stream.finished:
        await stream.read()
    assert stream.token_ids[1] == tokens_after(10, 200), "the live request goes on"
    stream.forget(1)
    await stream.submit(submission(1, [20], max_tokens=2))  # finished: free again
    await stream.until_ended(1)
    assert stream.token_ids[1] == [21, 22]
    stream.call.cancel()


async def test_row_84_half_close(stub: engine_pb2_grpc.EngineStub) -> None:
    empty = Stream(stub)
    await empty.call.done_writing()
    assert (await empty.status())[0] is OK
    assert len(empty.messages) == 1

    stream = Stream(stub)
    await stream.submit(submission(1, [10], max_tokens=300))
    await stream.until_token(1)
    await stream.submit(submission(2, [20], max_tokens=300))
    await stream.call.done_writing()
    assert (await stream.status())[0] is OK
    assert stream.token_ids == {1: tokens_after(10, 300), 2: tokens_after(20, 300)}


async def test_half_close_right_after_a_refusal(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(submission(1, []))
    await stream.call.done_writing()
    assert (await stream.status())[0] is OK
    assert 1 in stream.rejected


async def test_ten_thousand_submissions_on_one_stream(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    count = 10_000
    await stream.submit(*(submission(i, [i % 900], max_tokens=2) for i in range(count)))
    await stream.call.done_writing()
    assert (await stream.status(timeout_s=60))[0] is OK
    assert len(stream.finished) == count
    assert all(stream.token_ids[i] == tokens_after(i % 900, 2) for i in range(count))
    assert list(stream.accepted) == list(range(count)), "accepted in order of submission"


async def test_row_82_two_hundred_streams_and_as_many_watches(
    server: EngineProcess, stub: engine_pb2_grpc.EngineStub
) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    streams = [Stream(stub) for _ in range(200)]
    async with grpc.aio.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(200)]
        for watch in watches:
            assert (await watch.read()).status == serving
        for number, stream in enumerate(streams):
            await stream.submit(submission(number, [number], max_tokens=20))
        for number, stream in enumerate(streams):
            await stream.until_ended(number)
            assert stream.token_ids == {number: tokens_after(number, 20)}
        stats = await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=5)
        assert stats.open_streams == 200
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == serving
    for stream in streams:
        await stream.call.done_writing()
        assert (await stream.status())[0] is OK


async def test_stats_count_what_happened(stub: engine_pb2_grpc.EngineStub) -> None:
    before = await stub.GetStats(engine_pb2.GetStatsRequest())
    stream = Stream(stub)
    await stream.submit(submission(1, max_tokens=10))
    await stream.until_ended(1)
    during = await stub.GetStats(engine_pb2.GetStatsRequest())
    assert during.open_streams >= 1
    assert during.generation_tokens - before.generation_tokens == 10
    assert during.requests_finished - before.requests_finished == 1
    assert during.messages_sent > before.messages_sent
    await stream.call.done_writing()
    await stream.status()

    async def none_is_open() -> bool:
        return (await stub.GetStats(engine_pb2.GetStatsRequest())).open_streams == 0

    assert await eventually(none_is_open, 5)


async def test_garbage_ends_one_stream_with_a_status(server: EngineProcess) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = channel.stream_stream("/millstream.v1.Engine/Generate")()
        await call.write(b"\xff\xff\xff")
        await call.read()  # Ready
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with connect(server.target) as stub:
        await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=5)
