"""`millstream serve --replicas`: who gets which GPU and port; engines that come up, and end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rank_processes import all_end, descendants

from millstream.client import Client, SamplingParams
from millstream.client.processes import LaunchError
from millstream.client.replicas import gpus_of, plan_replicas


def test_gpus(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_of({}, tmp_path) == ["0", "2", "10"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "3,GPU-ab"}, tmp_path) == ["3", "GPU-ab"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


def plan(count: int, gpus: list[str], first_port: int = 50051, **options: Any) -> list[Any]:
    planned = plan_replicas(count, options, first_port=first_port, gpus=gpus)
    return [(dict(each.environment), each.port, dict(each.options)) for each in planned]


def test_each_has_its_own_gpus() -> None:
    key = "CUDA_VISIBLE_DEVICES"
    assert [each[:2] for each in plan(2, ["4", "5"])] == [({key: "4"}, 50051), ({key: "5"}, 50052)]
    planned = plan(2, ["0", "1", "2", "3", "4"], first_port=0, tensor_parallel_size=2)
    assert [each[:2] for each in planned] == [({key: "0,1"}, 0), ({key: "2,3"}, 0)]
    assert plan(1, ["0", "1"]) == [({}, 50051, {})]
    with pytest.raises(LaunchError, match="replicas: 3 engines need 3 GPUs, and there are 2"):
        plan(3, ["0", "1"])
    with pytest.raises(LaunchError, match="replicas: 3 ports from 65534"):
        plan(3, [], first_port=65534)


def test_without_gpus_they_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert plan(2, []) == [({}, 50051, {"threads": 4}), ({}, 50052, {"threads": 4})]
    assert plan(4, ["0"], device="cpu", tensor_parallel_size=2)[0][2]["threads"] == 1
    assert plan(2, [], threads=3)[0][2]["threads"] == 3


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that are free."""
    for first in range(51_000, 60_000, count):
        with socket.socket() as probe:
            if all(probe.connect_ex(("127.0.0.1", first + i)) for i in range(count)):
                return first
    raise AssertionError("no free ports")


def test_two_engines_and_one_client(default_model_dir: Path) -> None:
    """On consecutive ports, and the tokenizer on its own; one engine's end is the end of all."""
    first = free_ports(3)
    command = [
        *(sys.executable, "-m", "millstream.client", "serve", "--replicas", "2"),
        *("--engine-port", str(first), "--tokenizer-port", str(first + 2)),
        *("--model", str(default_model_dir), "--runner", "instant"),
    ]
    serve = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        targets = [f"127.0.0.1:{first + index}" for index in range(3)]
        with Client(targets[:2], targets[2], timeout_s=60) as client:
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            assert len(client.generate([[1, 2]] * 20, params, use_tqdm=False)) == 20
        everyone = descendants(serve.pid)
        engine = next(pid for pid in everyone if runs(pid, f"--port\0{first + 1}"))
        subprocess.run(["kill", "-9", str(engine)], check=True)
        _, stderr = serve.communicate(timeout=20)
        assert serve.returncode == 1
        assert re.search(r"the engine stopped: signal 9", stderr)
        assert all_end(everyone, 5)
    finally:
        if serve.poll() is None:
            serve.send_signal(signal.SIGTERM)
            serve.wait(20)


def runs(pid: int, arguments: str) -> bool:
    try:
        return arguments.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
