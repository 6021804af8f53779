"""The engine's messages as vLLM's: chunks, completions, stop strings, log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from tests.tiny_tokenizers import byte_ids, byte_tokenizer

from millstream.engine.vllm_dialect.generation import Generation
from millstream.rpc import errors
from millstream.tokenizer.decoding import Decoding
from millstream.tokenizer.detokenizer import Detokenizer
from millstream.v1 import engine_pb2

STOP = engine_pb2.FINISH_REASON_STOP
LENGTH = engine_pb2.FINISH_REASON_LENGTH
CANCELLED = engine_pb2.FINISH_REASON_CANCELLED
DECODING = Decoding(byte_tokenizer())
PROMPT = [7, 8, 9]
EOS = 2


def generation(
    *, stream: bool = True, stops: Sequence[str] = (), logprobs: bool = False,
    prompt_logprobs: bool = False, min_tokens: int = 0,
) -> Generation:  # fmt: skip
    def detokenizer() -> Detokenizer:
        decoder = DECODING.text_decoder(skip_special_tokens=True)
        return Detokenizer(decoder, stops=stops, min_tokens=min_tokens)

    return Generation(
        PROMPT,
        stream=stream,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        eos_token_ids=[EOS],
        detokenizer=detokenizer if stops else None,
    )


def output(*token_ids: int, handle: int = 0) -> engine_pb2.GenerateResponse:
    columns = engine_pb2.StepOutput(handles=[handle], token_ids=token_ids, counts=[len(token_ids)])
    return engine_pb2.GenerateResponse(output=columns)


def finished(
    reason: engine_pb2.FinishReason.ValueType, *, handle: int = 0, stop_token_id: int | None = None
) -> engine_pb2.GenerateResponse:
    end = engine_pb2.Finished(
        handle=handle,
        reason=reason,
        stop_token_id=stop_token_id,
        usage=engine_pb2.Usage(prompt_tokens=3, cached_tokens=2, output_tokens=99),
    )
    return engine_pb2.GenerateResponse(finished=[end])


def run(
    generation: Generation, *messages: engine_pb2.GenerateResponse
) -> tuple[list[vllm.GenerateStreamChunk], list[vllm.GenerateComplete], list[int]]:
    chunks, completes, stopped = [], [], []
    for message in messages:
        for answer in generation.take(message):
            if answer.HasField("chunk"):
                chunks.append(answer.chunk)
            else:
                completes.append(answer.complete)
        stopped += generation.stopped
    return chunks, completes, stopped


def test_a_stream_sends_chunks_then_all_of_it() -> None:
    chunks, completes, _ = run(generation(), output(5), output(6, 7), finished(LENGTH))
    assert [list(chunk.token_ids) for chunk in chunks] == [[5], [6, 7]]
    assert [chunk.completion_tokens for chunk in chunks] == [1, 2]
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    (complete,) = completes
    assert list(complete.output_ids) == [5, 6, 7]
    assert (complete.completion_tokens, complete.prompt_tokens) == (3, 3)
    assert (complete.cached_tokens, complete.finish_reason) == (2, "length")
    assert complete.WhichOneof("matched_stop") is None


def test_without_stream_only_the_end_is_sent() -> None:
    chunks, (complete,), _ = run(generation(stream=False), output(5), output(6), finished(LENGTH))
    assert chunks == []
    assert list(complete.output_ids) == [5, 6]


@pytest.mark.parametrize(("stop_token_id", "matched"), [(EOS, None), (6, 6)])
def test_a_stop_token_is_told_and_eos_is_not(stop_token_id: int, matched: int | None) -> None:
    _, (complete,), _ = run(
        generation(), output(5, stop_token_id), finished(STOP, stop_token_id=stop_token_id)
    )
    assert complete.finish_reason == "stop"
    found = complete.matched_token_id if complete.HasField("matched_token_id") else None
    assert found == matched


@pytest.mark.parametrize("stream", [True, False])
def test_row_1_a_stop_string_ends_the_sample_and_what_follows_is_dropped(stream: bool) -> None:
    ids = byte_ids("abcdef")
    subject = generation(stream=stream, stops=["bcd"])
    chunks, (complete,), stopped = run(
        subject, *(output(token_id) for token_id in ids), finished(CANCELLED)
    )
    assert stopped == [0], "told once, so that the engine is told"
    assert list(complete.output_ids) == ids[:4]
    assert complete.completion_tokens == 4
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "bcd")
    assert [t for chunk in chunks for t in chunk.token_ids] == (ids[:4] if stream else [])


@pytest.mark.parametrize("reason", [LENGTH, STOP, CANCELLED])
def test_a_stop_string_wins_over_what_ended_the_engines_part(
    reason: engine_pb2.FinishReason.ValueType,
) -> None:
    both = output(*byte_ids("ab"))
    both.MergeFrom(finished(reason, stop_token_id=byte_ids("b")[0]))
    _, (complete,), _ = run(generation(stops=["b"]), both)
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "b")


def test_tokens_behind_a_match_that_waits_wait_too() -> None:
    """Stop strings "bc" and "abcde" on "abcdX": "bc" it is, and "d" never goes out."""
    ids = byte_ids("abcdX")
    subject = generation(stops=["bc", "abcde"])
    chunks, (complete,), stopped = run(
        subject, *(output(token_id) for token_id in ids), finished(CANCELLED)
    )
    assert [list(chunk.token_ids) for chunk in chunks] == [[ids[0]], [ids[1]], [ids[2]]]
    assert list(complete.output_ids) == ids[:3]
    assert complete.matched_stop_str == "bc"
    assert stopped == [0]


def test_a_match_that_waits_at_the_end_counts() -> None:
    ids = byte_ids("abcd")
    _, (complete,), _ = run(generation(stops=["bc", "abcde"]), output(*ids), finished(LENGTH))
    assert list(complete.output_ids) == ids[:3]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "bc")


def test_min_tokens_holds_for_stop_strings() -> None:
    ids = byte_ids("abb")
    _, (complete,), _ = run(
        generation(stops=["b"], min_tokens=3), output(*ids), finished(CANCELLED)
    )
    assert list(complete.output_ids) == ids


def test_samples_are_apart() -> None:
    subject = generation(stops=["b"])
    chunks, completes, stopped = run(
        subject,
        output(*byte_ids("a")),
        output(*byte_ids("c"), handle=1),
        output(*byte_ids("b")),
        output(*byte_ids("d"), handle=1),
        finished(CANCELLED),
        finished(LENGTH, handle=1),
    )
    assert stopped == [0]
    assert [(chunk.index, *chunk.token_ids) for chunk in chunks] == [
        (0, *byte_ids("a")),
        (1, *byte_ids("c")),
        (0, *byte_ids("b")),
        (1, *byte_ids("d")),
    ]
    assert [(c.index, c.finish_reason) for c in completes] == [(0, "stop"), (1, "length")]


def test_an_abort_is_a_completion() -> None:
    _, (complete,), _ = run(generation(), output(5), finished(CANCELLED))
    assert (complete.finish_reason, list(complete.output_ids)) == ("abort", [5])


@pytest.mark.parametrize(
    "error", [errors.EngineFault("broken"), errors.EngineUnavailable("stopping")]
)
def test_failures_are_errors(error: errors.MillstreamError) -> None:
    message = engine_pb2.GenerateResponse()
    end = message.finished.add(reason=engine_pb2.FINISH_REASON_ERROR)
    end.status.CopyFrom(errors.to_status(error))
    with pytest.raises(type(error), match=error.message):
        run(generation(), message)
    message = engine_pb2.GenerateResponse()
    message.rejected.add(status=errors.to_status(error))
    with pytest.raises(type(error), match=error.message):
        run(generation(), message)


def with_logprobs(first: int, count: int) -> engine_pb2.GenerateResponse:
    """Tokens first, first + 1, ...; -first is the log probability, and one other is listed."""
    message = output(*range(first, first + count))
    columns = message.output.logprobs
    for token_id in range(first, first + count):
        columns.token_logprobs.append(-token_id)
        columns.top_counts.append(2)
        columns.top_token_ids.extend([1, token_id])
        columns.top_logprobs.extend([-0.5, -token_id])
    return message


@pytest.mark.parametrize("stream", [True, False])
def test_row_66_log_probabilities_line_up(stream: bool) -> None:
    chunks, (complete,), _ = run(
        generation(stream=stream, logprobs=True),
        with_logprobs(10, 1),
        with_logprobs(11, 3),
        finished(LENGTH),
    )
    parts = [chunk.output_logprobs for chunk in chunks] if stream else [complete.output_logprobs]
    assert complete.HasField("output_logprobs") == (not stream)
    assert [t for part in parts for t in part.token_ids] == [10, 11, 12, 13]
    assert [v for part in parts for v in part.token_logprobs] == [-10, -11, -12, -13]
    tops = [top for part in parts for top in part.top_logprobs]
    assert [list(top.token_ids) for top in tops] == [[1, 10], [1, 11], [1, 12], [1, 13]]
    assert [list(top.values) for top in tops] == [
        [-0.5, -10],
        [-0.5, -11],
        [-0.5, -12],
        [-0.5, -13],
    ]


def test_log_probabilities_end_with_the_stop_string() -> None:
    ids = byte_ids("abc")
    message = output(*ids)
    message.output.logprobs.token_logprobs.extend([-1, -2, -3])
    subject = generation(stream=False, stops=["b"], logprobs=True)
    _, (complete,), _ = run(subject, message, finished(CANCELLED))
    assert list(complete.output_logprobs.token_logprobs) == [-1, -2]
    assert list(complete.output_logprobs.token_ids) == ids[:2]
    assert not complete.output_logprobs.top_logprobs


def test_no_log_probabilities_where_none_were_asked_for() -> None:
    message = output(5)
    message.output.logprobs.token_logprobs.append(math.nan)
    chunks, _, _ = run(generation(), message, finished(LENGTH))
    assert not chunks[0].HasField("output_logprobs")
    assert not chunks[0].HasField("input_logprobs")


@pytest.mark.parametrize("stream", [True, False])
def test_row_67_prompt_log_probabilities_come_once(stream: bool) -> None:
    pieces = []
    for logprob in (-8, -9):
        piece = engine_pb2.GenerateResponse()
        piece.prompt_logprobs.add().logprobs.token_logprobs.append(logprob)
        pieces.append(piece)
    chunks, (complete,), _ = run(
        generation(stream=stream, prompt_logprobs=True),
        *pieces, output(5), output(6), finished(LENGTH),
    )  # fmt: skip
    assert complete.HasField("input_logprobs") == (not stream)
    found = chunks[0].input_logprobs if stream else complete.input_logprobs
    assert list(found.token_ids) == PROMPT
    values = [one.value if one.HasField("value") else None for one in found.token_logprobs]
    assert values == [None, -8, -9]
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
