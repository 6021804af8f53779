"""Two engines with the real default model, and gateways in front of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.engine_processes import EngineProcess

if TYPE_CHECKING:
    from tests.gateway.processes import Gateway

# Nothing here is to be imported where the extra gateway-test is not installed.
if find_spec("smg") is None or find_spec("openai") is None:
    collect_ignore_glob = ["test_*.py"]

MODEL = "SmolLM2-135M-Instruct"
_FLAGS = ["--kv-cache-bytes", "300000000", "--max-num-seqs", "16", "--threads", "1"]


@contextlib.contextmanager
def default_engines(model_dir: Path, count: int) -> Iterator[Sequence[EngineProcess]]:
    """So many at once: starting is mostly waiting."""
    with contextlib.ExitStack() as ended:
        started = []
        for _ in range(count):
            server = EngineProcess("--model", str(model_dir), *_FLAGS, runner="model")
            ended.callback(server.stop)
            started.append(server)
        for server in started:
            server.wait_until_serving()
        yield started


@pytest.fixture(scope="session")
def engines(default_model_dir: Path) -> Iterator[Sequence[EngineProcess]]:
    with default_engines(default_model_dir, 2) as started:
        yield started


@pytest.fixture(scope="session")
def one(
    engines: Sequence[EngineProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway in front of the first engine alone."""
    from tests.gateway.processes import gateway

    log = tmp_path_factory.mktemp("gateway") / "one.log"
    with gateway([engines[0].target], MODEL, log) as started:
        yield started
