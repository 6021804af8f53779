"""The runner over all ranks of a model: rank 0 computes here, the others in their processes.

launch(plan)  -> plan_codec -> ring.py -> the others' launch(plan);  rank 0's own launch(plan)

and prepare_ahead() in the same way: all ranks record the same graphs in the same order.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from millstream.engine.config import EngineConfig
from millstream.engine.hardware import LoadError, check_devices
from millstream.engine.parallel import share_of
from millstream.engine.plan import Plan, StepResult
from millstream.engine.ranks.children import RankLost, RankProcesses
from millstream.engine.ranks.collectives import make_group, open_store
from millstream.engine.ranks.plan_codec import PREPARE_AHEAD, PlanEncoder
from millstream.engine.ranks.ring import RingWriter
from millstream.engine.ranks.shard_sampling import RowNeeds
from millstream.engine.request import GrammarSpec
from millstream.engine.runner import ModelRunner
from millstream.engine.startup import runner_parts
from millstream.engine.startup.phases import Phases


class RanksRunner:
    """A plan.Runner, and a plan.PreparesAhead."""

    def __init__(
        self,
        first: ModelRunner,
        ring: RingWriter,
        processes: RankProcesses,
        num_threads: int,
        phases: Phases,
    ) -> None:
        """num_threads: that torch had before it shared the cores with the other ranks. phases: of
        the whole start."""
        self.info = replace(first.info, phases=phases.so_far())
        self._first = first
        self._ring = ring
        self._processes = processes
        self._num_threads = num_threads
        self._encoder = PlanEncoder()
        self._needs = RowNeeds(first.info.max_num_seqs)

    def launch(self, plan: Plan) -> None:
        """Raises RankLost."""
        if self._needs.whole_rows(plan):
            plan = replace(plan, whole_rows=True)
        self._tell(self._encoder.encode(plan))
        with self._explained():
            self._first.launch(plan)

    def collect(self) -> StepResult:
        """Raises RankLost."""
        with self._explained():
            return self._first.collect()

    def prepare_ahead(self) -> bool:
        """Raises RankLost."""
        self._tell(PREPARE_AHEAD)
        with self._explained():
            return self._first.prepare_ahead()

    def _tell(self, record: Sequence[int]) -> None:
        self._processes.check()
        self._ring.write(record)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # of a collective whose other end is gone
            self._processes.explain()
            raise

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        """As rank 0's runner: the others need to know nothing of grammars."""
        return self._first.prepare_grammar(spec)

    def end_ranks(self) -> None:
        """Ends the other ranks alone, while a step of this one may wait for them for ever."""
        self._processes.close()

    def close(self) -> None:
        self._processes.close()
        self._ring.close()
        self._first.close()
        self.restore_threads()

    def restore_threads(self) -> None:
        """torch's number of threads, of the calling thread, as it was before loading."""
        torch.set_num_threads(self._num_threads)


def load(
    config: EngineConfig,
    model_dir: Path | None,
    listener: socket.socket,
    ring: RingWriter,
    processes: RankProcesses,
    phases: Phases,
) -> RanksRunner:
    """Loads rank 0's part and waits for the others'. Takes everything over: if it raises, it has
    closed it all. Raises as children.create_runner. phases: of the start so far."""
    size, num_threads = config.tensor_parallel_size, torch.get_num_threads()

    def meet() -> Any:
        processes.wait_loaded()
        return store

    try:
        share_of(runner_parts.model_config(config, model_dir), 0, size)
        check_devices(config.device, size)
        store = open_store(listener, size)
        first = ModelRunner(config, model_dir, group=make_group(config.device, 0, size, meet))
        phases.include(first.info.phases)
        processes.wait_ready()
        phases.end("waiting for the other ranks")
    except BaseException as error:
        try:
            if isinstance(error, RuntimeError):
                processes.explain()
        except RankLost as lost:
            raise LoadError(str(lost)) from None
        finally:
            processes.close()
            ring.close()
            listener.close()
        raise
    return RanksRunner(first, ring, processes, num_threads, phases)
