"""Runners for tests of everything around a model: `--runner tests.fake_runners:NAME`.

The token after t is t + 1, round the vocabulary, so the tokens before EOS (the last id) are counted
by the prompt's last id. `scripted` obeys some prompt ids, so that one engine serves many tests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakSet

from millstream.engine.config import EngineConfig
from millstream.engine.grammars.errors import GrammarError, GrammarsFullError, VocabularyError
from millstream.engine.instant_runner import made_up_result, note_logprobs
from millstream.engine.plan import Plan, RunnerInfo, StepResult
from millstream.engine.request import GrammarSpec

VOCAB_SIZE = 1000
EOS_TOKEN_ID = VOCAB_SIZE - 1
BLOCK_SIZE = 16

# Prompt ids that `scripted` obeys in the step that computes them.
SLEEP_ID = 900  # the step takes SLEEP_S
HANG_ID = 901  # the step never ends, and no other thread of the process runs again
RAISE_ID = 902  # the step raises
DIE_ID = 903  # the process dies

SLEEP_S = 0.5
PACE_S = 0.005
STEPS_BEFORE_FAULT = 20


def tokens_after(token_id: int, count: int) -> list[int]:
    """What a fake runner samples after a prompt that ends with token_id."""
    return [(token_id + 1 + i) % VOCAB_SIZE for i in range(count)]


class FakeRunner:
    """Works one step ahead, like a real one; `before_result` may hold a step up."""

    def __init__(self, config: EngineConfig, before_result: Callable[[Plan], None]) -> None:
        max_num_seqs = config.max_num_seqs or 64
        max_model_len = config.max_model_len or 4096
        self.info = RunnerInfo(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 512,
            block_size=BLOCK_SIZE,
            num_blocks=max_num_seqs * -(-max_model_len // BLOCK_SIZE),
            max_in_flight=2,
        )
        self._before_result = before_result
        self._last = [0] * max_num_seqs
        self._num_logprobs: dict[int, int] = {}
        self._launched: deque[tuple[Plan, StepResult]] = deque()

    def launch(self, plan: Plan) -> None:
        token_ids = []
        note_logprobs(plan, self._num_logprobs)
        for chunk in plan.chunks:
            if chunk.samples:
                self._last[chunk.slot] = (chunk.token_ids[-1] + 1) % VOCAB_SIZE
                token_ids.append(self._last[chunk.slot])
        for slot in plan.decode_slots:
            self._last[slot] = (self._last[slot] + 1) % VOCAB_SIZE
            token_ids.append(self._last[slot])
        self._launched.append((plan, made_up_result(plan, token_ids, self._num_logprobs)))

    def collect(self) -> StepResult:
        plan, result = self._launched.popleft()
        self._before_result(plan)
        return result

    def close(self) -> None:
        self._launched.clear()


def echo(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """Answers at once."""
    return FakeRunner(config, lambda plan: None)


def paced(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """A step takes PACE_S."""
    return FakeRunner(config, lambda plan: time.sleep(PACE_S))


def slow_prefill(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """A step with prompt tokens takes SLEEP_S."""
    return FakeRunner(config, lambda plan: time.sleep(SLEEP_S if plan.chunks else 0))


def faulty(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """Paced; after so many steps it raises."""
    steps = itertools.count(1)

    def count(plan: Plan) -> None:
        time.sleep(PACE_S)
        if next(steps) > STEPS_BEFORE_FAULT:
            raise RuntimeError("worn out\n(and a second line)")

    return FakeRunner(config, count)


def scripted(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """Paced, and obeys the ids above."""

    def obey(plan: Plan) -> None:
        time.sleep(PACE_S)
        token_ids = {token_id for chunk in plan.chunks for token_id in chunk.token_ids}
        if SLEEP_ID in token_ids:
            time.sleep(SLEEP_S)
        if HANG_ID in token_ids:
            ctypes.PyDLL(None).sleep(3600)  # PyDLL: with the GIL held
        if RAISE_ID in token_ids:
            raise RuntimeError("told to by RAISE_ID")
        if DIE_ID in token_ids:
            os.kill(os.getpid(), signal.SIGKILL)

    return FakeRunner(config, obey)


class GrammarRunner(FakeRunner):
    """Prepares grammars, and then follows none. Their texts say what comes of it: `fail TEXT`,
    `full TEXT`, `vocabulary TEXT`, or `wait SECONDS` before it is well; of `how many are kept` the
    refusal tells that of the others."""

    def __init__(self, config: EngineConfig, before_result: Callable[[Plan], None]) -> None:
        super().__init__(config, before_result)
        self.info = dataclasses.replace(self.info, structured_output=True)
        self._kept = WeakSet[Future[object]]()

    def prepare_grammar(self, spec: GrammarSpec) -> Future[object]:
        what, _, value = spec.text.partition(" ")
        outcome: Future[object] = Future()
        if what == "fail":
            outcome.set_exception(GrammarError(value))
        elif what == "full":
            outcome.set_exception(GrammarsFullError(value))
        elif what == "vocabulary":
            outcome.set_exception(VocabularyError(value))
        elif what == "wait":
            threading.Timer(float(value), outcome.set_result, [None]).start()
        elif what == "how":
            outcome.set_exception(GrammarError(f"{len(self._kept)} are kept"))
        else:
            outcome.set_result(None)
        self._kept.add(outcome)
        return outcome


def grammars(config: EngineConfig, model_dir: Path | None) -> GrammarRunner:
    """Paced."""
    return GrammarRunner(config, lambda plan: time.sleep(PACE_S))


def slow_load(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    """Takes a minute to load."""
    time.sleep(60)
    return echo(config, model_dir)


def refuses_to_load(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    raise ValueError("dtype float16 is not supported on this device\n(and a second line)")


def fails_to_load(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    raise RuntimeError("no memory\n(and a second line)")


def dies_while_loading(config: EngineConfig, model_dir: Path | None) -> FakeRunner:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")
