"""The way of sampled tokens from the device to the host, in the order of the steps."""

from __future__ import annotations

from collections import deque

import torch

from millstream.engine.hardware import ResolvedConfig
from millstream.engine.plan import StepResult


class CpuResults:
    """Sampled tokens of launched steps, computed already."""

    def __init__(self) -> None:
        self._steps: deque[StepResult] = deque()

    def put(self, step: int, token_ids: torch.Tensor) -> None:
        self._steps.append(StepResult(step=step, token_ids=token_ids.tolist()))

    def take(self) -> StepResult:
        return self._steps.popleft()


class GpuResults:
    """Sampled tokens of launched steps, on their way to pinned memory: one buffer a step in flight,
    and an event that says when it is filled."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._free = deque(
            (torch.empty(resolved.max_num_seqs, dtype=torch.int64, pin_memory=True), torch.Event())
            for _ in range(resolved.max_in_flight)
        )
        self._steps: deque[tuple[int, int, torch.Tensor, torch.Event]] = deque()

    def put(self, step: int, token_ids: torch.Tensor) -> None:
        buffer, event = self._free.popleft()
        buffer[: len(token_ids)].copy_(token_ids, non_blocking=True)
        event.record()
        self._steps.append((step, len(token_ids), buffer, event))

    def take(self) -> StepResult:
        step, count, buffer, event = self._steps.popleft()
        event.synchronize()
        self._free.append((buffer, event))
        return StepResult(step=step, token_ids=buffer[:count].tolist())
