"""Runs the README's Python and grpcurl commands against real services; the commands' outputs are
compared."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from codeop import compile_command
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from millstream.client import Client

ROOT = Path(__file__).resolve().parents[2]
GRPCURL = Path(sys.executable).parent / "grpcurl"
# What differs from run to run or from machine to machine.
_VOLATILE = re.compile(
    r'"(seed|request_id|num_blocks|max_num_seqs|tokenizer_fingerprint|\w+_s)": [^\n]*?(,?)$',
    re.MULTILINE,
)


def _pieces() -> list[str]:
    """The README's Python, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def _statements(piece: str) -> Iterator[CodeType]:
    """What Python's prompt makes of a piece that is pasted: there an empty line ends a block, and
    nothing else does. Raises SyntaxError."""
    lines: list[str] = []
    for line in [*piece.splitlines(), ""]:
        lines.append(line)
        statement = compile_command("\n".join(lines), "README.md", "single")
        if statement is not None:
            yield statement
            lines.clear()
    assert not lines, "a piece ends in the middle of a statement"


@pytest.mark.parametrize("piece", _pieces())
def test_python_can_be_pasted_at_the_prompt(piece: str) -> None:
    assert list(_statements(piece))


def test_python_runs_as_it_stands(
    default_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but what asks the gateway, which tests/gateway starts."""
    pieces = [piece for piece in _pieces() if "import OpenAI" not in piece]
    assert len(pieces) == 3
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for piece in pieces:
            for statement in _statements(_at(default_client, piece)):
                exec(statement, names)
    finally:
        if "client" in names:
            names["client"].close()
    shown = capsys.readouterr().out
    for said in ("Usage(", "'text': ", "Logprob(", '{"city":"', "It is "):
        assert said in shown


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
    done = subprocess.run(
        [str(GRPCURL), *shlex.split(_at(default_client, command))[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert _without_volatile(done.stdout) == _without_volatile(output)


def _at(client: Client, text: str) -> str:
    """The text with the targets of these services."""
    text = text.replace("localhost:50051", client.engine_target or "")
    return text.replace("localhost:50052", client.tokenizer_target or "")


def _without_volatile(text: str) -> str:
    # Whoever sees first that the time is up, grpcurl or the service, has its own words for it.
    text = text.replace("Message: Deadline Exceeded", "Message: context deadline exceeded")
    return _VOLATILE.sub(r'"\1": ...\2', text)
