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
- Before its wait a kernel touches weights and the step's inputs: what was complete when some later
  kernel without PDL began, or one that publishes had waited; and what has been published. Nothing
  else: no activation, no store, no atomic. The kernels just before may still be waiting. What each
  reads is listed in tests/kernels/early_reads.py, and tested.
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
def publish(PDL: tl.constexpr) -> None:
    """In place of launch_dependents, at the end: what this kernel has stored, all later ones may
    read before their wait. None of them starts before every program here has stored."""
    if PDL:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(PDL: tl.constexpr) -> None:
    """Returns when the kernels before this one are complete and what they wrote is visible."""
    if PDL:
        gdc_wait()


def options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel's launch: the constexpr PDL, and the launch's own attribute."""
    if is_supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}  # the interpreter, and GPUs before Hopper


def is_supported(device: torch.device) -> bool:
    """Whether it is a GPU that has this: Hopper and later."""
    return device.type == "cuda" and _supported(device.index)


@functools.cache
def _supported(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)
