"""Compiles grammars that nobody has compiled yet in a process that may die of it.

A grammar comes from outside, and the library that compiles it has no limit on time, memory or depth
of recursion that it always keeps. So a child process tries each new one first, under the limits of
the operating system. What it survives, the engine compiles too.

    parent (GrammarChecker)  -- {"tokenizer_file": ...}                 --> child
                             <-- ""                                     --
                             -- {"kind": 3, "text": "a+"}               -->
                             <-- 5120 (its size compiled, in bytes)     --
                                 or what is wrong with it                       JSON, a line each
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.engine.grammars.errors import GrammarError, VocabularyError
from millstream.engine.grammars.grammar import compile_grammar, load_vocabulary
from millstream.engine.request import GrammarKind, GrammarSpec

CPU_LIMIT_S = 2  # of processor time, so that a busy machine refuses no more than an idle one
MEMORY_LIMIT_BYTES = 256 << 20  # beside what the vocabulary takes
KEPT_LIMIT_BYTES = 16 << 20  # of a compiled grammar: the engine keeps many
# Below what the engine's threads have: what is shallow enough here is so there too.
STACK_LIMIT_BYTES = 4 << 20
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0  # of the clock: a machine so busy is no better than a broken child

_WHAT_KILLED_IT = {
    signal.SIGXCPU: f"compiling it takes longer than {CPU_LIMIT_S} s",
    signal.SIGABRT: f"compiling it takes more than {MEMORY_LIMIT_BYTES >> 20} MiB",
    signal.SIGSEGV: "it is nested too deeply",
}


class GrammarChecker:
    """The parent's side. The child is started when it is first needed, and again after it died.
    One thread only may use it."""

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._vocabulary = {
            "tokenizer_file": str(tokenizer_file),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: _Lines | None = None

    def check(self, spec: GrammarSpec) -> int:
        """The bytes that it takes when it is compiled. Raises GrammarError for a grammar that the
        engine should not compile."""
        if self._lines is None:
            self._lines = self._start()
        answer = self._ask({"kind": int(spec.kind), "text": spec.text}, _ANSWER_TIMEOUT_S)
        if isinstance(answer, str):
            raise GrammarError(answer)
        return answer

    def close(self) -> None:
        """Ends the child; check() may start another."""
        if self._lines is not None:
            self._lines.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._lines = self._process = None

    def _start(self) -> _Lines:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library's last words, when it dies
            )
        self._lines = _Lines(ours)
        if problem := self._ask(self._vocabulary, _START_TIMEOUT_S):
            self.close()
            raise VocabularyError(str(problem))
        return self._lines

    def _ask(self, question: dict[str, Any], timeout_s: float) -> str | int:
        assert self._lines is not None
        try:
            self._lines.send(question, timeout_s)
            answer = self._lines.receive(timeout_s)
        except OSError:  # a timeout too
            answer = None
        if not isinstance(answer, str | int):
            return self._explain_end()
        return answer

    def _explain_end(self) -> str:
        """What to say of a question that was not answered; the child is ended."""
        process = self._process
        assert process is not None
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        signalled = signal.Signals(-code) if code < 0 else None
        return _WHAT_KILLED_IT.get(signalled, "compiling it fails")  # type: ignore[arg-type]


class _Lines:
    """JSON values, a line each, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def send(self, value: object, timeout_s: float | None = None) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next value; None at the end of file. Raises TimeoutError, if not much comes."""
        self._connection.settimeout(timeout_s)
        while (end := self._received.find(b"\n")) < 0:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return json.loads(line)

    def close(self) -> None:
        self._connection.close()


# ---- the child


def main() -> None:
    """Answers until the parent closes the socket; signals to the process group are its business."""
    parser = argparse.ArgumentParser(prog="python -m millstream.engine.grammars.checker")
    parser.add_argument("--fd", type=int, required=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lines = _Lines(socket.socket(fileno=parser.parse_args().fd))
    start = lines.receive()
    if start is None:
        return
    try:
        vocabulary = load_vocabulary(
            Path(start["tokenizer_file"]), start["vocab_size"], start["eos_token_ids"]
        )
    except GrammarError as error:
        lines.send(str(error))
        return
    lines.send("")
    _limit_memory()
    while (question := lines.receive()) is not None:
        _limit_time()
        answer: str | int
        try:
            spec = GrammarSpec(kind=GrammarKind(question["kind"]), text=question["text"])
            before = _allocated_bytes()
            compiled = compile_grammar(vocabulary, spec)
            answer = max(0, _allocated_bytes() - before)
            if answer > KEPT_LIMIT_BYTES:
                answer = f"compiled, it takes more than {KEPT_LIMIT_BYTES >> 20} MiB"
            del compiled
        except GrammarError as error:
            answer = str(error) or "it cannot be compiled"
        except BaseException as error:  # the library's panics are no Exceptions
            answer = f"compiling it fails: {type(error).__name__}"
        lines.send(answer)


def _allocated_bytes() -> int:
    """What the process has allocated; 0 where the C library is not glibc."""
    if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_LIMIT_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Ends this process when the next grammar takes CPU_LIMIT_S."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
