"""Generate over a socket: tokens, stop strings, samples, log probabilities, refusals."""

from __future__ import annotations

import math
import time
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.engine_processes import engine
from tests.fake_runners import EOS_TOKEN_ID, VOCAB_SIZE, tokens_after
from tests.tiny_tokenizers import byte_ids
from tests.vllm_dialect.calls import Call, complete, freed_within, refusal, request
from tests.vllm_dialect.conftest import MAX_MODEL_LEN

from millstream.rpc import errors


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
