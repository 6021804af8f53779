"""What one message to the tokenizer carries."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.client.generation import Generation
from millstream.client.text import TextStream
from millstream.rpc.sampling_params import SamplingParams
from millstream.v1 import tokenizer_pb2

MOST = 256 * 1024


class Call:
    """A Detokenize call that answers each message with nothing."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # tokens of each message

    async def write(self, request: tokenizer_pb2.DetokenizeRequest) -> None:
        self.sizes.append(len(request.tokens.token_ids))

    async def read(self) -> tokenizer_pb2.DetokenizeResponse:
        return tokenizer_pb2.DetokenizeResponse()

    def cancel(self) -> None: ...

    def add_done_callback(self, told: Any) -> None: ...

    def done(self) -> bool:
        return False


async def test_a_turn_has_so_many_tokens_at_most_and_a_large_session_its_own() -> None:
    """Many answers that end in one moment would be a message beyond what the tokenizer takes."""
    call, connection = Call(), None
    any_call: Any = call
    stream = TextStream(any_call, connection, tokenizer_pb2.TokenizerInfo())  # type: ignore[arg-type]
    changed = asyncio.Event()
    sizes = [100_000] * 5 + [MOST + 1] + [10] * 3
    for size in sizes:
        generation = Generation(prompt_token_ids=[1], changed=changed, sampling=SamplingParams())
        session = stream.open(
            generation, stop=(), min_tokens=0, include_stop=False, skip_special_tokens=True
        )
        session.feed([7] * size)
    async with asyncio.timeout(5):
        while sum(call.sizes) < sum(sizes):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert call.sizes == [200_000, 200_000, 100_000, MOST + 1, 30]
    await stream.close()
