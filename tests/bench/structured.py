"""Generations of a schema at random temperatures: do all validate, and what does it cost?

    python -m tests.bench.structured [--generations 1000] [--round 125] [engine flags]

The default model through gRPC, on a schema of which every part is bounded (structured_schemas.py).
After each second round (--free-every) come as many tokens without a constraint: prompts,
temperatures and seeds are equal, and each free request generates exactly as many tokens as its
constrained twin did. The last line has the median of such pairs' ratios of tokens per second.
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
    parser.add_argument("--round", type=int, default=125, help="requests at once")
    parser.add_argument("--free-every", type=int, default=2, help="rounds")
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    engine_flags = dict(flag.lstrip("-").replace("-", "_").split("=") for flag in flags)
    rng = random.Random(arguments.seed)
    validator = jsonschema.Draft202012Validator(ORDER)
    constrained: list[Round] = []
    pairs: list[tuple[Round, Round]] = []  # of equal numbers of tokens, the second free
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
            one = _run(client, [replace(each, json_schema=ORDER) for each in params])
            texts.update(_check(output, validator) for output in one.outputs)
            constrained.append(one)
            print(f"{done + count:5}: constrained {one.tokens_per_s:7.1f} tok/s", flush=True)
            if len(constrained) % arguments.free_every == 0:
                pairs.append((one, _free(client, params, one)))
                print(f"       free        {pairs[-1][1].tokens_per_s:7.1f} tok/s", flush=True)
    _report(constrained, pairs, texts)


def _free(client: Client, params: list[SamplingParams], twin: Round) -> Round:
    """The same without a constraint, token for token as long."""
    same_lengths = [
        replace(each, max_tokens=len(output.token_ids), ignore_eos=True)
        for each, output in zip(params, twin.outputs, strict=True)
    ]
    free = _run(client, same_lengths)
    assert free.num_tokens == twin.num_tokens
    return free


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


def _report(constrained: list[Round], pairs: list[tuple[Round, Round]], texts: set[str]) -> None:
    result: dict[str, object] = {
        "generations": sum(len(one.outputs) for one in constrained),
        "all_valid": True,
        "different_texts": len(texts),
        "tokens": sum(one.num_tokens for one in constrained),
        "constrained_tokens_per_s": statistics.median(one.tokens_per_s for one in constrained),
    }
    if pairs:
        result["free_tokens_per_s"] = statistics.median(free.tokens_per_s for _, free in pairs)
        result["ratio"] = statistics.median(
            twin.tokens_per_s / free.tokens_per_s for twin, free in pairs
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
