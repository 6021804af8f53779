"""Where the seconds of a start go."""

from __future__ import annotations

import subprocess
import sys
import time

from millstream.engine.startup.phases import Phases


def test_each_phase_begins_where_the_last_one_ended() -> None:
    phases = Phases(time.monotonic() - 2.0)
    phases.end("before")
    time.sleep(0.02)
    phases.end("slept")
    (first, before_s), (second, slept_s) = phases.so_far()
    assert (first, second) == ("before", "slept")
    assert 2.0 <= before_s < 2.5
    assert 0.02 <= slept_s < 0.5


def test_phases_of_others_are_taken_off_the_next() -> None:
    phases = Phases(time.monotonic() - 3.0)
    phases.include([("theirs", 1.0), ("theirs too", 0.5)])
    phases.end("rest")
    seconds = dict(phases.so_far())
    assert 1.5 <= seconds["rest"] < 2.0
    assert list(seconds) == ["theirs", "theirs too", "rest"]


def test_a_line_tells_the_sum_and_what_took_any_time() -> None:
    phases = Phases(0.0)
    phases.include([("imports", 1.25), ("nothing", 0.001), ("KV cache", 0.5)])
    assert str(phases) == "1.75 s (imports 1.25, KV cache 0.50)"


def test_a_process_knows_when_it_began() -> None:
    code = (
        "import time; time.sleep(0.3)\n"
        "from millstream.engine.startup.phases import process_start_s\n"
        "print(process_start_s())"
    )
    before_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert -0.02 <= float(done.stdout) - before_s < 0.25
