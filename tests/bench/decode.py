"""Decode speed of the default model against transformers' generate, on the same CPU and threads.

    python -m tests.bench.decode [--batch 1 8] [--threads 2]

Greedy, fp32, the same prompts; arms alternate; tokens per second of decode are the tokens after the
first, over the time of the whole call less the time of a call for one token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from millstream import hub
from millstream.engine import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model_dir = hub.resolve(None)
    llm = LLM(str(model_dir), threads=arguments.threads, prefix_caching=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for batch in arguments.batch:
        rng = random.Random(batch)
        prompts = [
            [rng.randrange(40_000) for _ in range(arguments.prompt_len)] for _ in range(batch)
        ]
        arms: dict[str, Callable[[int], Any]] = {
            "millstream": lambda tokens, prompts=prompts: llm.generate(
                prompts,
                SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens),
                use_tqdm=False,
            ),
            "transformers": lambda tokens, prompts=prompts: reference.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            ),
        }
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(arguments.runs):
            for name, run in arms.items():
                rates[name].append(_decode_rate(run, batch, arguments.tokens))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratio = medians["millstream"] / medians["transformers"]
        print(json.dumps({"batch": batch, "threads": arguments.threads, **medians, "ratio": ratio}))


def _decode_rate(run: Callable[[int], Any], batch: int, tokens: int) -> float:
    prefill = _seconds(run, 1)
    return batch * (tokens - 1) / (_seconds(run, tokens) - prefill)


def _seconds(run: Callable[[int], Any], tokens: int) -> float:
    started = time.perf_counter()
    run(tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
