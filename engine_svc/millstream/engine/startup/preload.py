"""What the core does before it knows where the model lies: the imports, and beside them what needs
the GPU's driver or the processor more than Python.

    main thread:  triton, then torch and the runner: 1 to 3 s
    beside it:    the GPU's context; a digest of Triton's library, 400 MB, which is a part of the
                  name of every kernel in its cache
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator

from millstream.engine.config import EngineConfig

_CUDA_SUCCESS = 0
# How long the main thread may keep Python from the others. Python's own 5 ms, twice for each MB of
# the digest, would be longer than the imports.
_SWITCH_S = 0.0005


def preload(config: EngineConfig) -> None:
    """Imports what loading the model will need. What cannot be imported is left to the loading,
    which fails over it with a clear line. One that several ranks share is not for us: its ranks
    start first, and import together."""
    if config.runner != "model" or config.tensor_parallel_size > 1:
        return
    with contextlib.suppress(Exception), _frequent_switches():
        if config.device != "cpu" and (driver := _gpu_driver()) is not None:
            _beside(lambda: open_context(driver), name="gpu-context")
            if config.attention_backend != "torch":
                _preload_triton()
        importlib.import_module("millstream.engine.runner")
    # Modules live to the end: never look at them again when collecting garbage.
    gc.freeze()


def open_context(driver: ctypes.CDLL, index: int = 0) -> bool:
    """Makes a GPU's primary context, which torch then finds; whether that worked."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == _CUDA_SUCCESS
        and driver.cuDeviceGet(ctypes.byref(device), index) == _CUDA_SUCCESS
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == _CUDA_SUCCESS
    )


def _gpu_driver() -> ctypes.CDLL | None:
    """NVIDIA's driver; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _preload_triton() -> None:
    from triton.runtime.cache import triton_key

    _beside(triton_key, name="triton-key")  # it remembers its result


@contextlib.contextmanager
def _frequent_switches() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def _beside(work: Callable[[], object], *, name: str) -> None:
    """Runs work that may as well fail in a thread: it will be done again where it is needed."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=run, name=name, daemon=True).start()
