"""Progress on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from millstream.hub.progress import StderrProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_steps(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = StderrProgress()
    progress("waiting", 0, 0)
    for step in ("downloading", "converting"):
        for done in range(0, 101, 10):
            progress(step, done * 1_000_000, 100_000_000)
    progress("converting", 10, 100)  # is left unfinished
    progress.close()
    text = stream.getvalue()
    assert text.startswith("waiting\n") and "downloading" in text and "converting" in text
    if stream.isatty():
        assert "100%" in text and "\r" in text
    else:
        assert text.splitlines()[1:3] == ["downloading: 0 of 100 MB", "downloading: 100 of 100 MB"]
