"""WaitingQueue: the sequences that wait for a slot, and whose turn it is.

    priority -1:  resumed [..]   client 7: [a, b, ...]   client 9: [c]     smaller is served first
    priority  0:  resumed [..]   client 7: [d]           client 8: [e, f]

Within a priority, preempted sequences come first: their turn was before. Then it is the turn of
the client with the fewest sequences running (of that priority); of several, of the one that has
had so many for longest. A client's own sequences are served in order of arrival.

So a newcomer waits for one admission of each client that has no more running than it has, however
many requests they queue, and slots that are scarce end up shared equally. Nothing else prevents
starvation: while requests of a smaller priority keep coming and fill the engine, others wait.

Pure, like the scheduler. All operations but the first of a new priority take a time that does not
grow with the number of sequences or clients.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable

from millstream.engine.sequence import Sequence


class WaitingQueue:
    """Knows of running sequences only how many each client has."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of the levels, ascending
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, sequence: Sequence) -> None:
        """A new sequence, behind all of its client's."""
        self._level(sequence).add(sequence)
        self._size += 1

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence, before all others of its priority; it ran until now."""
        level = self._level(sequence)
        level.stopped(sequence.request.client)
        level.resumed[sequence.key] = sequence
        level.resumed.move_to_end(sequence.key, last=False)
        self._size += 1

    def first(self) -> Sequence | None:
        """Whose turn it is; it stays in the queue."""
        for priority in self._priorities:
            if (sequence := self._levels[priority].first()) is not None:
                return sequence
        return None

    def admit(self, sequence: Sequence) -> None:
        """Takes a sequence out: it runs from now on."""
        level = self._level(sequence)
        level.remove(sequence)
        level.started(sequence.request.client)
        self._size -= 1

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out: it ends without (more of) a turn."""
        self._level(sequence).remove(sequence)
        self._size -= 1
        self._drop_if_empty(sequence)

    def stopped(self, sequence: Sequence) -> None:
        """A sequence that ran has ended, or needs its slot no more."""
        self._level(sequence).stopped(sequence.request.client)
        self._drop_if_empty(sequence)

    def _level(self, sequence: Sequence) -> _Level:
        priority = sequence.request.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._priorities, priority)
        return level

    def _drop_if_empty(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        if self._levels[priority].empty:
            del self._levels[priority]
            self._priorities.remove(priority)

    def check_invariants(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless it holds the one and has counted the other."""
        counts: dict[int, dict[int, int]] = {}
        for sequence in running:
            clients = counts.setdefault(sequence.request.priority, {})
            clients[sequence.request.client] = clients.get(sequence.request.client, 0) + 1
        held: list[int] = []
        assert self._priorities == sorted(self._levels), "the order of the priorities is lost"
        for priority, level in self._levels.items():
            assert not level.empty, f"priority {priority} is kept for nothing"
            level.check_invariants(counts.pop(priority, {}))
            held += [*level.resumed, *(key for line in level.lines.values() for key in line)]
        assert not counts, "a priority with running sequences is forgotten"
        assert sorted(held) == sorted(sequence.key for sequence in waiting), "a sequence is lost"
        assert len(held) == self._size


class _Level:
    """What waits at one priority."""

    __slots__ = ("_running", "_turns", "lines", "resumed")

    def __init__(self) -> None:
        self.resumed: OrderedDict[int, Sequence] = OrderedDict()  # by key, next first
        # By client: its sequences by key, in order of arrival; never empty.
        self.lines: dict[int, OrderedDict[int, Sequence]] = {}
        self._running: dict[int, int] = {}  # by client, above 0
        # How many run: the clients of `lines` with so many, in order of their turns; never empty.
        self._turns: dict[int, OrderedDict[int, None]] = {}

    @property
    def empty(self) -> bool:
        return not (self.resumed or self.lines or self._running)

    def add(self, sequence: Sequence) -> None:
        client = sequence.request.client
        if client not in self.lines:
            self.lines[client] = OrderedDict()
            self._enter_turns(client)
        self.lines[client][sequence.key] = sequence

    def first(self) -> Sequence | None:
        if self.resumed:
            return next(iter(self.resumed.values()))
        if not self.lines:
            return None
        # At most about the square root of twice the number of slots: each number has a client.
        client = next(iter(self._turns[min(self._turns)]))
        return next(iter(self.lines[client].values()))

    def remove(self, sequence: Sequence) -> None:
        client = sequence.request.client
        if self.resumed.pop(sequence.key, None) is None:
            line = self.lines[client]
            del line[sequence.key]
            if not line:
                self._leave_turns(client)
                del self.lines[client]

    def started(self, client: int) -> None:
        self._set_running(client, self._running.get(client, 0) + 1)

    def stopped(self, client: int) -> None:
        self._set_running(client, self._running[client] - 1)

    def _set_running(self, client: int, count: int) -> None:
        if client in self.lines:
            self._leave_turns(client)
        if count:
            self._running[client] = count
        else:
            del self._running[client]
        if client in self.lines:
            self._enter_turns(client)

    def _enter_turns(self, client: int) -> None:
        self._turns.setdefault(self._running.get(client, 0), OrderedDict())[client] = None

    def _leave_turns(self, client: int) -> None:
        count = self._running.get(client, 0)
        turns = self._turns[count]
        del turns[client]
        if not turns:
            del self._turns[count]

    def check_invariants(self, running: dict[int, int]) -> None:
        assert running == self._running, f"counts {self._running}, not {running}"
        turns = {client: count for count, clients in self._turns.items() for client in clients}
        assert turns == {client: running.get(client, 0) for client in self.lines}
        assert all(self.lines.values()), "an empty line is kept"
        assert all(self._turns.values())
