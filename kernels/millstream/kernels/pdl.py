"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

On Hopper this hides a launch's latency (0.97 to 0.53 us per kernel inside a CUDA graph) and lets a
kernel fetch its weights while its predecessor finishes. A kernel takes part like this:

    @triton.jit
    def _kernel(..., PDL: tl.constexpr):
        launch_dependents(PDL)        # first: the next kernel may start once all programs said so
        weight = tl.load(weight_ptr)  # weights, and what the kernel computes from its arguments
        wait(PDL)                     # the kernels before are complete, their writes visible
        ...                           # everything else, every store among it

    _kernel[grid](..., **pdl.options(x.device))

What must hold, or results are wrong now and then:
- Before its wait a kernel touches what no kernel of the step writes (weights) and nothing else: no
  activation, no slot table or length, no store, no atomic.
- Every program waits, also one that has nothing to do. The wait is for the kernel just before;
  that one has waited in turn, so everything older is complete too, unless one link is left out.
- Every kernel of a step takes part, or the gap is back at the one that does not. It stays correct:
  a kernel launched without PDL starts when all before it are complete.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def launch_dependents(PDL: tl.constexpr) -> None:
    """Lets the next kernel start early; nothing of this one is visible to it before its wait."""
    if PDL:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(PDL: tl.constexpr) -> None:
    """Returns when the kernels before this one are complete and what they wrote is visible."""
    if PDL:
        gdc_wait()


def options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel's launch: the constexpr PDL, and the launch's own attribute."""
    if device.type == "cuda" and _supported(device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}  # the interpreter, and GPUs before Hopper


@functools.cache
def _supported(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)
