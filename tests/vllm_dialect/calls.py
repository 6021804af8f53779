"""Generate calls and what comes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from tests.engine_processes import eventually
from tests.tiny_tokenizers import byte_ids

from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc


def request(
    prompt: list[int] | str, *, request_id: str = "", stream: bool = True, **params: Any
) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(
            input_ids=byte_ids(prompt) if isinstance(prompt, str) else prompt
        ),
        sampling_params=vllm.SamplingParams(**params),
        stream=stream,
    )


class Call:
    """A Generate that runs; sorts what comes by index."""

    def __init__(self, stub: vllm_grpc.VllmEngineStub, message: vllm.GenerateRequest) -> None:
        self.call = stub.Generate(message, timeout=30)
        self.chunks: list[vllm.GenerateStreamChunk] = []
        self.completes: dict[int, vllm.GenerateComplete] = {}

    async def until_token(self) -> None:
        while not self.chunks:
            assert await self.read()

    async def read(self) -> bool:
        """Whether there was one more message."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        if message.HasField("chunk"):
            assert message.chunk.index not in self.completes, "tokens after the end"
            self.chunks.append(message.chunk)
        else:
            assert message.complete.index not in self.completes
            self.completes[message.complete.index] = message.complete
        return True

    async def to_end(self) -> vllm.GenerateComplete:
        """The completion of the only sample; checked against the chunks."""
        while await self.read():
            pass
        assert await self.call.code() is grpc.StatusCode.OK
        for index, complete in self.completes.items():
            ids = [t for chunk in self.chunks if chunk.index == index for t in chunk.token_ids]
            assert not self.chunks or ids == list(complete.output_ids)
            assert complete.completion_tokens == len(complete.output_ids)
        return self.completes[min(self.completes)]


async def complete(
    stub: vllm_grpc.VllmEngineStub, prompt: list[int] | str, **fields: Any
) -> vllm.GenerateComplete:
    return await Call(stub, request(prompt, **fields)).to_end()


async def refusal(
    stub: vllm_grpc.VllmEngineStub, message: vllm.GenerateRequest
) -> errors.MillstreamError:
    """The error that a Generate ends with."""
    try:
        async with asyncio.timeout(20):
            await Call(stub, message).to_end()
    except grpc.aio.AioRpcError as error:
        return errors.from_rpc_error(error)
    raise AssertionError("it was not refused")


async def freed_within(channel: grpc.aio.Channel, seconds: float) -> bool:
    """Whether no sequence and no block is held, soon enough."""
    stub: Any = engine_pb2_grpc.EngineStub(channel)

    async def freed() -> bool:
        now = await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=10)
        return not (now.num_requests_running or now.num_requests_waiting or now.kv_blocks_used)

    return await eventually(freed, seconds)
