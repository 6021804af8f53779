"""What a free request waits for beside one that follows an ambiguous grammar.

    python -m tests.bench.ambiguous_grammar [--tokens 60] [--grammar LARK]

Both in process on a tiny random model with the default model's tokenizer, so that steps are short
and masks are those of 49,152 tokens. Alone, beside a usual grammar, and beside the ambiguous one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.tiny_models import make_tiny_model

from millstream.engine import LLM, SamplingParams
from millstream.hub import resolve
from millstream.rpc.errors import EngineFault

_PROMPT, _EOS = [1, 2, 3], 2
_USUAL, _AMBIGUOUS = "start: /[a-z ]/*", 'start: start start | /[a-z ]/ | ""'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--grammar", default=_AMBIGUOUS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), vocab_size=49152, eos_token_id=_EOS)
        shutil.copy(resolve(None) / "tokenizer.json", folder)
        with LLM(folder, device="cpu") as llm:
            _run(llm, _USUAL, 4)  # warms up
            for grammar in (None, _USUAL, arguments.grammar):
                print(f"beside {grammar}: {_run(llm, grammar, arguments.tokens)}")


def _run(llm: LLM, grammar: str | None, max_tokens: int) -> str:
    llm.add_request(_PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    if grammar is not None:
        endless = {_EOS: -100.0}
        params = SamplingParams(max_tokens=max_tokens, grammar=grammar, logit_bias=endless, seed=1)
        llm.add_request(_PROMPT, params)
    steps_s: list[float] = []
    fault = ""
    while not llm.is_finished():
        started = time.perf_counter()
        try:
            llm.step()
        except EngineFault as error:
            fault = f"; ended at step {len(steps_s)}: {error}"
        steps_s.append(time.perf_counter() - started)
    median_ms, most_ms = statistics.median(steps_s) * 1000, max(steps_s) * 1000
    return f"{sum(steps_s):.2f} s, a step {median_ms:.1f} ms, at most {most_ms:.0f} ms{fault}"


if __name__ == "__main__":
    main()
