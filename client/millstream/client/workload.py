"""The benchmark's requests: random prompts and output lengths, the same for every engine."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

from millstream.rpc.sampling_params import SamplingParams

_LAST_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """So many requests at once, each of random length; output goes on past EOS to its length."""

    num_requests: int = 256
    input_len: tuple[int, int] = (100, 1024)  # tokens, both ends included
    output_len: tuple[int, int] = (100, 1024)
    temperature: float = 0.6
    seed: int = 0

    def draw(self) -> Requests:
        """The order of draws is part of the workload: all prompts, each its length and then its
        ids; then all output lengths."""
        rng = random.Random(self.seed)
        prompts = [
            [rng.randint(0, _LAST_ID) for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_requests)
        ]
        params = [
            SamplingParams(
                temperature=self.temperature,
                ignore_eos=True,
                max_tokens=rng.randint(*self.output_len),
            )
            for _ in range(self.num_requests)
        ]
        return Requests(prompts=prompts, params=params)


def poisson_arrivals(rate_per_s: float, count: int, seed: int) -> list[float]:
    """When requests of a Poisson process come, in seconds from its start; the first one at 0.
    An infinite rate: all at once."""
    rng = random.Random(seed)
    gaps = (rng.expovariate(rate_per_s) for _ in range(count - 1))
    return (
        [0.0] * count if math.isinf(rate_per_s) else list(itertools.accumulate(gaps, initial=0.0))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Prompts and their parameters, in parallel."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    texts: list[str] | None = None  # the prompts as text

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(params.max_tokens or 0 for params in self.params)

    def part(self, start: int, stop: int) -> Requests:
        texts = None if self.texts is None else self.texts[start:stop]
        return Requests(
            prompts=self.prompts[start:stop], params=self.params[start:stop], texts=texts
        )

    def shifted(self, by: int, vocab_size: int) -> Requests:
        """Every id moved by a constant, so that the prefix cache cannot answer a second run."""
        prompts = [[(token_id + by) % vocab_size for token_id in ids] for ids in self.prompts]
        return replace(self, prompts=prompts)
