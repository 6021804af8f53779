"""Which CUDA graphs are recorded, and when; what a graph computes is another test's business."""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fake_runners import FakeRunner

from millstream.engine import chunk_graphs
from millstream.engine.chunk_graphs import ChunkGraphs, decode_sizes, token_sizes
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.core_process import Commands, next_command
from millstream.engine.graphs import DecodeGraphs, Kind, batch_sizes, quickest, stand_ins
from millstream.engine.records import AskStats
from millstream.engine.stepping.batch_layout import BatchLayout

CPU = torch.device("cpu")
BAD_SIZES = (40, 64, 72, 136, 152, 160)


class FakeGraph:
    """Its output is what its input is then: a slot for each row."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.output = step()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def micros(self) -> int:
        """As long as it has rows; some sizes are bad."""
        assert len(set(self.output.tolist())) == 1, "of no sequence"
        rows = len(self.output)
        return 100 * rows * (2 if rows in BAD_SIZES else 1)


def decode_graphs(seen: list[int], largest: int = 20) -> DecodeGraphs:
    def decode(slots: torch.Tensor, kind: Kind) -> torch.Tensor:
        assert set(slots.tolist()) == {largest}, "of no sequence"
        seen.append(len(slots))
        return slots

    return DecodeGraphs(
        decode,
        FakeGraph,
        sizes=batch_sizes(largest),
        kernels_of=lambda size: size > 96,
        padding_slot=largest,
        device=CPU,
    )


def batch_of(size: int) -> Any:
    return SimpleNamespace(slots=torch.arange(size))


def test_at_start_the_largest_and_the_smallest_are_recorded_then_others_in_time() -> None:
    seen: list[int] = []
    left = iter([True, True, False])
    decode_graphs(seen).record(lambda: next(left))
    assert seen == [20, 1, 16, 2]


def test_the_rest_is_recorded_one_by_one_those_that_stand_in_for_others_first() -> None:
    seen: list[int] = []
    graphs = decode_graphs(seen, 160)
    graphs.record(lambda: False)
    while graphs.record_next():
        pass
    assert seen[:8] == [160, 1, 16, 64, 96, 128, 2, 4]
    assert sorted(seen) == batch_sizes(160)


@pytest.mark.parametrize("largest", [1, 2, 3, 16, 17, 20, 33, 64, 65, 200, 257, 300, 1000])
def test_what_stands_in_for_a_size(largest: int) -> None:
    def kernels_of(size: int) -> bool:
        return 4 < size <= 40 or size > 90  # as attention's: what is left is chosen again

    sizes = batch_sizes(largest)
    for size in sizes:
        others = stand_ins(size, sizes, kernels_of)
        assert others[0] == size and others == sorted(others) and {*others} <= {*sizes}
        assert {kernels_of(other) for other in others} == {kernels_of(size)}
        last = others[-1]
        assert stand_ins(last, sizes, kernels_of) == [last], "it has a graph of its own at once"
        assert last == 1 if size == 1 else last <= 16 if size <= 16 else last - size < 64
    if largest == 300:
        last_ones = sorted({stand_ins(size, sizes, kernels_of)[-1] for size in sizes})
        assert last_ones == [1, 4, 16, 40, 64, 88, 128, 192, 256, 300]


def test_a_size_without_a_graph_takes_a_larger_ones_until_it_is_used_often() -> None:
    seen: list[int] = []
    graphs = decode_graphs(seen, 128)
    graphs.record(lambda: False)
    assert graphs(batch_of(35), Kind.PLAIN).tolist() == list(range(35))
    assert seen == [128, 1, 64], "the largest with the same tiles serves more"
    for _ in range(255):
        graphs(batch_of(35), Kind.PLAIN)
    for size in (41, 60, 64, 120, 128):
        graphs(batch_of(size), Kind.PLAIN)
    assert seen == [128, 1, 64]
    graphs(batch_of(35), Kind.PLAIN)
    assert seen == [128, 1, 64, 40]
    graphs(batch_of(30), Kind.PLAIN)
    graphs(batch_of(33), Kind.FILTERED)
    assert seen == [128, 1, 64, 40, 64], "each kind has its own"
    own: Any = graphs._graph(40, Kind.PLAIN)
    assert own.replays == 2, "the smallest that there is"


def test_a_size_is_left_to_a_larger_one_near_it_that_takes_less() -> None:
    times = {8: 100, 16: 110, 24: 98, 32: 97, 40: 300, 48: 120, 64: 90, 72: 400, 80: 500, 112: 200}
    left = {size: other for size, other in quickest(times).items() if other != size}
    assert left == {8: 32, 16: 32, 40: 64, 48: 64}, "2 % less, and no more than 24 rows more"
    assert quickest({1: 5}) == {1: 1}


def test_sizes_are_timed_once_all_are_recorded_then_bad_ones_are_left_to_others() -> None:
    seen: list[int] = []
    graphs = decode_graphs(seen, 160)
    for _ in range(2 * len(batch_sizes(160)) - 1):
        assert graphs.record_next()
    layout = batch_of(130)
    graphs(layout, Kind.PLAIN)  # in the midst of it
    own: Any = graphs._graph(136, Kind.PLAIN)
    assert own.replays == 1, "not all are timed yet"
    assert graphs.record_next() and not graphs.record_next()
    assert sorted(seen) == batch_sizes(160), "each is recorded once"
    for batch, size in ((130, 144), (137, 144), (145, 152), (153, 160), (33, 48), (60, 80), (8, 8)):
        before = {key: graph.replays for key, graph in replays_of(graphs).items()}
        assert graphs(batch_of(batch), Kind.PLAIN).tolist() == list(range(batch))
        ((taken, _),) = (k for k, g in replays_of(graphs).items() if g.replays != before[k])
        assert taken == size
    assert graphs(layout, Kind.FILTERED).tolist() == list(range(130))
    assert seen[-1] == 160, "other kinds have the same choice, and what stands in for that"


def replays_of(graphs: DecodeGraphs) -> dict[tuple[int, Kind], Any]:
    recorded: Any = graphs._graphs
    return dict(recorded)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("largest", [3, 33, 70, 300])
def test_any_batches_in_any_order(largest: int, seed: int) -> None:
    """Layouts that come again, of any kind, between recordings: the smallest graph that there is of
    those alike, the batch in it, at most one recording a step, and after 256 steps its own."""
    randoms = random.Random(seed)
    sizes = batch_sizes(largest)

    def alike(size: int) -> tuple[int, int]:
        """Kernels, some chosen again for larger sizes, and tiles."""
        return size // 24 % 2, 0 if size == 1 else 1 if size <= 16 else 2 + (size - 1) // 64

    graphs = DecodeGraphs(
        lambda slots, kind: slots,
        FakeGraph,
        sizes=sizes,
        kernels_of=lambda size: alike(size)[0],
        padding_slot=largest,
        device=CPU,
    )
    recorded: dict[tuple[int, Kind], Any] = graphs._graphs  # type: ignore[assignment]
    graphs.record(lambda: False)
    layouts = [batch_of(randoms.randint(1, largest)) for _ in range(6)]
    steps: Counter[tuple[int, Kind]] = Counter()
    for _ in range(4000):
        if randoms.random() < 0.002:
            graphs.record_next()
        layout, kind = randoms.choice(layouts), randoms.choice([*Kind])
        batch = len(layout.slots)
        own = min(size for size in sizes if size >= batch)
        before = {key: graph.replays for key, graph in recorded.items()}
        assert graphs(layout, kind).tolist() == list(range(batch))
        ((size, taken),) = (k for k, g in recorded.items() if g.replays != before.get(k, 0))
        assert recorded[size, taken].output.tolist() == [*range(batch), *[largest] * (size - batch)]
        assert taken is kind and size >= own and alike(size) == alike(own)
        assert not [
            s for s, k in before if k is kind and own <= s < size and alike(s) == alike(own)
        ]
        steps[own, kind] += 1
        assert size == own or steps[own, kind] <= 256
        assert len(recorded) <= len(before) + 1
    while graphs.record_next():
        pass
    assert {size for size, kind in recorded if kind is Kind.PLAIN} == {*sizes}


def test_what_fills_up_a_batch_is_the_padding_slot_whichever_graph_it_takes() -> None:
    """A layout that takes a small graph, and then a larger one of another kind."""
    graphs = decode_graphs([], 128)
    graphs.record(lambda: False)
    taken = ((Kind.PLAIN, 40), (Kind.LOGITS, 64))
    outputs = [graphs._graph(size, kind).output for kind, size in taken]
    graphs(batch_of(128), Kind.PLAIN)
    layout = batch_of(35)
    for (kind, size), output in zip(taken, outputs, strict=True):
        graphs(layout, kind)
        assert output.tolist() == [*range(35), *[128] * (size - 35)]


def test_chunks_with_the_fewest_decodes_are_recorded_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    def compute(layout: BatchLayout) -> torch.Tensor:
        assert not layout.host.has_filters and set(layout.slots.tolist()) == {20}, "of no sequence"
        num_tokens = len(layout.chunk_token_ids)
        seen.append((num_tokens, len(layout.rows) - num_tokens))
        return layout.slots

    monkeypatch.setattr(chunk_graphs, "_MOST_AHEAD", 15)
    graphs = ChunkGraphs(
        compute, FakeGraph, max_tokens=200, max_decodes=20, padding_slot=20, device=CPU
    )
    graphs.record_largest()
    while graphs.record_next():
        pass
    sizes = token_sizes(200)
    assert len(sizes) == 8 and decode_sizes(20) == [0, 16, 20]
    assert seen[:9] == [(200, 20), *((tokens, 0) for tokens in sizes)]
    assert seen[9:] == [(tokens, 16) for tokens in sizes[:6]]  # no more before they are needed


def test_a_step_with_filters_has_a_graph_of_its_own() -> None:
    seen: list[bool] = []

    def compute(layout: BatchLayout) -> torch.Tensor:
        seen.append(layout.host.has_filters)
        return layout.slots

    graphs = ChunkGraphs(
        compute, FakeGraph, max_tokens=64, max_decodes=9, padding_slot=9, device=CPU
    )
    for kind in (Kind.FILTERED, Kind.PLAIN):
        graphs._graph((graphs._bucket(64, 0), kind))
    assert seen == [True, False]


class Preparing(FakeRunner):
    left = 2

    def prepare_ahead(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_a_core_prepares_ahead_if_its_runner_can() -> None:
    def core_of(runner: type[FakeRunner]) -> EngineCore:
        return EngineCore(runner(EngineConfig(), lambda plan: None), prefix_caching=False)

    assert not core_of(FakeRunner).prepare_ahead()
    core = core_of(Preparing)
    assert [core.prepare_ahead() for _ in range(3)] == [True, True, False]


class Endless(FakeRunner):
    """Always finds something to prepare; the third piece takes until a command is there."""

    def __init__(self, commands: Commands) -> None:
        super().__init__(EngineConfig(), lambda plan: None)
        self.commands = commands
        self.calls = 0

    def prepare_ahead(self) -> bool:
        self.calls += 1
        if self.calls == 3:
            self.commands.put(AskStats(token=1))
        return True


def test_a_command_ends_the_preparations() -> None:
    commands: Commands = queue.SimpleQueue()
    runner = Endless(commands)
    core = EngineCore(runner, prefix_caching=False)
    assert next_command(core, commands, quiet_s=0) == AskStats(token=1)
    assert runner.calls == 3


def test_nothing_is_prepared_between_requests_that_follow_each_other() -> None:
    """A piece of it would hold each of them up."""
    commands: Commands = queue.SimpleQueue()
    runner = Endless(commands)
    core = EngineCore(runner, prefix_caching=False)
    for token in range(3):
        threading.Timer(0.02, commands.put, [AskStats(token)]).start()
        assert next_command(core, commands, quiet_s=30) == AskStats(token)
    assert runner.calls == 0
