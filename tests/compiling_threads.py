"""Which threads compile grammars: the engine's never should."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from millstream.engine.grammars import compiled


def watch_compiling(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that compile a grammar from now on; it grows."""
    threads = set[str]()
    compile_grammar = compiled.compile_grammar

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return compile_grammar(*args, **kwargs)

    monkeypatch.setattr(compiled, "compile_grammar", watched)
    return threads
