"""What the core imports and begins before it knows where the model lies."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any, cast

import pytest

from millstream.engine.startup.preload import open_context


def modules_after(config: str, driver: str = "None") -> set[str]:
    """Which of these a new process has imported once it preloaded, with this as the GPU's driver;
    "key" if the digest of Triton's library is there, or being made."""
    code = f"""
import sys, threading
from millstream.engine.startup import preload
from millstream.engine.config import EngineConfig
preload._gpu_driver = lambda: {driver}
before_s = sys.getswitchinterval()
preload.preload(EngineConfig({config}))
assert sys.getswitchinterval() == before_s
found = {{"torch", "triton", "millstream.engine.runner"}} & set(sys.modules)
names = {{thread.name for thread in threading.enumerate()}}
if "triton" in found:
    from triton.runtime.cache import triton_key
    if "triton-key" in names or triton_key.cache_info().currsize:
        found.add("key")
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_without_a_gpu_there_is_no_triton() -> None:
    assert modules_after("") == {"torch", "millstream.engine.runner"}


@pytest.mark.parametrize(
    "config",
    ['runner="instant"', 'runner="tests.fake_runners:echo"', "tensor_parallel_size=2"],
)
def test_what_needs_no_torch_or_imports_it_later_waits_for_nothing(config: str) -> None:
    assert modules_after(config, "object()") == set()


def test_with_a_gpu_tritons_digest_is_made_beside_the_imports() -> None:
    """The driver is no such thing: what fails beside the imports does not matter."""
    pytest.importorskip("triton")
    everything = {"torch", "triton", "millstream.engine.runner", "key"}
    assert modules_after("", "object()") == everything
    assert modules_after('device="cpu"', "object()") == everything - {"triton", "key"}
    without = modules_after('attention_backend="torch"', "object()")
    assert without == everything - {"triton", "key"}


class Driver:
    """Calls of a CUDA driver, of which one may fail."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 100 if name == self._failing else 0

        return call


def test_the_context_is_made_in_three_calls_and_stops_at_an_error() -> None:
    calls = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    driver = Driver()
    assert open_context(cast(ctypes.CDLL, driver))
    assert driver.calls == calls
    for number, failing in enumerate(calls):
        driver = Driver(failing)
        assert not open_context(cast(ctypes.CDLL, driver))
        assert driver.calls == calls[: number + 1]
