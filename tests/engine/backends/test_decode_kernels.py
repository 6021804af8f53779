"""Which kernels a decode step's graph holds beside the layers', in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import make_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from millstream.engine.config import EngineConfig
from millstream.engine.graphs import Kind
from millstream.engine.runner import create


class Launches(TorchDispatchMode):
    """The names of Triton's kernels, and of torch's operations that would be a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.names.append("product" if "linear" in name or name in ("mm", "addmm") else name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    launches = Launches()
    launch: Callable[..., None] = interpreter.GridExecutor.__call__

    def spy(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        launches.names.append(self.fn.__name__)
        with _disable_current_modes():
            launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", spy)
    with launches:
        yield launches.names


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (Kind.PLAIN, ["_masses_kernel", "_choice_kernel"]),
        (Kind.FILTERED, ["_thresholds_kernel", "_masses_kernel", "_choice_kernel"]),
        (Kind.LOGITS, ["copy_"]),
    ],
)
def test_two_kernels_before_the_layers_and_sampling_after_them(
    kind: Kind, last: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of torch's would break the chain of dependent launches (kernels/pdl.py)."""
    folder = make_tiny_model(tmp_path, num_hidden_layers=1)
    config = EngineConfig(
        device="cpu", attention_backend="triton", max_num_seqs=4, kv_cache_bytes=1 << 20
    )
    runner = create(config, folder)
    steps = runner._steps
    slots = torch.full((4,), steps.slots.padding_slot)
    with torch.inference_mode():
        steps.decode(slots, kind)  # what is made once
        with counted(monkeypatch) as names:
            steps.decode(slots, kind)
    first = ["_read_kernel", "_build_work_list_kernel", "_rms_norm_kernel", "product"]
    last = ["_rms_norm_kernel", "product", *last]
    assert names[: len(first)] == first and names[-len(last) :] == last
    assert [name for name in names if not name.endswith("_kernel")] == (
        ["product"] * 5 + ["copy_"] * (kind is Kind.LOGITS)
    )
