"""--generation-config through gRPC: Accepted has what came of file, request and protocol."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine_processes import ROOT, Stream, connect, engine, submission

from millstream.v1 import engine_pb2


def write_model(folder: Path, **generation: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


async def accepted(*flags: str, **asked: Any) -> engine_pb2.SamplingParams:
    with engine(*flags) as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, seed=1, max_tokens=1, **asked))
            await stream.until_ended(1)
            stream.call.cancel()
            return stream.accepted[1].sampling


async def test_the_models_defaults_unless_the_request_or_the_flag_says_otherwise(
    tmp_path: Path,
) -> None:
    model = write_model(
        tmp_path, temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.5
    )
    got = await accepted("--model", model, top_k=0, min_p=0.0)
    assert (got.temperature, got.top_p, got.repetition_penalty) == (0.5, 0.75, 1.5)
    assert (got.top_k, got.min_p) == (0, 0), "what the request sets wins, zero too"
    plain = await accepted("--model", model, "--generation-config", "none")
    assert (plain.temperature, plain.top_p, plain.repetition_penalty) == (1, 1, 1)
    assert (plain.top_k, plain.min_p) == (0, 0)


@pytest.mark.parametrize("value", [3, "warm"])
def test_a_default_that_no_request_could_have_stops_the_start(tmp_path: Path, value: Any) -> None:
    command = [sys.executable, "-m", "millstream.engine", "--port", "0"]
    model = ["--model", write_model(tmp_path, temperature=value)]
    done = subprocess.run(
        [*command, *model, "--runner", "tests.fake_runners:echo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("millstream-engine: error: generation_config.json: temperature")
    assert last.endswith("--generation-config none ignores the file")
