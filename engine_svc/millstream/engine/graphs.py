"""Decode steps as CUDA graphs: everything from the slots' state to their next, in one launch.

A graph has a fixed batch size; a batch takes the next larger one, filled up with the padding slot.
Its only input is which slots decode, in a buffer on the device that is written when the batch
changes. Graphs are recorded largest first into one memory pool, which the others then fit in.

Recording takes as long as five steps or ten, while what fills up the products' tiles costs hardly
anything. So until a size has a graph, a larger one with the same kernels and tiles stands in: the
smallest that is recorded, or else the largest, which then is.

What a size costs is cuBLAS's choice, too, which for some numbers of rows is a bad one: such a step
takes longer than one of more sequences (tests/bench/cublas_sizes.py). So once all are recorded they
are timed, and a size that costs more than a larger one near it is left to that.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from millstream.engine.stepping.batch_layout import BatchLayout, HostLayout

if TYPE_CHECKING:
    from millstream.engine.parallel import Group


class Kind(enum.Enum):
    """What a graph does after the forward."""

    PLAIN = enum.auto()  # samples, without filters, and advances the slots
    FILTERED = enum.auto()  # the same with filters
    LOGITS = enum.auto()  # nothing: the logits are edited or scored before tokens are sampled


def kind_of(host: HostLayout) -> Kind:
    """That of a graph which samples the tokens of a step."""
    return Kind.FILTERED if host.has_filters else Kind.PLAIN


_FEW_ROWS, _TILE_ROWS = 16, 64  # of products' tiles
_MANY_STEPS = 256  # with a stand-in: then a size gets a graph of its own
_NEAR, _WORTH = 24, 0.98  # a larger size by so much at most is taken for so much less time
_TIMED_REPLAYS = 3

# Computes a decode step of slots [n]; returns the sampled ids [n], or the logits [n, V]. Reads
# nothing on the host but n.
Decode = Callable[[torch.Tensor, Kind], torch.Tensor]


class Graph(Protocol):
    """A recorded step."""

    @property
    def output(self) -> torch.Tensor:
        """What the step returned; each replay overwrites it."""

    def replay(self) -> None: ...

    def micros(self) -> int:
        """What a replay takes while the device does nothing else; over ranks one number for all,
        which replay it together."""


# Records a step, which it computes without an effect on slots other than the padding slot.
Record = Callable[[Callable[[], torch.Tensor]], Graph]


def batch_sizes(largest: int) -> list[int]:
    """The sizes that are worth a graph, ascending, `largest` among them."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return [*(size for size in sizes if size < largest), largest]


