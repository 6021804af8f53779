"""The samples of one prompt before their reader."""

from __future__ import annotations

import asyncio

from millstream.client.generation import Generation
from millstream.client.samples import Samples
from millstream.rpc.sampling_params import SamplingParams


async def test_a_sample_that_always_has_news_does_not_keep_the_others_waiting() -> None:
    changed = asyncio.Event()
    generations = [
        Generation(
            prompt_token_ids=[1], changed=changed, sampling=SamplingParams(), sample=i, follow=True
        )
        for i in range(3)
    ]
    for generation in generations:
        generation.bind(cancel=lambda: None, text=None)
    samples = Samples(generations, changed, None)
    order = []
    for step in range(9):
        for generation in generations:
            generation.token_ids.append(step)
            generation.advance()
        order.append((await samples.next_delta()).sample)
    assert order == [0, 1, 2] * 3
