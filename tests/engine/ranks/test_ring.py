"""The ring: records come whole and in order, however long, to readers however slow."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millstream.engine.ranks.ring import RingFiles, RingReader, RingWriter


def never() -> None:
    """Waiting is fine."""


@contextmanager
def ring(
    num_readers: int, capacity: int, on_wait: object = never
) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    files = RingFiles.create(num_readers, capacity)
    writer = RingWriter(files, on_wait)  # type: ignore[arg-type]
    readers = [
        RingReader(os.dup(files.memory), os.dup(waker), index=index, num_readers=num_readers)
        for index, waker in enumerate(files.wakers)
    ]
    files.close()
    try:
        yield writer, readers
    finally:
        for end in (writer, *readers):
            end.close()


def test_a_record_comes_to_every_reader() -> None:
    with ring(2, 64) as (writer, readers):
        writer.write([1, -2, 1 << 62])
        writer.write([])
        for reader in readers:
            assert reader.read(spin_s=0) == array("q", [1, -2, 1 << 62])
            assert reader.read(spin_s=0) == array("q")
            assert reader.read(spin_s=0, timeout_s=0.01) is None


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_any_lengths_wrap_around_and_pass_in_pieces(capacity: int) -> None:
    """Records up to twenty rings long, readers that dawdle."""
    rng = random.Random(capacity)
    records = [[rng.randrange(-5, 1 << 40) for _ in range(rng.choice([0, 1, 6, 20 * capacity]))]
               for _ in range(60)]  # fmt: skip
    seen: list[list[list[int]]] = [[], []]
    with ring(2, capacity) as (writer, readers):

        def read(index: int) -> None:
            dawdle = random.Random(index)
            for _ in records:
                if dawdle.random() < 0.2:
                    time.sleep(0.001)
                record = readers[index].read(spin_s=0.0001)
                assert record is not None
                seen[index].append(list(record))

        threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for record in records:
            writer.write(record)
        for thread in threads:
            thread.join()
    assert seen == [records, records]


class ReaderDied(Exception):
    pass


def test_a_reader_that_does_not_read_lets_the_writer_give_up() -> None:
    waits = 0

    def give_up() -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            raise ReaderDied

    with ring(2, 16, give_up) as (writer, readers):
        writer.write(range(10))
        readers[0].read(spin_s=0)  # the other one is dead
        with pytest.raises(ReaderDied):
            writer.write(range(10))


def test_an_idle_reader_sleeps_and_wakes_at_once() -> None:
    with ring(1, 64) as (writer, readers):
        woken: list[float] = []
        used: list[float] = []

        def read() -> None:
            started = time.thread_time()
            assert readers[0].read(spin_s=0.001) is not None
            woken.append(time.monotonic())
            used.append(time.thread_time() - started)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.5)
        written = time.monotonic()
        writer.write([1])
        thread.join()
        assert used[0] < 0.1, "it spun"
        assert woken[0] - written < 0.1, "it slept on"


READER = """
import sys
from millstream.engine.ranks.ring import RingReader
reader = RingReader(int(sys.argv[1]), int(sys.argv[2]), index=0, num_readers=1)
while (record := reader.read(spin_s=0.001)):
    print(sum(record), flush=True)
"""


def test_another_process_inherits_it_and_no_name_is_anywhere() -> None:
    before = set(os.listdir("/dev/shm"))
    files = RingFiles.create(1, 100)
    writer = RingWriter(files, never)
    fds = (files.memory, files.wakers[0])
    child = subprocess.Popen(
        [sys.executable, "-c", READER, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE
    )
    files.close()
    for length in (1, 50, 1000):
        writer.write(range(length))
    assert set(os.listdir("/dev/shm")) <= before
    writer.write([])  # the end
    output, _ = child.communicate(timeout=30)
    assert [int(line) for line in output.split()] == [0, 1225, 499500]
    writer.close()
