"""Conversations over several engines behind one client: whether a turn finds its prefix cached.

    python -m tests.bench.conversations [--engines 4] [--conversations 64] [--turns 6] [--slower 4]
                                        [--shared-tokens 512] [--first-tokens 1500]

Each conversation starts with a prompt of its own behind one that all share; each turn's prompt is
all that was said so far and some more. Engines have no GPU, but a runner that takes as long as one,
--slower times over (paced_runner.py). One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time

from tests.bench.json_lines import report
from tests.bench.paced_runner import PACED
from tests.bench.replicas import started

from millstream.client import AsyncClient, Output, SamplingParams

_TURN_TOKENS, _ANSWER_TOKENS = 100, 64
_IDS = 30_000
_PAUSE_S = 2.0  # at most, between an answer and the next turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--shared-tokens", type=int, default=512)
    parser.add_argument("--first-tokens", type=int, default=1500)
    parser.add_argument("--slower", type=float, default=4)
    arguments = parser.parse_args()
    os.environ["MILLSTREAM_PACE"] = str(arguments.slower)
    with started(arguments.engines, PACED) as targets:
        asyncio.run(measure(targets, arguments))


async def measure(targets: list[str], arguments: argparse.Namespace) -> None:
    shared = ids(random.Random(-1), arguments.shared_tokens)
    firsts = [ids(random.Random(i), arguments.first_tokens) for i in range(arguments.conversations)]
    async with AsyncClient(targets, None) as client:
        started_s = time.perf_counter()
        answers = await asyncio.gather(
            *(
                converse(client, shared + first, arguments.turns, random.Random(first[0]))
                for first in firsts
            )
        )
        seconds = time.perf_counter() - started_s
    later = [output for outputs in answers for output in outputs[1:]]
    report(
        "conversations",
        engines=len(targets),
        seconds=seconds,
        cached=sum(o.usage.cached_tokens for o in later)
        / sum(o.usage.prompt_tokens for o in later),
        first_token_ms=1e3 * statistics.mean(output.timings.first_token_s for output in later),
    )


async def converse(
    client: AsyncClient, said: list[int], turns: int, rng: random.Random
) -> list[Output]:
    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    outputs = []
    for _ in range(turns):
        await asyncio.sleep(rng.uniform(0, _PAUSE_S))
        outputs.append(await client.generate(said, params, detokenize=False))
        said = said + outputs[-1].token_ids + ids(rng, _TURN_TOKENS)
    return outputs


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, _IDS) for _ in range(count)]


if __name__ == "__main__":
    main()