def stand_ins(size: int, sizes: Sequence[int], kernels_of: Callable[[int], Hashable]) -> list[int]:
    """Of `sizes`, ascending from `size` on, those whose step launches the same kernels, and whose
    products have as many tiles. One sequence has only itself: its products are kernels for a row.
    """
    if size == 1:
        return [1]
    rows = _FEW_ROWS if size <= _FEW_ROWS else -(-size // _TILE_ROWS) * _TILE_ROWS
    kernels = kernels_of(size)
    return [s for s in sizes if size <= s <= rows and kernels_of(s) == kernels]


def quickest(micros: Mapping[int, int]) -> dict[int, int]:
    """By size: itself, or the larger one near it that takes less. micros: by size, ascending."""
    chosen = {}
    for size in micros:
        near = (other for other in micros if size <= other <= size + _NEAR)
        best = min(near, key=lambda other: micros[other])
        chosen[size] = best if micros[best] < _WORTH * micros[size] else size
    return chosen


class DecodeGraphs:
    """The graphs of one engine; used by one thread."""

    def __init__(
        self,
        decode: Decode,
        record: Record,
        *,
        sizes: Sequence[int],
        kernels_of: Callable[[int], Hashable],
        padding_slot: int,
        device: torch.device,
    ) -> None:
        """kernels_of: as SlotOps.kernels_of."""
        self._decode = decode
        self._record = record
        self._sizes = sizes
        self._padding_slot = padding_slot
        self._graphs: dict[tuple[int, Kind], Graph] = {}
        self._uses: Counter[tuple[int, Kind]] = Counter()  # of stand-ins, by whom they stood in for
        self._stand_ins = {size: stand_ins(size, sizes, kernels_of) for size in sizes}
        self._micros: dict[int, int] = {}  # of the plain graphs that were timed
        self._chosen = {size: size for size in sizes}  # as quickest(), once all were
        # In which they are recorded ahead.
        order = sizes[-1], sizes[0], *(each[-1] for each in self._stand_ins.values()), *sizes
        self._order = tuple(dict.fromkeys(order))
        self._slots = torch.full((sizes[-1],), padding_slot, device=device)
        self._layout: BatchLayout | None = None  # whose slots are in the buffer

    def record(self, is_time_left: Callable[[], bool]) -> None:
        """Records the largest graph and that of a single sequence, then others while there is time;
        the rest are recorded when they are needed, or by record_next."""
        self.record_next()
        self.record_next()
        while is_time_left() and self.record_next():
            pass

    def record_next(self) -> bool:
        """Records the next graph that is not yet, or times the next; False if all are. First the
        largest and that of one sequence, then those that stand in for others."""
        size = next((size for size in self._order if (size, Kind.PLAIN) not in self._graphs), None)
        if size is not None:
            self._graph(size, Kind.PLAIN)
            return True
        return self._time_next()

    def _time_next(self) -> bool:
        size = next((size for size in self._sizes if size not in self._micros), None)
        if size is None:
            return False
        self._nobody_decodes()
        self._micros[size] = self._graphs[size, Kind.PLAIN].micros()
        if size == self._sizes[-1]:
            self._chosen = quickest(self._micros)
        return True

    def __call__(self, layout: BatchLayout, kind: Kind) -> torch.Tensor:
        """Runs a step of decodes alone; its output, which the next call overwrites."""
        slots = layout.slots
        graph = self._graph(self._size_for(len(slots), kind), kind)
        if layout is not self._layout:
            self._slots[: len(slots)].copy_(slots)
            self._slots[len(slots) :].fill_(self._padding_slot)
            self._layout = layout
        graph.replay()
        return graph.output[: len(slots)]

    def _size_for(self, batch: int, kind: Kind) -> int:
        """That of the graph for a batch; over ranks the same on each, as their steps are."""
        size = self._chosen[self._sizes[bisect.bisect_left(self._sizes, batch)]]
        if (size, kind) in self._graphs or self._uses[size, kind] == _MANY_STEPS:
            return size
        self._uses[size, kind] += 1
        stand_ins = self._stand_ins[size]
        return next((other for other in stand_ins if (other, kind) in self._graphs), stand_ins[-1])

    def _graph(self, size: int, kind: Kind) -> Graph:
        graph = self._graphs.get((size, kind))
        if graph is None:
            self._nobody_decodes()  # recording begins with a step that counts
            graph = self._record(functools.partial(self._decode, self._slots[:size], kind))
            self._graphs[size, kind] = graph
        return graph

    def _nobody_decodes(self) -> None:
        self._slots.fill_(self._padding_slot)
        self._layout = None


class CudaGraphRecorder:
    """Records graphs on the current stream, all in one memory pool: one may run at a time."""

    def __init__(self, group: Group | None = None) -> None:
        """group: the ranks that record and replay with this one."""
        self._pool = torch.cuda.graph_pool_handle()
        self._group = group

    def __call__(self, step: Callable[[], torch.Tensor]) -> Graph:
        step()  # compiles kernels, gives libraries their workspaces
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = step()
        finally:
            graph.capture_end()
        return _CudaGraph(graph, output, self._group)


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    group: Group | None

    def replay(self) -> None:
        self.graph.replay()

    def micros(self) -> int:
        self.replay()  # the first one of a graph takes longer
        times = []
        for _ in range(_TIMED_REPLAYS):
            start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            start.record()
            self.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        micros = round(1000 * min(times))
        return micros if self.group is None else self.group.smallest(micros)
