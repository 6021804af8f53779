"""What sending plans to other ranks costs a step: encoding, ring, decoding. One JSON line a plan.

    python3 -m tests.bench.ring [--readers 1] [--steps 2000]

writer_us: what rank 0 pays before its own launch. round_trip_us: until a spinning reader in another
process has decoded the plan and its answer is back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from millstream.engine.plan import Chunk, Plan, SlotStart
from millstream.engine.ranks.plan_codec import PlanDecoder, PlanEncoder
from millstream.engine.ranks.ring import RingFiles, RingReader, RingWriter
from millstream.engine.request import Sampling

SPIN_S = 0.05
CAPACITY = 1 << 17


def plans() -> dict[str, Plan]:
    """The steps of a run: steady decodes, a batch that changes, a start, a large chunk."""
    slots = tuple(range(256))
    sampling = Sampling(max_tokens=100, temperature=0.6, seed=12345)
    start = SlotStart(
        slot=7,
        sampling=sampling,
        min_position=1000,
        banned_token_ids=(),
        num_computed_tokens=0,
        block_ids=tuple(range(16)),
    )
    return {
        "steady decode of 256": Plan(step=1, decode_slots=slots),
        "4 block appends": Plan(
            step=1, decode_slots=slots, block_appends=tuple((i, 9) for i in range(4))
        ),
        "another batch of 256": Plan(step=1, decode_slots=slots),
        "start and chunk of 1000": Plan(
            step=1,
            starts=(start,),
            chunks=(Chunk(slot=7, start=0, token_ids=tuple(range(1000)), samples=True),),
            decode_slots=slots,
        ),
    }


def echo(memory: int, waker: int, index: int, readers: int, back: int, back_waker: int) -> None:
    """The other process: decodes, and answers a word."""
    reader = RingReader(memory, waker, index=index, num_readers=readers)
    files = RingFiles(memory=back, wakers=(back_waker,))
    answers = RingWriter(files, lambda: None)
    decoder = PlanDecoder()
    while record := reader.read(spin_s=SPIN_S):
        decoder.decode(record)
        if index == 0:
            answers.write((1,))


def measure(name: str, plan: Plan, readers: int, steps: int) -> None:
    files, back = RingFiles.create(readers, CAPACITY), RingFiles.create(1, 64)
    writer = RingWriter(files, lambda: None)
    children = []
    for index in range(readers):
        fds = (files.memory, files.wakers[index], back.memory, back.wakers[0])
        numbers = (*fds[:2], index, readers, *fds[2:])
        command = [sys.executable, "-m", "tests.bench.ring", "--echo", *map(str, numbers)]
        children.append(subprocess.Popen(command, pass_fds=fds))
    answers = RingReader(os.dup(back.memory), os.dup(back.wakers[0]), index=0, num_readers=1)
    encoder = PlanEncoder()
    changes = name.startswith("another")
    writing, trips = [], []
    for _ in range(steps):
        slots = (*plan.decode_slots,) if changes else plan.decode_slots
        step = Plan(
            step=plan.step,
            starts=plan.starts,
            block_appends=plan.block_appends,
            chunks=plan.chunks,
            decode_slots=slots,
        )
        started = time.perf_counter()
        writer.write(encoder.encode(step))
        written = time.perf_counter()
        answers.read(spin_s=SPIN_S)
        trips.append(time.perf_counter() - started)
        writing.append(written - started)
    writer.write(())
    for child in children:
        child.wait()
    figures = {
        "writer_us": 1e6 * statistics.median(writing),
        "writer_p90_us": 1e6 * statistics.quantiles(writing, n=10)[8],
        "round_trip_us": 1e6 * statistics.median(trips),
    }
    rounded = {key: round(value, 2) for key, value in figures.items()}
    print(json.dumps({"bench": "ring", "plan": name, "readers": readers, **rounded}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--echo", type=int, nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        echo(*arguments.echo)
        return
    for name, plan in plans().items():
        measure(name, plan, arguments.readers, arguments.steps)


if __name__ == "__main__":
    main()
