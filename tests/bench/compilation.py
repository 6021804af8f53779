"""Compiles kernels for Hopper on a machine without a GPU, or before one is used."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Collection
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from millstream.kernels import pdl


class Hopper:
    """Stands in for a driver; only the target of the compiler is asked for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    """In this process, launches compile, and do not run."""
    triton.runtime.driver.set_active(Hopper())
    pdl.options = lambda device: {"PDL": True, "launch_pdl": True}
    triton.runtime.jit.JITFunction.__getitem__ = lambda self, grid: functools.partial(
        self.run, grid=grid, warmup=True
    )


def compile_in_parallel(launch: Callable[..., Any], jobs: Collection[tuple[Any, ...]]) -> list[Any]:
    """What `launch` returns for each job, its arguments, in processes that pretend."""
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("fork"), initializer=pretend
    ) as pool:
        return list(pool.map(launch, *zip(*jobs, strict=True)))
