"""Grammars through gRPC with a real model: the library's own refusals, and no process left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine_processes import EngineProcess, Stream, connect, engine, gone, submission
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizers import (
    BYTE_VOCAB_SIZE,
    ENDOFTEXT_ID,
    IM_END_ID,
    byte_ids,
    make_byte_tokenizer,
)

from millstream.rpc import errors


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineProcess]:
    make_tiny_model(tmp_path, vocab_size=BYTE_VOCAB_SIZE, eos_token_id=[ENDOFTEXT_ID, IM_END_ID])
    make_byte_tokenizer(tmp_path)
    with engine("--model", str(tmp_path), runner="model") as started:
        yield started


def checker_pids(core_pid: int) -> list[int]:
    children = Path(f"/proc/{core_pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [p for p in pids if b"grammars.checker" in Path(f"/proc/{p}/cmdline").read_bytes()]


async def test_from_a_bad_schema_to_a_killed_core(server: EngineProcess) -> None:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(6000))  # ends the process that tries it
    async with connect(server.target) as stub:
        stream = Stream(stub)
        await stream.submit(
            submission(1, json_schema='{"uniqueItems": true}'),
            submission(2, grammar=f'start: r0\n{rules}\nr6000: "b"'),
            submission(3, regex="[ab]{4}", max_tokens=9, min_tokens=9, ignore_eos=True),
            submission(4, max_tokens=3, ignore_eos=True),
        )
        await stream.until_ended(1, 2, 3, 4)
        assert not stream.accepted.keys() & {1, 2}
        for handle, field, what in (
            (1, "json_schema", 'Unimplemented keys: ["uniqueItems"]'),
            (2, "grammar", "it is nested too deeply"),
        ):
            refusal = stream.refusal(handle)
            assert isinstance(refusal, errors.InvalidArgument)
            assert refusal.field == f"sampling.{field}"
            assert refusal.message == f"sampling.{field}: {what}"
        byte_of = {token_id: byte for byte, token_id in enumerate(byte_ids(bytes(range(256))))}
        *text, end = stream.token_ids[3]
        assert re.fullmatch(rb"[ab]{4}", bytes(byte_of[token_id] for token_id in text))
        assert end in (ENDOFTEXT_ID, IM_END_ID) and stream.finished[3].stop_token_id == end
        assert len(stream.token_ids[4]) == 3

        core_pid = server.core_pid()
        checkers = checker_pids(core_pid)
        assert 1 <= len(checkers) <= 2
        os.kill(core_pid, signal.SIGKILL)
        for pid in checkers:
            assert await gone(pid, 5)
        stream.call.cancel()
