"""A runner without a model whose steps take as long as a GPU's, or so many times as long as
MILLSTREAM_PACE says: `--runner` PACED.

A step of Qwen3-0.6B on one H200, about: 0.9 ms, 4.3 ms for 256 sequences, 3 us a prompt's token.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from millstream.engine import instant_runner
from millstream.engine.config import EngineConfig
from millstream.engine.instant_runner import InstantRunner
from millstream.engine.plan import Plan, RunnerInfo, StepResult

PACED = "tests.bench.paced_runner:create"
_STEP_S, _SEQUENCE_S, _PROMPT_TOKEN_S = 0.9e-3, 4.3e-3 / 256, 3e-6


class PacedRunner(InstantRunner):
    """Steps run one after the other, beside the caller."""

    def __init__(self, info: RunnerInfo, slower: float) -> None:
        super().__init__(info)
        self._slower = slower
        self._busy_until = 0.0
        self._ends: deque[float] = deque()

    def launch(self, plan: Plan) -> None:
        super().launch(plan)
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        sequences = len(plan.chunks) + len(plan.decode_slots)
        seconds = _STEP_S + _SEQUENCE_S * sequences + _PROMPT_TOKEN_S * prompt_tokens
        self._busy_until = max(time.monotonic(), self._busy_until) + self._slower * seconds
        self._ends.append(self._busy_until)

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ends.popleft() - time.monotonic()))
        return super().collect()


def create(config: EngineConfig, model_dir: Path | None = None) -> PacedRunner:
    return PacedRunner(
        instant_runner.create(config).info, float(os.environ.get("MILLSTREAM_PACE", "1"))
    )
