"""Vectors on their way to the device, beside steps that it still computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millstream.engine.stepping.uploads import Uploader

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_STEP_CYCLES = 2_000_000  # about a millisecond


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_arrive_whatever_is_still_to_be_computed(device: str) -> None:
    """More uploads than there are buffers, larger ones among them. The memory of each is free when
    a step that reads it is queued, and is not to be taken before that step."""
    rng = np.random.default_rng(0)
    upload = Uploader(torch.device(device))
    sent, arrived = [], []
    for turn in range(20):
        arrays = [rng.integers(-(1 << 62), 1 << 62, size) for size in (3, 0, 1000 * (turn % 7))]
        parts = upload(arrays)
        if device == "cuda":
            torch.cuda._sleep(_STEP_CYCLES)
        sent.append(arrays)
        arrived.append([part.clone() for part in parts])
        del parts
    for arrays, copies in zip(sent, arrived, strict=True):
        for array, copy in zip(arrays, copies, strict=True):
            assert torch.equal(copy.cpu(), torch.from_numpy(array))


@pytest.mark.gpu
def test_ahead_is_beside_what_is_queued_and_before_what_follows() -> None:
    upload = Uploader(torch.device("cuda"))
    table = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    step, appended = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(100 * _STEP_CYCLES)
    step.record()
    with upload.ahead():
        table.fill_(1)
        appended.record()
    read = table.clone()
    appended.synchronize()
    assert not step.query(), "it waited for the step"
    assert read.item() == 1
