"""Stream: handles in use, merging, order, bounds; each against what a naive reader would expect."""

from __future__ import annotations

import asyncio
import math
import random
import tracemalloc
from collections.abc import Sequence
from functools import partial

import pytest
from google.rpc import status_pb2

from millstream.engine.frontend.clients import Client
from millstream.engine.frontend.step_parts import StepPart
from millstream.engine.frontend.streams import (
    MAX_ACCEPTED_BYTES,
    MAX_ENDED_UNSENT,
    MAX_VALUES_PER_MESSAGE,
    Hold,
    Stream,
)
from millstream.engine.plan import TokenLogprobs
from millstream.engine.request import GrammarKind, GrammarSpec, Sampling
from millstream.engine.validation.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    resolved_sampling,
)
from millstream.engine.validation.structured_output import MAX_GRAMMAR_CHARS
from millstream.rpc.errors import EngineFault, EngineUnavailable
from millstream.rpc.options import LEAST_MAX_MESSAGE_BYTES
from millstream.v1 import engine_pb2


def accept(stream: Stream, handle: int) -> None:
    stream.accept(handle, None, partial(engine_pb2.Accepted, handle=handle))


def reject(stream: Stream, handle: int) -> None:
    stream.reject(engine_pb2.Rejected(handle=handle))


def finished(*handles: int) -> list[engine_pb2.Finished]:
    return [engine_pb2.Finished(handle=handle) for handle in handles]


def add_step(
    stream: Stream,
    handles: Sequence[int],
    token_ids: Sequence[int],
    ended: list[engine_pb2.Finished],
    logprobs: Sequence[TokenLogprobs | None] = (),
    prompt_logprobs: Sequence[tuple[int, list[TokenLogprobs]]] = (),
) -> None:
    stream.add_step(
        StepPart(list(handles), list(token_ids), ended, list(logprobs), list(prompt_logprobs))
    )


def scores(token_id: int, count: int = 2) -> TokenLogprobs:
    """Made up of the token; exact in float32."""
    ids = [token_id + i for i in range(count)]
    return TokenLogprobs(-float(token_id), ids, [-float(each) for each in ids])


def unpack(columns: engine_pb2.Logprobs) -> list[TokenLogprobs | None]:
    counts = columns.top_counts or [0] * len(columns.token_logprobs)
    ids, values = iter(columns.top_token_ids), iter(columns.top_logprobs)
    entries: list[TokenLogprobs | None] = []
    for logprob, count in zip(columns.token_logprobs, counts, strict=True):
        top = [(next(ids), next(values)) for _ in range(count)]
        entry = TokenLogprobs(logprob, [i for i, _ in top], [value for _, value in top])
        entries.append(None if math.isnan(logprob) else entry)
    assert next(ids, None) is next(values, None) is None
    return entries


async def take(stream: Stream) -> engine_pb2.GenerateResponse:
    async with asyncio.timeout(1):
        message = await stream.next()
    assert message is not None
    return message


