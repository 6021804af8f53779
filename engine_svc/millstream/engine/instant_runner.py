"""InstantRunner: answers at once, without a model, so that everything around one can be measured.

A token is a function of the one before it alone, and its log probability one of itself, so that
streams can still be checked.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from millstream.engine.config import EngineConfig
from millstream.engine.plan import Plan, RunnerInfo, StepResult, TokenLogprobs


def made_up_result(plan: Plan, token_ids: list[int], num_logprobs: dict[int, int]) -> StepResult:
    """A plan's tokens with the log probabilities that were asked for. num_logprobs: what the slots
    of the requests that asked are to get."""
    logprobs: list[TokenLogprobs | None] = []
    if num_logprobs:
        slots = [*(chunk.slot for chunk in plan.chunks if chunk.samples), *plan.decode_slots]
        counts = [num_logprobs.get(slot) for slot in slots]
        logprobs = [
            None if count is None else made_up(token_id, count)
            for token_id, count in zip(token_ids, counts, strict=True)
        ]
    prompt_logprobs = [
        [made_up(token_id, 1) for token_id in chunk.target_ids]
        for chunk in plan.chunks
        if chunk.target_ids
    ]
    return StepResult(
        step=plan.step, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def made_up(token_id: int, count: int) -> TokenLogprobs:
    """A function of the token alone; every number of it is exact in float32."""
    ids = [max(0, token_id - i) for i in range(count)]
    return TokenLogprobs(-token_id / 16, ids, [-each / 16 for each in ids])


def note_logprobs(plan: Plan, num_logprobs: dict[int, int]) -> None:
    """Keeps made_up_result's num_logprobs true to the slots that a plan starts."""
    for start in plan.starts:
        num_logprobs.pop(start.slot, None)
        if start.sampling.logprobs is not None:
            num_logprobs[start.slot] = start.sampling.logprobs


class InstantRunner:
    """A Runner whose token after t is t + 1, round the vocabulary and past the EOS ids."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        allowed = [i for i in range(info.vocab_size) if i not in set(info.eos_token_ids)]
        self._next = [allowed[0]] * info.vocab_size
        smallest = allowed[0]
        for token_id in reversed(range(info.vocab_size)):  # the smallest allowed id above it
            self._next[token_id] = smallest
            if token_id not in info.eos_token_ids:
                smallest = token_id
        self._last = [0] * info.max_num_seqs  # by slot
        self._num_logprobs: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, plan: Plan) -> None:
        after, last = self._next, self._last
        note_logprobs(plan, self._num_logprobs)
        token_ids = []
        for chunk in plan.chunks:
            if chunk.samples:
                last[chunk.slot] = after[chunk.token_ids[-1]]
                token_ids.append(last[chunk.slot])
        for slot in plan.decode_slots:
            last[slot] = token_id = after[last[slot]]
            token_ids.append(token_id)
        self._results.append(made_up_result(plan, token_ids, self._num_logprobs))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


def create(config: EngineConfig, model_dir: Path | None = None) -> InstantRunner:
    """The runner that `--runner instant` names; every sequence fits at full length at once."""
    max_num_seqs = config.max_num_seqs or 256
    max_model_len = config.max_model_len or 8192
    block_size = config.block_size or 16
    return InstantRunner(
        RunnerInfo(
            vocab_size=32000,
            eos_token_ids=(),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 8192,
            block_size=block_size,
            num_blocks=max_num_seqs * -(-max_model_len // block_size),
            max_in_flight=2,
        )
    )
