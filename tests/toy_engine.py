"""A scheduler and a toy runner that step together, for tests of the scheduler's rules."""

from __future__ import annotations

from tests.toy_runner import ToyRunner

from millstream.engine.plan import Plan, RunnerInfo
from millstream.engine.records import FinishedRecord, StepRecord
from millstream.engine.request import FinishReason, Request
from millstream.engine.scheduler import Scheduler


class Engine:
    """A step takes one second."""

    def __init__(self, info: RunnerInfo, prefix_caching: bool = True) -> None:
        self.info = info
        self.scheduler = Scheduler(info, prefix_caching)
        self.runner = ToyRunner(info)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedRecord] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self._note(self.scheduler.add(request, self.now))

    def cancel(self, key: int) -> FinishedRecord | None:
        record = self.scheduler.finish(key, FinishReason.CANCELLED, self.now)
        self._note(record)
        return record

    def launch(self) -> Plan | None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.runner.launch(plan)
        self.scheduler.check_invariants()
        return plan

    def collect(self) -> StepRecord:
        self.now += 1
        record = self.scheduler.apply(self.runner.collect(), self.now)
        for key, token_id in zip(record.keys, record.token_ids, strict=True):
            self.tokens.setdefault(key, []).append(token_id)
        for finished in record.finished:
            self._note(finished)
        self.scheduler.check_invariants()
        return record

    def step(self) -> Plan:
        plan = self.launch()
        while plan is None or self.scheduler.num_launched == self.info.max_in_flight:
            self.collect()
            plan = plan or self.launch()
        return plan

    def run(self, *requests: Request) -> list[list[int]]:
        """Everything to the end; the outputs of these requests."""
        self.add(*requests)
        while self.scheduler.has_work:
            while self.scheduler.num_launched < self.info.max_in_flight and self.launch():
                pass
            assert self.scheduler.num_launched, "stuck"
            self.collect()
        assert self.scheduler.stats().kv_blocks_used == 0
        return [self.tokens.get(request.key, []) for request in requests]

    def _note(self, record: FinishedRecord | None) -> None:
        if record is not None:
            assert record.key not in self.finished
            self.finished[record.key] = record
