"""A rank beside rank 0: `python -m millstream.engine.ranks.process CONTROL MEMORY WAKER`, three
inherited file descriptors; started by children.py, which says the rest.

    reader thread:  end of file on CONTROL: rank 0 is gone, exit at once
    main thread:    loads its part of the model, then: ring -> plan -> launch, for ever; while
                    there is no work, what prepares for later plans
"""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from millstream.engine.ranks.ring import RingReader
from millstream.engine.startup.child_process import CLEAR_ERRORS, explain, outlive_nobody
from millstream.rpc.logs import configure_logging
from millstream.rpc.process import freeze_what_lives

if TYPE_CHECKING:
    from millstream.engine.ranks import children
    from millstream.engine.runner import ModelRunner

logger = logging.getLogger(__name__)

# How long to look for the next plan before sleeping: with a GPU, about a step; on CPUs, which do
# the work of all ranks, a moment.
_GPU_SPIN_S = 0.005
_CPU_SPIN_S = 50e-6


def main() -> None:
    outlive_nobody()
    control_fd, memory, waker = map(int, sys.argv[1:])
    control = socket.socket(fileno=control_fd)
    told = control.makefile("rb")
    line = told.readline()
    if not line:
        return
    threading.Thread(target=_end_with, args=(told,), name="reader", daemon=True).start()

    def tell(line: str) -> None:
        control.sendall(f"{line}\n".encode())

    # Imported only now: torch takes a second, in which rank 0 may end.
    from millstream.engine.ranks.children import RankStart

    start = msgspec.json.decode(line, type=RankStart)
    # Rank 0 says what all of them would.
    level = start.log_level if start.log_level in ("debug", "critical") else "error"
    configure_logging(level, process=f"rank{start.rank}")
    try:
        _serve(start, memory, waker, tell)
    except Exception as error:
        clear = isinstance(error, CLEAR_ERRORS)
        logger.log(
            logging.DEBUG if clear else logging.ERROR, "rank %d failed", start.rank, exc_info=True
        )
        tell(f"failed {explain(error)}")
        sys.exit(1)


def _end_with(told: io.BufferedReader) -> None:
    told.read()
    os._exit(0)


def _serve(
    start: children.RankStart, memory: int, waker: int, tell: Callable[[str], None]
) -> NoReturn:
    from millstream.engine.ranks.collectives import enter_store, make_group
    from millstream.engine.runner import ModelRunner

    size = start.config.tensor_parallel_size

    def meet() -> Any:
        tell("loaded")
        return enter_store(start.store_port, size)

    runner = ModelRunner(
        start.config,
        None if start.model_dir is None else Path(start.model_dir),
        group=make_group(start.config.device, start.rank, size, meet),
    )
    ring = RingReader(memory, waker, index=start.rank - 1, num_readers=size - 1)
    freeze_what_lives()
    tell("ready")
    spin_s = _GPU_SPIN_S if runner.info.max_in_flight > 1 else _CPU_SPIN_S

    def next_record() -> array[int]:
        record = ring.read(spin_s=spin_s)
        assert record is not None, "there is no time limit"
        return record

    follow(runner, next_record)


def follow(runner: ModelRunner, next_record: Callable[[], array[int]]) -> NoReturn:
    """Carries out what rank 0 writes, for ever; returns never, raises what these raise."""
    from millstream.engine.ranks.plan_codec import PlanDecoder

    decoder = PlanDecoder()
    in_flight = 0
    while True:
        plan = decoder.decode(next_record())
        if plan is None:
            runner.prepare_ahead()
            continue
        if in_flight == runner.info.max_in_flight:
            runner.collect()
            in_flight -= 1
        runner.launch(plan)
        in_flight += 1


if __name__ == "__main__":
    main()
