"""The way of sampled tokens from the device to the host, in the order of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from millstream.engine.plan import StepResult
from millstream.engine.stepping.logprobs import StepScores


class CpuResults:
    """Sampled tokens of launched steps, computed already."""

    def __init__(self) -> None:
        self._steps: deque[StepResult] = deque()

    def put(
        self, step: int, token_ids: torch.Tensor, scores: StepScores | None = None
    ) -> Callable[[], list[int]]:
        """Takes what a step sampled; returns what gives the token ids."""
        result = _result(step, token_ids.tolist(), scores)
        self._steps.append(result)
        return lambda: result.token_ids

    def take(self) -> StepResult:
        return self._steps.popleft()


CopyOut = Callable[[torch.Tensor, torch.Tensor], None]  # as SlotOps.copy_out


def copy_by_torch(token_ids: torch.Tensor, out: torch.Tensor) -> None:
    """A CopyOut for any device."""
    out.copy_(token_ids, non_blocking=True)


class GpuResults:
    """Sampled tokens of launched steps, on their way to pinned memory: one buffer a step in flight,
    and an event that says when it is filled."""

    def __init__(self, *, max_num_seqs: int, max_in_flight: int, copy_out: CopyOut) -> None:
        self._copy_out = copy_out
        self._free = deque(
            (torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=True), torch.Event())
            for _ in range(max_in_flight)
        )
        self._steps: deque[_GpuStep] = deque()

    def put(
        self, step: int, token_ids: torch.Tensor, scores: StepScores | None = None
    ) -> Callable[[], list[int]]:
        """Queues the copies; returns what waits for them and gives the token ids."""
        buffer, event = self._free.popleft()
        self._copy_out(token_ids, buffer[: len(token_ids)])
        on_host = scores.to_host() if scores is not None else None
        event.record()
        launched = _GpuStep(step, len(token_ids), buffer, event, on_host)
        self._steps.append(launched)
        return launched.token_ids

    def take(self) -> StepResult:
        launched = self._steps.popleft()
        token_ids = launched.token_ids()
        self._free.append((launched.buffer, launched.event))
        return _result(launched.step, token_ids, launched.scores)


class _GpuStep:
    __slots__ = ("_count", "_token_ids", "buffer", "event", "scores", "step")

    def __init__(
        self,
        step: int,
        count: int,
        buffer: torch.Tensor,
        event: torch.Event,
        scores: StepScores | None,
    ) -> None:
        self.step = step
        self._count = count
        self.buffer = buffer
        self.event = event
        self.scores = scores
        self._token_ids: list[int] | None = None

    def token_ids(self) -> list[int]:
        """Waits for the step. Known from then on, whatever becomes of the buffer."""
        if self._token_ids is None:
            self.event.synchronize()
            self._token_ids = self.buffer[: self._count].tolist()
        return self._token_ids


def _result(step: int, token_ids: list[int], scores: StepScores | None) -> StepResult:
    if scores is None:
        return StepResult(step=step, token_ids=token_ids)
    return StepResult(
        step=step,
        token_ids=token_ids,
        logprobs=scores.logprobs(),
        prompt_logprobs=scores.prompt_logprobs(),
        problems=scores.problems,
    )
