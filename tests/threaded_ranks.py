"""Ranks that are threads of this process: `--runner tests.threaded_ranks:create`.

The same ModelRunners, gloo and plans as int64 words as in processes, without these: for tests of
what ranks compute.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from millstream.engine.config import EngineConfig
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.ranks.collectives import GlooGroup
from millstream.engine.ranks.plan_codec import PREPARE_AHEAD, PlanEncoder
from millstream.engine.ranks.process import follow
from millstream.engine.ranks.shard_sampling import RowNeeds
from millstream.engine.runner import ModelRunner


class ThreadedRanks:
    """A plan.Runner; rank 0 is the caller's thread."""

    def __init__(self, config: EngineConfig, model_dir: Path | None) -> None:
        size = config.tensor_parallel_size
        self._num_threads = torch.get_num_threads()
        store = dist.HashStore()
        self.others: list[ModelRunner] = []
        self._queues: list[queue.SimpleQueue[array[int] | None]]
        self._queues = [queue.SimpleQueue() for _ in range(1, size)]
        self._threads = []
        for rank in range(1, size):
            group = GlooGroup(rank, size, lambda: store)
            arguments = (config, model_dir, group, self._queues[rank - 1])
            self._threads.append(threading.Thread(target=self._run, args=arguments, daemon=True))
            self._threads[-1].start()
        group = GlooGroup(0, size, lambda: store)
        self.first = ModelRunner(config, model_dir, group=group)
        self.info: RunnerInfo = self.first.info
        self._needs = RowNeeds(self.info.max_num_seqs)
        self._encoder = PlanEncoder()
        self.num_whole = 0  # steps whose rows were gathered

    def wait_loaded(self) -> None:
        """Until `others` are all there."""
        while len(self.others) < len(self._threads):
            time.sleep(0.001)

    def _run(
        self,
        config: EngineConfig,
        model_dir: Path | None,
        group: GlooGroup,
        plans: queue.SimpleQueue[array[int] | None],
    ) -> None:
        runner = ModelRunner(config, model_dir, group=group)
        self.others.append(runner)

        def next_record() -> array[int]:
            record = plans.get()
            if record is None:
                raise EOFError
            return record

        with contextlib.suppress(EOFError):
            follow(runner, next_record)
        runner.close()

    def launch(self, plan: Plan) -> None:
        if self._needs.whole_rows(plan):
            plan = replace(plan, whole_rows=True)
            self.num_whole += 1
        self._tell(self._encoder.encode(plan))
        self.first.launch(plan)

    def prepare_ahead(self) -> bool:
        self._tell(PREPARE_AHEAD)
        return self.first.prepare_ahead()

    def _tell(self, words: Sequence[int]) -> None:
        record = array("q", words)
        for each in self._queues:
            each.put(record)

    def collect(self) -> StepResult:
        return self.first.collect()

    def close(self) -> None:
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join()
        self.first.close()
        torch.set_num_threads(self._num_threads)


def create(config: EngineConfig, model_dir: Path | None) -> ThreadedRanks:
    return ThreadedRanks(config, model_dir)
