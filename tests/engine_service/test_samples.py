"""n > 1 through gRPC: consecutive handles, seeds, one fate each."""

from __future__ import annotations

from tests.engine_fixtures import engine_fixture, stub_fixture
from tests.engine_processes import Stream, connect, engine, submission
from tests.fake_runners import tokens_after
from tests.toy_runner import reference, toy_info, toy_request

from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED
DEADLINE = engine_pb2.FINISH_REASON_DEADLINE
PROMPT = list(range(11))  # 2 full blocks of 4
SLOTS, QUEUE = 8, 8


# Its tokens are a function of the prompt and the seed.
server = engine_fixture("tests.toy_runner:create", slots=SLOTS, queued=QUEUE)
slow_server = engine_fixture("tests.fake_runners:paced", slots=SLOTS, queued=QUEUE)
stub = stub_fixture("server")
slow = stub_fixture("slow_server")


def tokens_of(seed: int) -> list[int]:
    return reference(toy_request(0, PROMPT, max_tokens=6, seed=seed), toy_info())[0]


async def test_consecutive_handles_seeds_and_shared_blocks(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(stub)
    ask = submission(10, PROMPT, max_tokens=6, n=4, seed=7)
    ask.request_id, ask.cache_salt = "mine", "fresh"
    await stream.submit(ask, submission(14, PROMPT, max_tokens=6, seed=9))
    await stream.until_ended(*range(10, 15))
    for sample, handle in enumerate(range(10, 14)):
        accepted = stream.accepted[handle]
        assert (accepted.request_id, accepted.sampling.n) == ("mine", 4)
        assert accepted.sampling.seed == 7 + sample
        assert stream.token_ids[handle] == tokens_of(7 + sample)
    assert stream.token_ids[14] == stream.token_ids[12], "a sample is what its seed gives alone"
    assert len({tuple(stream.token_ids[handle]) for handle in range(10, 14)}) == 4
    cached = [stream.finished[handle].usage.cached_tokens for handle in range(10, 14)]
    assert cached == [0, 8, 8, 8]
    stream.call.cancel()


async def test_samples_without_a_seed_get_consecutive_ones(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(stub)
    await stream.submit(submission(1, n=3, max_tokens=2))
    await stream.until_ended(1, 2, 3)
    seeds = [stream.accepted[handle].sampling.seed for handle in (1, 2, 3)]
    assert seeds == [(seeds[0] + i) % 2**64 for i in range(3)]
    stream.call.cancel()


async def test_without_a_prefix_cache_the_outputs_are_the_same() -> None:
    with engine("--no-prefix-caching", runner="tests.toy_runner:create") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(10, PROMPT, max_tokens=6, n=4, seed=7))
            await stream.until_ended(*range(10, 14))
            assert [stream.token_ids[10 + i] for i in range(4)] == [
                tokens_of(7 + i) for i in range(4)
            ]
            assert not any(end.usage.cached_tokens for end in stream.finished.values())
            stream.call.cancel()


async def test_cancelling_one_sample_leaves_the_others(slow: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(slow)
    await stream.submit(submission(1, [10], n=4, max_tokens=60))
    await stream.until_token(1, 2, 3, 4)
    await stream.cancel(2)
    await stream.until_ended(1, 2, 3, 4)
    assert stream.finished[2].reason == CANCELLED
    assert len(stream.token_ids[2]) < 60
    for handle in (1, 3, 4):
        assert stream.token_ids[handle] == tokens_after(10, 60)
    stream.call.cancel()


async def test_a_handle_in_use_refuses_all_samples(slow: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(slow)
    await stream.submit(
        submission(12, [10], max_tokens=60),
        submission(10, [10], n=4),
        submission(9, [10], n=3, max_tokens=1),  # 9, 10, 11: 10 is refused and used no more
        submission(11, [10], n=2, max_tokens=1),
    )
    await stream.until_ended(9, 10, 11, 12)
    for handle, taken in ((10, 12), (11, 12)):
        refusal = stream.refusal(handle)
        assert isinstance(refusal, errors.DuplicateHandle)
        assert str(taken) in refusal.message
    assert len(stream.token_ids[12]) == 60, "the live one goes on"
    stream.call.cancel()


async def test_bad_counts_and_handles(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    last = 2**32 - 1
    await stream.submit(
        submission(1, n=0),
        submission(2, n=129),
        submission(3, n=last),
        submission(last - 1, n=2, max_tokens=1),
        submission(4, n=SLOTS + QUEUE + 1),
    )
    await stream.until_ended(1, 2, 3, 4)
    for handle in (1, 2, 3):
        assert isinstance(stream.refusal(handle), errors.InvalidArgument)
        assert stream.refusal(handle).field == "sampling.n"
    refusal = stream.refusal(4)
    assert isinstance(refusal, errors.NeverFits), "more than there are places"
    assert refusal.retry_after_s is None
    await stream.until_ended(last - 1, last)
    assert len(stream.token_ids[last]) == 1
    stream.forget(last)
    await stream.submit(submission(last, n=2))
    await stream.until_ended(last)
    assert isinstance(stream.refusal(last), errors.InvalidArgument)
    assert stream.refusal(last).field == "handle"
    stream.call.cancel()


async def test_each_sample_has_the_deadline(slow: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(slow)
    await stream.submit(submission(1, [10], n=3, timeout_ms=100))
    await stream.until_ended(1, 2, 3)
    assert [stream.finished[handle].reason for handle in (1, 2, 3)] == [DEADLINE] * 3
    stream.call.cancel()
