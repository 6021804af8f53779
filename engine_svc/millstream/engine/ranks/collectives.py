"""What ranks do together: where they meet, and the Group of CPUs (parallel.py), over gloo."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from millstream.engine.hardware import detect
from millstream.engine.parallel import Group

# torch's stubs know half of it. Its process groups are used without torch.distributed's default
# group, of which there is one a process: two models can live in one.
_c10d: Any = _distributed_c10d

_HOST = "127.0.0.1"
# A rank that is lost ends the others at once (children.py); this is for one that hangs.
TIMEOUT = datetime.timedelta(minutes=30)


def make_group(device: str, rank: int, size: int, meet: Callable[[], Any]) -> Group:
    """The group of this process, on its device: rank r has GPU r.

    meet: waits until the others are about to join, and returns torch's Store of all.
    """
    if detect(device).device.type == "cpu":
        return GlooGroup(rank, size, meet)
    from millstream.engine.ranks.gpu_group import GpuGroup  # needs a torch with CUDA

    torch.cuda.set_device(rank)
    return GpuGroup(rank, size, meet)


def open_store(listener: socket.socket, size: int) -> Any:
    """A torch Store where ranks meet, on a socket that listens already and is taken over."""
    port = listener.getsockname()[1]
    return _c10d.TCPStore(
        _HOST,
        port,
        size,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def enter_store(port: int, size: int) -> Any:
    """The store that another process opened."""
    return _c10d.TCPStore(_HOST, port, size, timeout=TIMEOUT, wait_for_workers=False)


def prefixed(store: Any, name: str) -> Any:
    """A part of a store."""
    return _c10d.PrefixStore(name, store)


class GlooGroup:
    """A Group of CPU processes, or threads, of one machine."""

    device_bytes = 0

    def __init__(self, rank: int, size: int, meet: Callable[[], Any]) -> None:
        self.rank = rank
        self.size = size
        self._meet = meet

    def join(self, hidden_size: int) -> None:
        self._group = gloo(self._meet(), self.rank, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def mailboxes(self, x: Tensor) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        self._group.allgather([list(gathered)], [x]).wait()
        return gathered

    def from_first(self, token_ids: Tensor) -> Tensor:
        self._group.broadcast([token_ids], _c10d.BroadcastOptions()).wait()
        return token_ids

    def smallest(self, value: int) -> int:
        return smallest(self._group, value)


def gloo(store: Any, rank: int, size: int) -> Any:
    """A process group of one machine's CPUs, which talk over the loopback interface on ports that
    the system chooses."""
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = TIMEOUT
    return _c10d.ProcessGroupGloo(prefixed(store, "gloo"), rank, size, options)


def smallest(group: Any, value: int) -> int:
    options = _c10d.AllreduceOptions()
    options.reduceOp = _c10d.ReduceOp.MIN
    found = torch.tensor([value])
    group.allreduce([found], options).wait()
    return int(found)
