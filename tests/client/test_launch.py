"""launch(): real service processes, with the engine's instant runner and no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.client import SamplingParams, alaunch, launch
from millstream.client.launch import engine_arguments
from millstream.client.processes import LaunchError, ServiceProcesses
from millstream.rpc.errors import EngineUnavailable, InvalidArgument

FOUR = SamplingParams(max_tokens=4)


def test_an_engine_is_launched_asked_and_stopped() -> None:
    with launch(tokenizer=False, runner="instant", max_num_seqs=8) as client:
        output = client.generate([1, 2, 3], FOUR, detokenize=False)
        assert output.token_ids == [4, 5, 6, 7]
        info = client.info().engine
        assert info is not None
        assert info.limits.max_num_seqs == 8
        assert client.tokenizer_target is None

        (engine,) = _engines()
    assert not _alive(engine)
    with pytest.raises(EngineUnavailable, match="closed"):
        client.generate([1], FOUR, detokenize=False)


async def test_alaunch() -> None:
    async with alaunch(tokenizer=False, runner="instant") as client:
        outputs = await client.generate([[1], [2]], FOUR, detokenize=False)
        assert [o.token_ids for o in outputs] == [[2, 3, 4, 5], [3, 4, 5, 6]]


def test_two_launches_run_side_by_side() -> None:
    with (
        launch(tokenizer=False, runner="instant") as one,
        launch(tokenizer=False, runner="instant") as other,
    ):
        assert one.engine_target != other.engine_target
        for client in (one, other):
            assert client.generate([7], FOUR, detokenize=False).token_ids == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("field", "keywords"),
    [
        ("log_level", {"log_level": "loud"}),
        ("timeout_s", {"timeout_s": float("nan")}),
        ("timeout_s", {"timeout_s": 0}),
        ("timeout_s", {"timeout_s": "1"}),
        ("tokenizer", {"tokenizer": "no"}),
    ],
)
def test_bad_keywords_are_named(field: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: "), launch(runner="instant", **keywords):
        raise AssertionError("it was launched")


def test_keywords_are_flags_with_underscores() -> None:
    flags = {"max_num_seqs": 64, "prefix_caching": False, "enforce_eager": True, "dtype": None}
    assert engine_arguments(flags) == [
        "--max-num-seqs=64",
        "--no-prefix-caching",
        "--enforce-eager",
    ]
    with pytest.raises(TypeError, match=r"'max_seqs'.*max_num_seqs"), launch(max_seqs=3):
        pass
    with pytest.raises(TypeError, match="prefix_caching"), launch(prefix_caching="no"):
        pass


def test_a_failing_start_says_why_in_the_services_words() -> None:
    with pytest.raises(LaunchError, match="no-such-folder"), launch("./no-such-folder"):
        pass
    with (
        pytest.raises(LaunchError, match=r"the engine did not start: .*dtype"),
        launch(tokenizer=False, runner="instant", dtype="float8"),
    ):
        pass
    with (
        pytest.raises(LaunchError, match="nowhere"),
        launch(tokenizer=False, runner="nowhere.to:be_found"),
    ):
        pass


def test_a_start_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(LaunchError, match="did not start within"):  # noqa: SIM117
        with launch(tokenizer=False, runner="instant", timeout_s=0.001):
            pass


def test_a_service_that_dies_is_noticed_and_the_other_can_be_stopped() -> None:
    arguments = ["--runner", "instant", "--port", "0"]
    with ServiceProcesses() as processes:
        children = [processes.start("engine", arguments, quiet=True) for _ in range(2)]
        processes.wait_serving(30)
        children[0].process.kill()
        with pytest.raises(LaunchError, match=r"the engine stopped: "):
            processes.wait_failure()
    assert [child.process.returncode for child in children] == [-signal.SIGKILL, 0]


def test_services_end_with_a_parent_that_is_killed() -> None:
    script = """
        import time
        from millstream.client import launch
        with launch(tokenizer=False, runner="instant") as client:
            print(client.engine_target, flush=True)
            time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    (engine,) = _engines(parent.pid)
    parent.kill()
    parent.wait()
    _wait(lambda: not _alive(engine))


def test_ctrl_c_is_for_the_caller_and_not_for_the_services() -> None:
    """A notebook's interrupted cell leaves its engine usable."""
    with launch(tokenizer=False, runner="instant") as client:
        (engine,) = _engines()
        assert os.getpgid(engine) != os.getpgid(0)  # a terminal's Ctrl-C does not reach it
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert client.generate([1], FOUR, detokenize=False).token_ids == [2, 3, 4, 5]


async def test_the_hot_path_keeps_up_with_256_sequences() -> None:
    """Not a benchmark: an order of magnitude below what it does, on a shared machine."""
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    async with alaunch(tokenizer=False, runner="instant", max_num_seqs=256) as client:
        started = time.perf_counter()
        outputs = await client.generate([[i] for i in range(256)], params, detokenize=False)
        rate = 256_000 / (time.perf_counter() - started)
    assert all(len(output.token_ids) == 1000 for output in outputs)
    assert rate > 20_000


def _engines(parent: int | None = None) -> list[int]:
    """The engine processes that are children of ours, or of that parent."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            command = (folder / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == (parent or os.getpid()) and b"millstream.engine" in command:
            found.append(int(folder.name))
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
