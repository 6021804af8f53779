"""Flags that take several token ids, and a prompt that comes after them."""

from __future__ import annotations

import io
import sys

import pytest
from tests.fake_services import FakeServices

from millstream.client.__main__ import run


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ("--stop-token-ids 1 2 hello", [1, 2]),
        ("--top-k 5 --stop-token-ids 1 2 hello --stop-token-ids 3", [1, 2, 3]),
        ("--allowed-token-ids 104 101 108 111 --stop-token-ids 1 hello --top-k 5", [1]),
        ("--stop-token-ids 1 --allowed-token-ids 104 101 108 111 hello", [1]),
        ("--stop-token-ids 1 2 -- hello", [1, 2]),
        ("hello --stop-token-ids 1 2", [1, 2]),
    ],
)
def test_a_prompt_after_token_ids_is_found(
    targets: list[str], threaded_services: FakeServices, arguments: str, ids: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(["generate", *targets, *arguments.split()]) == 0
    assert capsys.readouterr().out == "hello\n"
    sampling = threaded_services.engine.messages[0].submit[0].sampling
    assert list(sampling.stop_token_ids) == ids


def test_stdin_after_token_ids(
    targets: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert run(["generate", *targets, "--stop-token-ids", "1", "-"]) == 0
    assert capsys.readouterr().out == "from stdin\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--stop-token-ids 1 2", "required: PROMPT"),
        ("--stop-token-ids 1 2 3", "required: PROMPT"),
        ("--stop-token-ids hello", "invalid int value: 'hello'"),
        ("--stop-token-ids 1 hello again", "invalid int value: 'again'"),
    ],
)
def test_token_ids_without_a_prompt(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(["generate", *arguments.split()])
    assert said in capsys.readouterr().err
