"""Why a service ended a stream is what its users hear, also who wrote to it at that moment: there
grpc.aio itself has forgotten it."""

from __future__ import annotations

import pytest
from tests.fake_services import FakeServices

from millstream.client import AsyncClient, SamplingParams
from millstream.rpc.errors import FellBehind

REASON = FellBehind("you read too slowly")
ENDLESS = SamplingParams(ignore_eos=True, stop="never")
TIMES = 10  # who meets the end by a write is a race


async def test_many_submissions_meet_the_end_of_the_stream(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.info.limits.max_message_bytes = 20_000  # so there are many messages
    services.engine.ends_with = REASON
    for _ in range(TIMES):
        ended = await client.generate(
            [[1] * 9_000] * 100, detokenize=False, max_retries=0, return_exceptions=True
        )
        assert {(type(each), str(each)) for each in ended} == {(FellBehind, REASON.message)}


@pytest.mark.parametrize("step_s", [0.0, 0.005])
async def test_tokens_meet_the_end_of_the_text_stream(
    client: AsyncClient, services: FakeServices, step_s: float
) -> None:
    """Written while it ends, or after that."""
    services.engine.step_s = step_s
    services.tokenizer.ends_with = REASON
    for _ in range(TIMES):
        with pytest.raises(FellBehind, match=REASON.message):
            await client.generate("hello", ENDLESS)
