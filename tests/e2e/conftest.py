"""One pair of real services with the real default model, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.client import Client, launch


@pytest.fixture(scope="session")
def default_client(default_model_dir: Path) -> Iterator[Client]:
    with launch(str(default_model_dir), max_num_seqs=64) as client:
        yield client
