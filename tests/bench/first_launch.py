"""What the host does from the call of LLM.generate to the first launch, and from launch to launch
while the prompts are prefilled: the flagship workload, no model, in CPU time.

    python3 -m tests.bench.first_launch [--runs 15]

The device's part is step_overhead's stub, so this is what a GPU waits for at first, and has to hide
after that. Medians over runs; prompts differ between them, as those of engine_gpu's flagship do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from tests.bench.step_overhead import StubRunner

from millstream.client.workload import Workload
from millstream.engine import LLM
from millstream.engine.config import EngineConfig
from millstream.engine.plan import Plan

_VOCAB_SIZE, _STEP_TOKENS = 151_936, 8192


class TimedRunner(StubRunner):
    """Notes the CPU time at which the launches of steps with chunks begin and end."""

    def __init__(self) -> None:
        super().__init__(256, vocab_size=_VOCAB_SIZE, max_num_batched_tokens=_STEP_TOKENS)
        self.launched_at: list[float] = []
        self.returned_at: list[float] = []

    def launch(self, plan: Plan) -> None:
        came = time.thread_time()
        super().launch(plan)
        if plan.chunks:
            self.launched_at.append(came)
            self.returned_at.append(time.thread_time())


_runners: list[TimedRunner] = []


def create(config: EngineConfig, model_dir: Path | None) -> TimedRunner:
    """The runner that LLM finds by its name."""
    _runners.append(TimedRunner())
    return _runners[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    llm = LLM("qwen3-0.6b", load_format="dummy", runner="tests.bench.first_launch:create")
    (runner,) = _imported_runners()
    drawn = Workload().draw()
    first_ms, between_ms = [], []
    for run in range(arguments.runs + 1):
        requests = drawn.shifted(7 * run, _VOCAB_SIZE)
        runner.launched_at.clear()
        runner.returned_at.clear()
        called = time.thread_time()
        llm.generate(requests.prompts, requests.params, use_tqdm=False)
        first_ms.append(1e3 * (runner.launched_at[0] - called))
        span = runner.returned_at[-1] - runner.launched_at[0]
        between_ms.append(1e3 * span / len(runner.launched_at))
    first, between = statistics.median(first_ms[1:]), statistics.median(between_ms[1:])
    figures = {
        "first_launch_ms": round(first, 3),
        "per_prompt_us": round(1e3 * first / len(drawn.prompts), 1),
        "best_first_launch_ms": round(min(first_ms[1:]), 3),
        "prefill_steps": len(runner.launched_at),
        "per_prefill_step_ms": round(between, 3),
    }
    print(json.dumps({"bench": "first_launch", **figures}))


def _imported_runners() -> list[TimedRunner]:
    """Those of the module that LLM imported: this one, run as a script, is another."""
    from tests.bench import first_launch

    return first_launch._runners  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
