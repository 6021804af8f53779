"""What Python costs a decode step, without a model: scheduler, slots, results, in CPU time.

    python3 -m tests.bench.step_overhead [--batch 256]

The device's part is a stub, so this is what a GPU has to hide; with real graphs, add a launch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch

from millstream.engine.core import EngineCore
from millstream.engine.graphs import DecodeGraphs, Kind, batch_sizes
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.request import Request, Sampling
from millstream.engine.slots import SlotTable
from millstream.engine.stepping.results import CpuResults


class StubGraph:
    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.output = step()

    def replay(self) -> None:
        pass

    def micros(self) -> int:
        return 1


class StubRunner:
    """ModelRunner's launch() with a device that takes no time."""

    def __init__(
        self, max_num_seqs: int, *, vocab_size: int = 1000, max_num_batched_tokens: int = 1 << 20
    ) -> None:
        self.info = RunnerInfo(
            vocab_size=vocab_size,
            eos_token_ids=(0,),
            max_model_len=4096,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=64,
            num_blocks=max_num_seqs * 64,
            max_in_flight=2,
        )
        cpu = torch.device("cpu")
        self._slots = SlotTable(
            max_num_seqs=max_num_seqs, max_model_len=4096, block_size=64, device=cpu
        )
        self._graphs = DecodeGraphs(
            lambda slots, _: torch.full((len(slots),), 5),
            StubGraph,
            sizes=batch_sizes(max_num_seqs),
            kernels_of=lambda size: None,
            padding_slot=self._slots.padding_slot,
            device=cpu,
        )
        self._results = CpuResults()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        layout = self._slots.apply(plan)
        assert not layout.host.special
        if plan.chunks:
            token_ids = torch.full((len(layout.sample_slots),), 5)
        else:
            token_ids = self._graphs(layout, Kind.PLAIN)
        self._slots.note_advance(layout)
        self._results.put(plan.step, token_ids)

    def collect(self) -> StepResult:
        return self._results.take()

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    arguments = parser.parse_args()
    core = EngineCore(StubRunner(arguments.batch), prefix_caching=True)
    rng = random.Random(0)
    for key in range(arguments.batch):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(100, 1024))]
        sampling = Sampling(max_tokens=rng.randint(600, 1024), temperature=0.6, ignore_eos=True)
        core.submit(Request(key=key, token_ids=prompt, sampling=sampling))
    core.step()
    times = []
    for _ in range(500):
        started = time.thread_time()
        core.step()
        times.append(1e3 * (time.thread_time() - started))
    quantiles = statistics.quantiles(times, n=10)
    figures = {"p10_ms": quantiles[0], "p50_ms": quantiles[4], "p90_ms": quantiles[8]}
    print(json.dumps({"bench": "step_overhead", "batch": arguments.batch, **figures}))


if __name__ == "__main__":
    main()
