"""Libraries for structured output, side by side on the default model's tokenizer.

    python -m tests.bench.grammar_libraries [--tokenizer DIR] [--rounds 5] [--documents 40]

Compiles a schema (a fresh object each time), then walks random documents of it token by token:
fill a row's mask, accept the token. Times are microseconds of processor time: medians over rounds
of a round's median compile, mean and worst fill, and mean accept. xgrammar is no dependency: it is
measured where it can be imported (pip install --target DIR xgrammar, and DIR on PYTHONPATH).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tests.structured_schemas import ORDER
from tokenizers import Tokenizer

from millstream import hub

COMPILES = 10  # a round


class Walk(Protocol):
    def fill(self) -> None: ...

    def accept(self, token_id: int) -> bool: ...


Compile = Callable[[], Callable[[], Walk]]  # compiling gives what starts walks


class Guidance:
    def __init__(self, folder: Path, vocab_size: int, eos_token_id: int) -> None:
        import llguidance

        self._library = llguidance
        file = str(folder / "tokenizer.json")
        self._tokenizer = llguidance.LLTokenizer(file, vocab_size, eos_token_id)
        self._row = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def compile(self) -> Callable[[], Walk]:
        matcher_class = self._library.LLMatcher
        grammar = matcher_class.grammar_from_json_schema(
            json.dumps(ORDER), overrides={"whitespace_flexible": False}
        )
        matcher = matcher_class(self._tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        row = self._row

        class Started:
            def __init__(self) -> None:
                self._matcher = matcher.deep_copy()

            def fill(self) -> None:
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

            def accept(self, token_id: int) -> bool:
                return bool(self._matcher.consume_token(token_id))

        return Started


class XGrammar:
    def __init__(self, folder: Path, vocab_size: int, eos_token_id: int) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(folder),
            vocab_size=vocab_size,
            stop_token_ids=[eos_token_id],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._row = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self) -> Callable[[], Walk]:
        compiled = self._compiler.compile_json_schema(
            json.dumps(ORDER), any_whitespace=False, separators=(",", ":")
        )
        library, row = self._library, self._row

        class Started:
            def __init__(self) -> None:
                self._matcher = library.GrammarMatcher(compiled)

            def fill(self) -> None:
                self._matcher.fill_next_token_bitmask(row)

            def accept(self, token_id: int) -> bool:
                return bool(self._matcher.accept_token(token_id))

        return Started


LIBRARIES: dict[str, Any] = {"llguidance": Guidance, "xgrammar": XGrammar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="a model's folder; default: the embedded model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=40)
    arguments = parser.parse_args()
    folder = hub.resolve(arguments.tokenizer)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size, eos_token_id = tokenizer.get_vocab_size(), 2
    names = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    starts = {name: _import_cost(name) for name in names}
    libraries, loads = {}, {}
    for name in names:
        begun = time.perf_counter()
        libraries[name] = LIBRARIES[name](folder, vocab_size, eos_token_id)
        loads[name] = time.perf_counter() - begun
    rng = random.Random(0)
    walks = [
        tokenizer.encode(_document(rng), add_special_tokens=False).ids
        for _ in range(arguments.documents)
    ]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            rounds[name].append(_measure(libraries[name].compile, walks, eos_token_id))
    for name in names:
        medians = {
            key: round(statistics.median(each[key] for each in rounds[name]), 1)
            for key in rounds[name][0]
        }
        print(
            json.dumps(
                {"library": name, **starts[name], "load_s": round(loads[name], 2), **medians}
            )
        )


def _measure(compile_once: Compile, walks: list[list[int]], eos_token_id: int) -> dict[str, float]:
    compiles: list[float] = []
    for _ in range(COMPILES):
        begun = time.process_time()
        start = compile_once()
        start().fill()  # what a library leaves to the first mask counts
        compiles.append(time.process_time() - begun)
    fills: list[float] = []
    accepts: list[float] = []
    for walk in walks:
        state = start()
        for token_id in [*walk, eos_token_id]:
            begun = time.process_time()
            state.fill()
            filled = time.process_time()
            assert state.accept(token_id), walk
            fills.append(filled - begun)
            accepts.append(time.process_time() - filled)
    microseconds = {
        "compile_us": statistics.median(compiles),
        "fill_mean_us": statistics.mean(fills),
        "fill_worst_us": max(fills),
        "accept_mean_us": statistics.mean(accepts),
    }
    return {name: value * 1e6 for name, value in microseconds.items()}


def _document(rng: random.Random) -> str:
    """A random order, as the schema has it."""
    words = ["Ada", "Zoë", "Łukasz", "日本", "O'Neil"]
    order: dict[str, Any] = {
        "id": f"{rng.choice('ABZ')}{rng.choice('QRS')}-{rng.randrange(10000):04}",
        "customer": {"name": " ".join(rng.choices(words, k=2)), "age": rng.randrange(131)},
        "items": [
            {"sku": rng.choice(["tea", "coffee", "café au lait"]), "quantity": rng.randint(1, 99)}
            for _ in range(rng.randint(1, 3))
        ],
        "priority": rng.choice(["low", "normal", "high", None]),
        "note": rng.choice([None, "leave at the door", "größer, bitte"]),
        "price": f"{rng.randrange(10000)}.{rng.randrange(100):02}",
        "paid": rng.random() < 0.5,
    }
    return json.dumps(order, ensure_ascii=False, separators=(",", ":"))


def _import_cost(name: str) -> dict[str, Any]:
    code = (
        "import time, sys, resource\n"
        "memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before, begun = memory(), time.perf_counter()\n"
        f"import {name}\n"
        "print(time.perf_counter() - begun, memory() - before, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    seconds, mib, torch = subprocess.check_output(command, text=True).split()
    return {
        "import_s": round(float(seconds), 2),
        "import_mib": round(float(mib)),
        "imports_torch": torch == "True",
    }


if __name__ == "__main__":
    main()