async def nothing_comes(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await stream.next()
    except TimeoutError:
        return True
    return False


async def test_a_step_is_a_message() -> None:
    stream = Stream(1)
    accept(stream, 5)
    accept(stream, 6)
    add_step(stream, [5, 6], [50, 60], [])
    message = await take(stream)
    assert [accepted.handle for accepted in message.accepted] == [5, 6]
    assert list(message.output.handles) == [5, 6]
    assert list(message.output.token_ids) == [50, 60]
    assert list(message.output.counts) == []
    add_step(stream, [5], [51], finished(5))
    message = await take(stream)
    assert list(message.output.token_ids) == [51]
    assert [end.handle for end in message.finished] == [5]
    assert await nothing_comes(stream)


async def test_waiting_steps_merge_with_counts() -> None:
    stream = Stream(1)
    for handle in (1, 2, 3):
        accept(stream, handle)
    add_step(stream, [1, 2], [10, 20], [])
    add_step(stream, [2, 1], [21, 11], finished(2))
    add_step(stream, [1, 3], [12, 30], finished(1))
    message = await take(stream)
    assert list(message.output.handles) == [1, 2, 3]
    assert list(message.output.token_ids) == [10, 11, 12, 20, 21, 30]
    assert list(message.output.counts) == [3, 2, 1]
    assert [end.handle for end in message.finished] == [2, 1]


async def test_row_66_log_probabilities_are_parallel_to_the_ids_of_a_message() -> None:
    stream = Stream(1)
    for handle in (1, 2, 3):
        accept(stream, handle)
    add_step(stream, [1, 2], [10, 20], [])
    message = await take(stream)
    assert not message.output.HasField("logprobs"), "nobody asked"
    add_step(stream, [1, 2], [11, 21], [], [None, scores(21, 0)])
    message = await take(stream)
    assert unpack(message.output.logprobs) == [None, scores(21, 0)]
    assert not message.output.logprobs.top_counts
    # Three steps in one message, of which the first and the last know of none.
    add_step(stream, [1, 2], [12, 22], [])
    add_step(stream, [2, 1], [23, 13], [], [scores(23, 1), scores(13, 3)])
    add_step(stream, [1, 3], [14, 30], [])
    message = await take(stream)
    assert list(message.output.token_ids) == [12, 13, 14, 22, 23, 30]
    assert unpack(message.output.logprobs) == [
        None, scores(13, 3), None, None, scores(23, 1), None,
    ]  # fmt: skip


async def test_log_probabilities_of_a_prompt_come_in_pieces_before_its_tokens() -> None:
    stream = Stream(1)
    accept(stream, 1)
    accept(stream, 2)
    entries = [scores(i, 20) for i in range(8000)]
    add_step(stream, [2], [7], [], (), [(1, entries[:5000])])
    add_step(stream, [1, 2], [9, 8], finished(1), (), [(1, entries[5000:])])
    messages = [await take(stream) for _ in range(2)]
    assert all(message.ByteSize() < 2**20 for message in messages)
    assert [len(message.output.token_ids) for message in messages] == [0, 3]
    pieces = [piece for message in messages for piece in message.prompt_logprobs]
    assert [piece.handle for piece in pieces] == [1] * len(pieces)
    assert [each for piece in pieces for each in unpack(piece.logprobs)] == entries


async def test_merging_needs_no_counts_when_each_has_one_token() -> None:
    stream = Stream(1)
    accept(stream, 1)
    accept(stream, 2)
    add_step(stream, [1], [10], [])
    add_step(stream, [2], [20], [])
    assert list((await take(stream)).output.counts) == []


async def test_an_end_without_tokens() -> None:
    stream = Stream(1)
    accept(stream, 1)
    add_step(stream, [], [], finished(1))
    message = await take(stream)
    assert not message.HasField("output")
    assert [end.handle for end in message.finished] == [1]


async def test_many_accepted_requests_take_several_messages_and_precede_their_tokens() -> None:
    stream = Stream(1)
    handles = list(range(40))
    sampling = engine_pb2.SamplingParams(stop_token_ids=[1] * (MAX_ACCEPTED_BYTES // 16))
    made: list[int] = []

    def accepted(handle: int) -> engine_pb2.Accepted:
        made.append(handle)
        return engine_pb2.Accepted(handle=handle, sampling=sampling)

    for handle in handles:
        stream.accept(handle, None, partial(accepted, handle))
    assert not made, "row 32: of a client that never reads, gigabytes would wait"
    add_step(stream, handles, handles, finished(*handles), (), [(39, [scores(1)])])
    messages = [await take(stream)]
    assert made == handles[:16], "row 88: a large one takes 20 ms"
    messages += [await take(stream) for _ in range(2)]
    assert [len(message.accepted) for message in messages] == [16, 16, 8]
    assert [len(message.prompt_logprobs) for message in messages] == [0, 0, 1]
    assert [len(message.output.handles) for message in messages] == [0, 0, len(handles)]
    assert [len(message.finished) for message in messages] == [0, 0, len(handles)]
    assert await nothing_comes(stream)


async def test_a_message_with_the_largest_accepted_request_is_one_that_every_client_takes() -> None:
    """It names each id of Qwen3's vocabulary twice, comes behind many others, and before tokens."""
    vocabulary = range(151_936)
    largest = Sampling(
        max_tokens=1,
        seed=2**64 - 1,
        stop_token_ids=tuple(vocabulary[-MAX_STOP_TOKEN_IDS:]),
        logit_bias=tuple((token_id, 0.5) for token_id in vocabulary),
        allowed_token_ids=tuple(vocabulary),
        bad_words=(tuple(vocabulary[-MAX_BAD_WORD_TOKENS:]),) * MAX_BAD_WORDS,
        grammar=GrammarSpec(kind=GrammarKind.REGEX, text="\U0001f600" * MAX_GRAMMAR_CHARS),
    )
    stream = Stream(1)
    usual = resolved_sampling(Sampling(max_tokens=1, stop_token_ids=(1,) * 1000))
    count = MAX_ACCEPTED_BYTES // usual.ByteSize() - 10
    for handle in range(count):
        stream.accept(handle, None, partial(engine_pb2.Accepted, handle=handle, sampling=usual))
    sampling = resolved_sampling(largest)
    stream.accept(count, None, partial(engine_pb2.Accepted, handle=count, sampling=sampling))
    add_step(stream, [count] * 100, [7] * 100, finished(count))
    messages: list[engine_pb2.GenerateResponse] = []
    while not messages or not messages[-1].finished:
        messages.append(await take(stream))
    assert sum(len(message.accepted) for message in messages) == count + 1
    assert max(message.ByteSize() for message in messages) < LEAST_MAX_MESSAGE_BYTES
    assert len(messages[-1].accepted) == 0, "there is room for all that may come with tokens"


async def test_a_handle_is_in_use_until_its_end_is_taken() -> None:
    stream = Stream(1)
    accept(stream, 1)
    assert stream.is_live(1)
    add_step(stream, [1], [10], finished(1))
    assert not stream.is_live(1)
    assert stream.in_use(1), "a second request by this handle would share its message"
    reject(stream, 2)
    assert stream.in_use(2)
    await take(stream)
    assert not stream.in_use(1)
    assert not stream.in_use(2)


async def test_many_refusals_take_several_messages() -> None:
    """4608 with long texts were 10 MB, beyond what clients take by default: 4 MiB. A handle is in
    use until all that is said of it is sent."""
    stream = Stream(1)
    status = status_pb2.Status(message="x" * 1000)
    handles = [*range(MAX_ENDED_UNSENT), 0]  # the first one twice
    for handle in handles:
        stream.reject(engine_pb2.Rejected(handle=handle, status=status))
    accept(stream, 5000)
    add_step(stream, [5000], [7], finished(5000))
    told: list[int] = []
    while len(told) < len(handles):
        message = await take(stream)
        assert message.ByteSize() < 1.1 * MAX_ACCEPTED_BYTES
        told += [rejected.handle for rejected in message.rejected]
        assert stream.in_use(0) == (len(told) < len(handles))
        assert bool(message.finished) == (len(told) == len(handles))
    assert told == handles


async def test_refusing_a_duplicate_does_not_free_the_handle() -> None:
    stream = Stream(1)
    accept(stream, 1)
    reject(stream, 1)
    await take(stream)
    assert stream.is_live(1)
    # Its end waits behind a full message; a refusal leaves with the first.
    add_step(stream, [1] * MAX_VALUES_PER_MESSAGE, [7] * MAX_VALUES_PER_MESSAGE, [])
    add_step(stream, [1], [8], finished(1))
    reject(stream, 1)
    assert [refusal.handle for refusal in (await take(stream)).rejected] == [1]
    assert stream.in_use(1)
    await take(stream)
    assert not stream.in_use(1)


async def test_timers_end_with_their_requests() -> None:
    loop = asyncio.get_running_loop()
    stream = Stream(1)
    timers = [loop.call_later(60, print) for _ in range(2)]
    for handle, timer in enumerate(timers):
        stream.accept(handle, timer, partial(engine_pb2.Accepted, handle=handle))
    add_step(stream, [], [], finished(0))
    assert [timer.cancelled() for timer in timers] == [True, False]
    assert stream.close() == [1]
    assert timers[1].cancelled()


async def test_a_client_has_nothing_live_once_its_streams_are_closed() -> None:
    """One with an API key lives on with its other streams."""
    client = Client(1)
    stream, other = Stream(1, client), Stream(2, client)
    for handle in range(3):
        accept(stream, handle)
    accept(other, 0)
    add_step(stream, [], [], finished(2))
    task = asyncio.create_task(asyncio.sleep(60))
    stream.hold(9, Hold(task=task, timer=None, give_up=lambda error: None))
    assert client.num_live == 4
    stream.close()
    assert client.num_live == 1
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ends_with_ok_once_everything_is_sent() -> None:
    stream = Stream(1)
    accept(stream, 1)
    await take(stream)
    stream.end_when_idle(None)
    assert await nothing_comes(stream)
    add_step(stream, [1], [10], finished(1))
    stream.end_when_idle(EngineUnavailable("later calls do not count"))
    await take(stream)
    assert await stream.next() is None


async def test_ends_with_an_error_once_everything_is_sent() -> None:
    stream = Stream(1)
    accept(stream, 1)
    stream.end_when_idle(EngineUnavailable("stopping"))
    await take(stream)
    add_step(stream, [1], [10], finished(1))
    await take(stream)
    with pytest.raises(EngineUnavailable, match="stopping"):
        await stream.next()


async def test_fails_at_once() -> None:
    stream = Stream(1)
    accept(stream, 1)
    waiting = asyncio.create_task(Stream.next(stream))
    await waiting
    waiting = asyncio.create_task(Stream.next(stream))
    await asyncio.sleep(0)
    stream.fail(EngineFault("first"))
    stream.fail(EngineFault("second"))
    with pytest.raises(EngineFault, match="first"):
        await waiting


async def test_reading_waits_while_too_many_ends_are_unsent() -> None:
    stream = Stream(1)
    for handle in range(MAX_ENDED_UNSENT + 1):
        reject(stream, handle)
    room = asyncio.create_task(stream.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    await take(stream)
    async with asyncio.timeout(1):
        await room


Scored = tuple[int, TokenLogprobs | None]  # a token with its log probabilities; -1: the prompt's


class RandomSteps:
    """Steps of a few requests, whose handles are used again and again, for a stream."""

    def __init__(self, stream: Stream, rng: random.Random) -> None:
        self.sent: dict[tuple[int, int], list[Scored]] = {}  # by handle and how often it was used
        self._stream = stream
        self._rng = rng
        self._uses = dict.fromkeys(range(6), 0)

    def step(self) -> None:
        rng = self._rng
        prompts = [each for handle in self._uses if (each := self._begin(handle)) is not None]
        live_handles = self._stream.live_handles
        live = rng.sample(live_handles, rng.randint(0, len(live_handles)))
        tokens = [rng.randrange(2**24) for _ in live]
        entries = [
            scores(token) if handle % 2 else None
            for handle, token in zip(live, tokens, strict=True)
        ]
        for handle, token, entry in zip(live, tokens, entries, strict=True):
            self.sent[handle, self._uses[handle]].append((token, entry))
        ends = finished(*(h for h in live if rng.random() < 0.2))
        add_step(self._stream, live, tokens, ends, entries if any(entries) else (), prompts)

    def _begin(self, handle: int) -> tuple[int, list[TokenLogprobs]] | None:
        """Now and then a request, with what its prompt scored."""
        if self._stream.in_use(handle) or self._rng.random() >= 0.3:
            return None
        self._uses[handle] += 1
        accept(self._stream, handle)
        prompt = [scores(self._rng.randrange(100)) for _ in range(self._rng.choice([0, 0, 3]))]
        self.sent[handle, self._uses[handle]] = [(-1, entry) for entry in prompt]
        return handle, prompt


class Reader:
    """Reads messages; a request's parts must come in order: accepted, tokens, the end."""

    def __init__(self) -> None:
        self.got: dict[tuple[int, int], list[Scored]] = {}  # as RandomSteps.sent
        self._begun = dict.fromkeys(range(6), 0)
        self._ended = set(range(6))

    def read(self, message: engine_pb2.GenerateResponse) -> None:
        for accepted in message.accepted:
            assert accepted.handle in self._ended
            self._ended.discard(accepted.handle)
            self._begun[accepted.handle] += 1
            self.got[accepted.handle, self._begun[accepted.handle]] = []
        for piece in message.prompt_logprobs:
            self._of(piece.handle).extend((-1, entry) for entry in unpack(piece.logprobs))
        self._read_tokens(message.output)
        for end in message.finished:
            assert end.handle not in self._ended
            self._ended.add(end.handle)

    def _read_tokens(self, output: engine_pb2.StepOutput) -> None:
        counts = output.counts or [1] * len(output.handles)
        entries = [None] * len(output.token_ids)
        if output.HasField("logprobs"):
            entries = unpack(output.logprobs)
        token_ids = iter(zip(output.token_ids, entries, strict=True))
        for handle, count in zip(output.handles, counts, strict=True):
            self._of(handle).extend([next(token_ids) for _ in range(count)])
        assert next(token_ids, None) is None

    def _of(self, handle: int) -> list[Scored]:
        assert handle not in self._ended
        return self.got[handle, self._begun[handle]]


@pytest.mark.parametrize("seed", range(20))
async def test_random_steps_and_readers(seed: int) -> None:
    """Whatever the reader's pace: every token once and in order, accepted before tokens before the
    end, and no message with two requests of one handle."""
    rng = random.Random(seed)
    stream = Stream(1)
    steps, reader = RandomSteps(stream, rng), Reader()
    for _ in range(200):
        steps.step()
        while rng.random() < 0.4 and not await nothing_comes_now(stream):
            reader.read(await take(stream))
    add_step(stream, [], [], finished(*stream.live_handles))
    stream.end_when_idle(None)
    while (message := await stream.next()) is not None:
        reader.read(message)
    assert reader.got == steps.sent
    assert not any(stream.in_use(handle) for handle in range(6))


async def nothing_comes_now(stream: Stream) -> bool:
    return not (stream._accepted or stream._rejected or stream._waiting)


async def test_row_32_what_waits_is_small() -> None:
    stream = Stream(1)
    accept(stream, 1)
    tracemalloc.start()
    for token_id in range(200_000):
        add_step(stream, [1], [token_id], [])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 200_000 * 12, f"{used / 200_000:.1f} bytes a token"
    token_ids: list[int] = []
    while len(token_ids) < 200_000:
        message = await take(stream)
        assert message.ByteSize() < 2**20
        token_ids += message.output.token_ids
    assert token_ids == list(range(200_000))


async def test_row_32_what_waits_with_log_probabilities_is_small() -> None:
    """33 numbers a token here, 4 bytes each, and an array's room to grow."""
    stream = Stream(1)
    accept(stream, 1)
    entries = [scores(1, 16)]
    tracemalloc.start()
    for token_id in range(20_000):
        add_step(stream, [1], [token_id], [], entries)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 20_000 * 220, f"{used / 20_000:.1f} bytes a token"
    got = 0
    while got < 20_000:
        message = await take(stream)
        assert message.ByteSize() < 2**20
        assert len(unpack(message.output.logprobs)) == len(message.output.token_ids)
        got += len(message.output.token_ids)
