"""A ring of int64 words in shared memory: one writer, and readers that each see every record.

    word 0              words written so far
    word 8 (1 + r)      words that reader r has read; the next word: 1 while it sleeps
    then                the ring: word number n is at n % capacity

A record is its length and its words. It may be longer than the ring: it goes through in pieces. A
reader spins for a moment, then sleeps on its eventfd, so an idle engine burns no CPU; the writer
wakes those that said that they sleep. The memory is a memfd, which children inherit: it has no
name, so nothing is left of it when all processes have ended, however they did.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

_WORD_BYTES = 8
_LINE = 8  # words of a cache line: what one process writes shares none with another's
# A wake-up that is lost all the same (there is no such case known) costs so long.
_SLEEP_S = 0.2
_FULL_SLEEP_S = 50e-6
_CLOCK_EVERY = 64  # looks at the ring between two at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFiles:
    """What a process needs to open the ring: file descriptors, which children may inherit."""

    memory: int
    wakers: tuple[int, ...]  # an eventfd a reader

    @classmethod
    def create(cls, num_readers: int, capacity_words: int) -> Self:
        memory = os.memfd_create("millstream-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, _WORD_BYTES * (_LINE * (1 + num_readers) + capacity_words))
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        return cls(memory=memory, wakers=tuple(os.eventfd(0, flags) for _ in range(num_readers)))

    def close(self) -> None:
        """Closes the descriptors; a ring that was opened keeps its own."""
        for fd in (self.memory, *self.wakers):
            os.close(fd)


class _Ring:
    """The mapped memory; `_words` of it are seen by all processes at once."""

    def __init__(self, memory: int, num_readers: int) -> None:
        self._mapping = mmap.mmap(memory, os.fstat(memory).st_size)
        self._words = memoryview(self._mapping).cast("q")
        self._first = _LINE * (1 + num_readers)
        self._capacity = len(self._words) - self._first
        self._order = threading.Lock()

    def close(self) -> None:
        self._words.release()
        self._mapping.close()

    def _fence(self) -> None:
        """Stores before this are seen by other processes before stores and loads after it are
        made. Python has no fence of its own; taking and giving back a lock is one."""
        with self._order:
            pass

    def _copy_in(self, at: int, source: memoryview) -> None:
        """Stores words from number `at` on, round the end of the ring."""
        start = at % self._capacity
        head = min(len(source), self._capacity - start)
        first = self._first
        self._words[first + start : first + start + head] = source[:head]
        if head < len(source):
            self._words[first : first + len(source) - head] = source[head:]

    def _copy_out(self, at: int, target: memoryview) -> None:
        start = at % self._capacity
        head = min(len(target), self._capacity - start)
        first = self._first
        target[:head] = self._words[first + start : first + start + head]
        if head < len(target):
            target[head:] = self._words[first : first + len(target) - head]


class RingWriter(_Ring):
    """The one writer; used by one thread."""

    def __init__(self, files: RingFiles, on_wait: Callable[[], None]) -> None:
        """on_wait: called again and again while the ring is full; it raises to give up, as when a
        reader has died."""
        super().__init__(files.memory, len(files.wakers))
        self._readers = [_LINE * (1 + reader) for reader in range(len(files.wakers))]
        self._wakers = [os.dup(fd) for fd in files.wakers]
        self._on_wait = on_wait
        self._written = 0

    def write(self, words: Sequence[int]) -> None:
        """Appends a record for every reader; waits while there is no room for the next piece.

        Raises what on_wait raises; the ring is of no use afterwards.
        """
        with memoryview(array("q", (len(words),)) + array("q", words)) as record:
            done = 0
            while done < len(record):
                count = min(len(record) - done, self._room())
                if not count:
                    self._on_wait()
                    time.sleep(_FULL_SLEEP_S)
                    continue
                self._copy_in(self._written, record[done : done + count])
                done += count
                self._publish(count)

    def close(self) -> None:
        super().close()
        for fd in self._wakers:
            os.close(fd)

    def _room(self) -> int:
        slowest = min(self._words[at] for at in self._readers)
        return self._capacity - (self._written - slowest)

    def _publish(self, count: int) -> None:
        self._fence()
        self._written += count
        self._words[0] = self._written
        self._fence()
        for at, waker in zip(self._readers, self._wakers, strict=True):
            if self._words[at + 1]:
                os.eventfd_write(waker, 1)


class RingReader(_Ring):
    """One of the readers; used by one thread."""

    def __init__(self, memory: int, waker: int, *, index: int, num_readers: int) -> None:
        """Takes the descriptors over. index: which of the readers this is."""
        super().__init__(memory, num_readers)
        os.close(memory)
        self._waker = waker
        self._at = _LINE * (1 + index)
        self._read = 0

    def read(self, *, spin_s: float, timeout_s: float | None = None) -> array[int] | None:
        """The next record; None when none has begun within timeout_s. Spins for spin_s before it
        sleeps."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._await(spin_s, deadline):
            return None
        header = array("q", (0,))
        self._take(memoryview(header))
        record = array("q", bytes(_WORD_BYTES * header[0]))
        with memoryview(record) as target:
            done = 0
            while done < len(record):
                self._await(spin_s, None)
                count = min(len(record) - done, self._words[0] - self._read)
                self._take(target[done : done + count])
                done += count
        return record

    def close(self) -> None:
        super().close()
        os.close(self._waker)

    def _take(self, target: memoryview) -> None:
        self._fence()  # the words are not read before their number was
        self._copy_out(self._read, target)
        self._fence()
        self._read += len(target)
        self._words[self._at] = self._read

    def _await(self, spin_s: float, deadline: float | None) -> bool:
        """Waits until there are words to read; False at the deadline (time.monotonic)."""
        words, read = self._words, self._read
        until = time.monotonic() + spin_s
        while True:
            for _ in range(_CLOCK_EVERY):
                if words[0] != read:
                    return True
            now = time.monotonic()
            if now < until:
                continue
            if deadline is not None and now >= deadline:
                return False
            self._sleep(_SLEEP_S if deadline is None else min(_SLEEP_S, deadline - now))

    def _sleep(self, timeout_s: float) -> None:
        words = self._words
        words[self._at + 1] = 1
        self._fence()  # the writer sees this, or we see what it wrote before it looked
        if words[0] == self._read:
            ready, _, _ = select.select((self._waker,), (), (), timeout_s)
            if ready:
                os.eventfd_read(self._waker)
        words[self._at + 1] = 0
