"""A small load of `millstream bench`, run against fake services."""

from __future__ import annotations

from typing import Any

from tests.fake_services import FakeServices

from millstream.client.bench.progress import Progress
from millstream.client.bench.runs import Load, Run, measure
from millstream.client.bench.targets import Target, open_sender
from millstream.client.workload import Workload

WORKLOAD = Workload(num_requests=6, input_len=(4, 8), output_len=(3, 5))


def load_of(due_s: list[float] | None, vocab_size: int = 90) -> Load:
    """Six requests. Of the default vocabulary, ASCII, as many bytes of text as ids."""
    requests = WORKLOAD.draw().shifted(0, vocab_size)
    return Load(name="load", requests=requests, due_s=due_s)


async def measure_load(
    services: FakeServices, load: Load, progress: Progress | None = None, **target: Any
) -> Run:
    """`target`: fields of Target; by default it is the services' engine."""
    (measured,) = await measure_loads(services, [load], progress, **target)
    return measured


async def measure_loads(
    services: FakeServices, loads: list[Load], progress: Progress | None = None, **target: Any
) -> list[Run]:
    target = {"engine": services.target, **target}
    at = Target(tokenizer=services.target, model=None, options={}, **target)
    progress = progress or Progress(shown=False)
    async with open_sender(at, progress) as (sender, info):
        assert info.model == "fake"
        return [run async for run in measure(sender, loads, progress)]
