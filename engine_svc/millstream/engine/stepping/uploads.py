"""The way of small vectors from the host to the device, many in one copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

# Copies wait for no step, but each other: while one is under way, another buffer is filled.
_NUM_BUFFERS = 3
_SMALLEST_BUFFER = 4096


class Uploader:
    """Copies int64 vectors to one device while it still computes steps; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_PinnedBuffer] = []
        if device.type == "cuda":
            self._buffers = [_PinnedBuffer(_SMALLEST_BUFFER) for _ in range(_NUM_BUFFERS)]
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turn = 0

    def __call__(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """The vectors on the device, as parts of one new tensor, for the current stream."""
        if self._buffers:
            self._turn = (self._turn + 1) % _NUM_BUFFERS
            with self.ahead():
                together = self._buffers[self._turn].upload(arrays, self._device)
            together.record_stream(torch.cuda.current_stream(self._device))
        else:
            together = torch.from_numpy(np.concatenate(arrays))
        return list(torch.split(together, [len(array) for array in arrays]))

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """What is queued inside may run beside what was queued before: it must change nothing that
        this reads. What is queued behind waits for it."""
        if not self._buffers:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


class _PinnedBuffer:
    """Pinned memory, not written to while a copy out of it may be under way."""

    def __init__(self, size: int) -> None:
        self._resize(size)
        self._copied = torch.Event()
        self._copied.record()

    def upload(self, arrays: Sequence[Ints], device: torch.device) -> torch.Tensor:
        size = sum(len(array) for array in arrays)
        self._copied.synchronize()
        if size > len(self._array):
            self._resize(2 * size)
        np.concatenate(arrays, out=self._array[:size])
        on_device = torch.empty(size, dtype=torch.int64, device=device)
        on_device.copy_(self._tensor[:size], non_blocking=True)
        self._copied.record()
        return on_device

    def _resize(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._array: npt.NDArray[Any] = self._tensor.numpy()
