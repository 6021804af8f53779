"""Tokens per second through gRPC against the same engine in process, side by side.

    python -m tests.bench.wire --runner instant      # wire, IPC and scheduler; no model
    python -m tests.bench.wire                       # the default model

Token ids in and out (detokenize=False), the same requests in both arms, arms alternating; the ratio
of the medians is printed last. Both arms leave torch's threads at the engine's default.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from millstream.client import SamplingParams, launch
from millstream.engine import LLM


def main() -> None:
    arguments = _parse()
    options: dict[str, Any] = {"runner": arguments.runner, "max_num_seqs": arguments.num_seqs}
    model = arguments.model
    if arguments.runner == "model":
        from millstream import hub

        model = str(hub.resolve(model))
    prompts, params = _workload(arguments)
    in_process: list[float] = []
    through_grpc: list[float] = []
    llm = LLM(model, **options)
    with launch(model, tokenizer=False, **options) as client:
        for _ in range(arguments.runs + 1):
            in_process.append(_rate(lambda: llm.generate(prompts, params, use_tqdm=False), params))
            through_grpc.append(
                _rate(
                    lambda: client.generate(prompts, params, detokenize=False, use_tqdm=False),
                    params,
                )
            )
            print(
                f"in process {in_process[-1]:10,.0f} tok/s   gRPC {through_grpc[-1]:10,.0f} tok/s"
            )
    _report(in_process[1:], through_grpc[1:], arguments)  # the first round warms up


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", default="model", help="model, or instant")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def _workload(arguments: argparse.Namespace) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10_000) for _ in range(arguments.prompt_len)]
        for _ in range(arguments.num_seqs)
    ]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.max_tokens)
    return prompts, [params] * arguments.num_seqs


def _rate(run: Any, params: list[SamplingParams]) -> float:
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    return sum(one.max_tokens or 0 for one in params) / elapsed


def _report(
    in_process: list[float], through_grpc: list[float], arguments: argparse.Namespace
) -> None:
    base, wire = statistics.median(in_process), statistics.median(through_grpc)
    print(json.dumps({**vars(arguments), "in_process": base, "grpc": wire, "ratio": wire / base}))


if __name__ == "__main__":
    main()
