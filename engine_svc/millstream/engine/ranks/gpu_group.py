"""A Group of GPUs of one host: sums of a step go through torch's symmetric memory, large ones and
what is no sum through NCCL. All of it can be captured in CUDA graphs.

Sums that a norm follows are the kernel's that computes it (mailboxes), up to some size. Of others,
one shot (each rank reads all of the others' parts) is best while latency counts, two shots (each
rank sums its share, then gathers) while bandwidth does (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millstream.engine.hardware import LoadError
from millstream.engine.ranks.collectives import TIMEOUT, gloo, prefixed, smallest
from millstream.kernels.sum_add_rms_norm import Mailboxes

# Of a sum, times the ranks: each reads all parts of it, so more ranks go over to two shots earlier.
_ONE_SHOT_BYTES = 256 << 10
_TWO_SHOT_BYTES = 16 << 20
_MAILBOX_BYTES = 8 << 20  # of a sum through mailboxes, times the ranks: each sends to all others
_ALIGNMENT = 16
_SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)  # what torch's kernels add


class GpuGroup:
    """A Group; this process's GPU is torch's current one. One a process: symmetric memory knows a
    group by torch.distributed's name for it, so this is the process's default group."""

    def __init__(self, rank: int, size: int, meet: Callable[[], Any]) -> None:
        self.rank = rank
        self.size = size
        self._meet = meet
        self.device_bytes = 0
        self._one_shot_bytes = _ONE_SHOT_BYTES // size

    def join(self, hidden_size: int) -> None:
        """Raises LoadError if this process has a group already."""
        if dist.is_initialized():
            raise LoadError("tensor_parallel_size: this process has a torch.distributed group")
        store = self._meet()
        self._host = gloo(store, self.rank, self.size)
        device = torch.device("cuda", torch.cuda.current_device())
        before_bytes = _bytes_beside_torch(device)
        dist.init_process_group(
            "nccl",
            store=prefixed(store, "nccl"),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=device,
        )
        group = dist.group.WORLD
        assert group is not None
        self._name = group.group_name
        self._allocate(hidden_size, device, group)
        # Communicators and kernels are made now: none may be while a graph is captured.
        for dtype in _SYMMETRIC_DTYPES:
            for num_bytes in (self._one_shot_bytes, 2 * self._one_shot_bytes, 2 * _TWO_SHOT_BYTES):
                self.all_reduce(
                    torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
                )
        self.all_gather(torch.zeros(_TWO_SHOT_BYTES // 4, device=device))
        torch.cuda.synchronize(device)
        self.device_bytes = max(_bytes_beside_torch(device) - before_bytes, 0)

    def _allocate(self, hidden_size: int, device: torch.device, group: dist.ProcessGroup) -> None:
        # Two pieces: a sum may still lie in the one while little is gathered through the other.
        sums, _ = _symmetric_memory(_TWO_SHOT_BYTES, device, group)
        gathers, _ = _symmetric_memory(self._one_shot_bytes, device, group)
        # Where a sum is left in it (two shots), it is used before the next one on the stream.
        self._sums = {dtype: sums.view(dtype) for dtype in _SYMMETRIC_DTYPES}
        self._gathers = gathers.view(torch.float32)

        max_rows = _MAILBOX_BYTES // (2 * hidden_size * self.size)
        num_bytes = Mailboxes.num_bytes(self.size, hidden_size, max_rows)
        self._mail, addresses = _symmetric_memory(num_bytes, device, group)
        Mailboxes.empty(self._mail)
        self._mailboxes = Mailboxes.create(
            torch.tensor(addresses, device=device),
            rank=self.rank,
            hidden_size=hidden_size,
            max_rows=max_rows,
        )

    def mailboxes(self, x: Tensor) -> Mailboxes | None:
        fits = x.dtype is torch.bfloat16 and self._mailboxes.holds(x)
        return self._mailboxes if fits else None

    def all_reduce(self, x: Tensor) -> Tensor:
        num_bytes = x.nbytes
        if not num_bytes:  # no launch is that small
            return x
        if not self._is_symmetric(x):
            dist.all_reduce(x)
            return x
        buffer = self._sums[x.dtype][: x.numel()].view(x.shape)
        if num_bytes <= self._one_shot_bytes:
            return _one_shot(buffer, x, self._name)
        return _two_shot(buffer.copy_(x), self._name)

    def all_gather(self, x: Tensor) -> Tensor:
        """Little of it as a sum: every rank's part of it is zero but its own."""
        shape = (self.size, *x.shape)
        if x.dtype is torch.float32 and x.nbytes * self.size <= self._one_shot_bytes:
            parts = x.new_zeros(shape)
            parts[self.rank] = x
            buffer = self._gathers[: parts.numel()].view(shape)
            return _one_shot(buffer, parts, self._name)
        gathered = x.new_empty(shape)
        dist.all_gather_into_tensor(gathered.view(-1), x.reshape(-1))
        return gathered

    def from_first(self, token_ids: Tensor) -> Tensor:
        """As a sum too: ids are exact in float32."""
        if 4 * token_ids.numel() > self._one_shot_bytes:
            dist.broadcast(token_ids, 0)
            return token_ids
        x = token_ids.float()
        if self.rank > 0:
            x.zero_()
        buffer = self._gathers[: x.numel()].view(x.shape)
        return _one_shot(buffer, x, self._name).long()

    def smallest(self, value: int) -> int:
        return smallest(self._host, value)

    def _is_symmetric(self, x: Tensor) -> bool:
        if x.dtype not in _SYMMETRIC_DTYPES or x.nbytes > _TWO_SHOT_BYTES:
            return False
        return x.nbytes <= self._one_shot_bytes or x.nbytes % (_ALIGNMENT * self.size) == 0


def _bytes_beside_torch(device: torch.device) -> int:
    """Of the GPU's memory, what is taken and not by torch's allocator in this process."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def _symmetric_memory(
    num_bytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Memory that all ranks reach, and the address of each rank's."""
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    return buffer, symmetric_memory.rendezvous(buffer, group).buffer_ptrs


def _one_shot(buffer: Tensor, x: Tensor, group_name: str) -> Tensor:
    summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group_name)
    return summed


def _two_shot(buffer: Tensor, group_name: str) -> Tensor:
    summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group_name)
    return summed
