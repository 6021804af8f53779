"""Generations of a schema at random temperatures: do all validate, and what does it cost?

    python -m tests.bench.structured [--generations 1000] [--round 50] [engine flags]

The default model through gRPC, on a schema of which every part is bounded (structured_schemas.py).
Rounds of constrained requests alternate with the same numbers of tokens without a constraint:
prompts, temperatures and seeds are equal, and each unconstrained request generates exactly as many
tokens as its constrained twin did. The last line has the ratio of the medians of tokens per second.
Exits with 1 if one does not validate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace

import jsonschema
from tests.structured_schemas import ORDER, ORDER_MAX_TOKENS, ORDER_PROMPT

from millstream.client import Client, Output, SamplingParams, launch


@dataclass(frozen=True, slots=True)
class Round:
    outputs: list[Output]
    tokens_per_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--round", type=int, default=50, help="requests at once")
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    engine_flags = dict(flag.lstrip("-").replace("-", "_").split("=") for flag in flags)
    rng = random.Random(arguments.seed)
    validator = jsonschema.Draft202012Validator(ORDER)
    constrained: list[Round] = []
    free: list[Round] = []
    texts: set[str] = set()
    with launch(**engine_flags) as client:
        _run(client, [SamplingParams(json_schema=ORDER, max_tokens=ORDER_MAX_TOKENS)])  # warms up
        while (done := sum(len(one.outputs) for one in constrained)) < arguments.generations:
            count = min(arguments.round, arguments.generations - done)
            params = [
                SamplingParams(
                    temperature=rng.uniform(0, 2),
                    seed=rng.getrandbits(64),
                    max_tokens=ORDER_MAX_TOKENS,
                )
                for _ in range(count)
            ]
            constrained.append(_run(client, [replace(one, json_schema=ORDER) for one in params]))
            outputs = constrained[-1].outputs
            texts.update(_check(output, validator) for output in outputs)
            same_lengths = [
                replace(one, max_tokens=len(output.token_ids), ignore_eos=True)
                for one, output in zip(params, outputs, strict=True)
            ]
            free.append(_run(client, same_lengths))
            assert free[-1].num_tokens == constrained[-1].num_tokens
            print(
                f"{done + count:5}: constrained {constrained[-1].tokens_per_s:7.1f} tok/s, "
                f"free {free[-1].tokens_per_s:7.1f} tok/s",
                flush=True,
            )
    _report(constrained, free, texts)


def _run(client: Client, params: list[SamplingParams]) -> Round:
    conversations = [[{"role": "user", "content": ORDER_PROMPT}]] * len(params)
    started = time.perf_counter()
    outputs = client.chat(conversations, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    return Round(outputs, sum(len(output.token_ids) for output in outputs) / elapsed)


def _check(output: Output, validator: jsonschema.Draft202012Validator) -> str:
    """The text, which must be an order; ends the program if it is none."""
    try:
        validator.validate(json.loads(output.text))
        assert output.finish_reason == "stop", output.finish_reason
    except (ValueError, AssertionError, jsonschema.ValidationError) as error:
        print(f"NOT VALID: {output.text!r}: {error}")
        sys.exit(1)
    return output.text


def _report(constrained: list[Round], free: list[Round], texts: set[str]) -> None:
    rates = [statistics.median(one.tokens_per_s for one in arm) for arm in (constrained, free)]
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(constrained, free, strict=True)]
    result = {
        "generations": sum(len(one.outputs) for one in constrained),
        "all_valid": True,
        "different_texts": len(texts),
        "tokens": sum(one.num_tokens for one in constrained),
        "constrained_tokens_per_s": round(rates[0], 1),
        "free_tokens_per_s": round(rates[1], 1),
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
