"""WaitingQueue against a naive one that looks at everything each time."""

from __future__ import annotations

import random

import pytest
from tests.toy_runner import toy_info, toy_request

from millstream.engine.scheduling.waiting import WaitingQueue
from millstream.engine.sequence import Sequence


class NaiveQueue:
    """The rule itself: the smallest of (priority, preempted first, its client's running sequences,
    since when the client has so many, arrival)."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.resumed: list[Sequence] = []  # next first
        self.running: list[Sequence] = []
        self.since: dict[tuple[int, int], int] = {}
        self.now = 0

    def count(self, of: tuple[int, int]) -> int:
        return sum(share(sequence) == of for sequence in self.running)

    def touch(self, sequence: Sequence) -> None:
        """The client's number changes, or it begins to wait."""
        self.now += 1
        self.since[share(sequence)] = self.now

    def add(self, sequence: Sequence) -> None:
        if not any(share(other) == share(sequence) for other in self.waiting):
            self.touch(sequence)
        self.waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self.stopped(sequence)
        self.resumed.insert(0, sequence)

    def admit(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.running.append(sequence)
        self.touch(sequence)

    def remove(self, sequence: Sequence) -> None:
        (self.resumed if sequence in self.resumed else self.waiting).remove(sequence)

    def stopped(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.touch(sequence)

    def first(self) -> Sequence | None:
        def rank(sequence: Sequence) -> tuple[int, ...]:
            priority = sequence.request.priority
            if sequence in self.resumed:
                return (priority, 0, self.resumed.index(sequence))
            of = share(sequence)
            return (priority, 1, self.count(of), self.since[of], self.waiting.index(sequence))

        return min([*self.resumed, *self.waiting], key=rank, default=None)


def share(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.request.client


def make(key: int, priority: int, client: int) -> Sequence:
    request = toy_request(key, [1], priority=priority, client=client)
    return Sequence.create(request, toy_info(), 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_random_use_agrees_with_the_rule(seed: int) -> None:
    rng = random.Random(seed)
    queue, naive = WaitingQueue(), NaiveQueue()
    clients, priorities = rng.randint(1, 6), rng.choice([[0], [-1, 0, 7]])
    seen = 0
    for key in range(300):
        waiting = [*naive.resumed, *naive.waiting]
        action = rng.choice(["add", "add", "admit", "admit", "stop", "put back", "remove"])
        if action == "add":
            sequence = make(key, rng.choice(priorities), rng.randrange(clients))
            queue.add(sequence)
            naive.add(sequence)
        elif action == "admit" and (next_up := queue.first()):
            queue.admit(next_up)
            naive.admit(next_up)
            seen += 1
        elif action == "stop" and naive.running:
            sequence = rng.choice(naive.running)
            queue.stopped(sequence)
            naive.stopped(sequence)
        elif action == "put back" and naive.running:
            sequence = rng.choice(naive.running)
            queue.put_back(sequence)
            naive.put_back(sequence)
        elif action == "remove" and waiting:
            sequence = rng.choice(waiting)
            queue.remove(sequence)
            naive.remove(sequence)
        assert queue.first() is naive.first()
        assert len(queue) == len(naive.waiting) + len(naive.resumed)
        queue.check_invariants([*naive.resumed, *naive.waiting], naive.running)
    assert seen > 20


def test_nothing_is_kept_of_clients_and_priorities_that_are_gone() -> None:
    queue = WaitingQueue()
    sequences = [make(key, priority=key % 7, client=key) for key in range(50)]
    for sequence in sequences:
        queue.add(sequence)
    for sequence in sequences[:20]:
        queue.remove(sequence)
    while next_up := queue.first():
        queue.admit(next_up)
        queue.stopped(next_up)
    assert not queue._levels and not queue._priorities
