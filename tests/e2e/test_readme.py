"""Runs every grpcurl command of the README against real services and compares the outputs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.client import Client

ROOT = Path(__file__).resolve().parents[2]
GRPCURL = Path(sys.executable).parent / "grpcurl"
# What differs from run to run or from machine to machine.
_VOLATILE = re.compile(
    r'"(seed|request_id|num_blocks|max_num_seqs|tokenizer_fingerprint|\w+_s)": [^\n]*?(,?)$',
    re.MULTILINE,
)


def _commands() -> list[tuple[str, str]]:
    """(command, output) of each grpcurl command in the README."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found = []
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("grpcurl"):
                found.append((command, output))
    return found


def test_the_readme_shows_both_services() -> None:
    commands = " ".join(command for command, _ in _commands())
    for needed in ("list", "describe", "Encode", "Decode", "Generate", "Health/Check", "Watch"):
        assert needed in commands


@pytest.mark.parametrize(("command", "output"), _commands())
def test_grpcurl_prints_what_the_readme_says(
    default_client: Client, command: str, output: str
) -> None:
    command = command.replace("localhost:50051", default_client.engine_target or "")
    command = command.replace("localhost:50052", default_client.tokenizer_target or "")
    done = subprocess.run(
        [str(GRPCURL), *shlex.split(command)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert _without_volatile(done.stdout) == _without_volatile(output)


def _without_volatile(text: str) -> str:
    # Whoever sees first that the time is up, grpcurl or the service, has its own words for it.
    text = text.replace("Message: Deadline Exceeded", "Message: context deadline exceeded")
    return _VOLATILE.sub(r'"\1": ...\2', text)
