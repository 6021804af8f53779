"""ToyRunner: a Runner whose "model" makes any loss, duplication or wrong reuse of KV visible.

Where a real one stores K and V, its paged KV stores the position, the token id and a checksum of
the whole prefix, made from the entry before. The next token is a function of the prefix as it is
read back through the block table, and of the seed. A plan is carried out when it is collected, as
by a device that lags behind the host. But where two may be in flight, the blocks that a plan
without starts appends are in the table at its launch, before the step in flight: as on a GPU.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.engine.config import EngineConfig
from millstream.engine.plan import Chunk, Plan, RunnerInfo, SlotStart, StepResult, TokenLogprobs
from millstream.engine.request import FinishReason, Request, Sampling


def toy_info(
    *,
    vocab_size: int = 1000,
    eos_token_ids: tuple[int, ...] = (),
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    block_size: int = 4,
    num_blocks: int = 32,
    max_in_flight: int = 1,
) -> RunnerInfo:
    return RunnerInfo(
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_in_flight=max_in_flight,
    )


def toy_request(
    key: int,
    token_ids: list[int],
    *,
    cache_salt: str = "",
    priority: int = 0,
    client: int = 0,
    **sampling: Any,
) -> Request:
    sampling.setdefault("max_tokens", 8)
    return Request(
        key=key,
        token_ids=token_ids,
        sampling=Sampling(**sampling),
        cache_salt=cache_salt,
        priority=priority,
        client=client,
    )


def next_token(prefix: list[int], seed: int, vocab_size: int, banned: Collection[int] = ()) -> int:
    """The toy model."""
    token_id = zlib.crc32(array("I", [seed & 0xFFFFFFFF, *prefix]).tobytes()) % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def reference(request: Request, info: RunnerInfo) -> tuple[list[int], FinishReason]:
    """The output of a request, computed naively: the truth that scheduling must not change."""
    sampling, prompt_len = request.sampling, len(request.token_ids)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids)}
    token_ids = list(request.token_ids)
    while True:
        early = len(token_ids) - prompt_len < sampling.min_tokens
        token_id = next_token(token_ids, sampling.seed, info.vocab_size, stops if early else ())
        token_ids.append(token_id)
        if token_id in stops:
            return token_ids[prompt_len:], FinishReason.STOP
        if (
            len(token_ids) - prompt_len == sampling.max_tokens
            or len(token_ids) == info.max_model_len
        ):
            return token_ids[prompt_len:], FinishReason.LENGTH


def _checksum(before: int, token_id: int) -> int:
    return zlib.crc32(array("I", [before, token_id]).tobytes())


def score(checksum: int, token_id: int) -> TokenLogprobs:
    """The toy's log probability of a token after a prefix with this checksum."""
    return TokenLogprobs(-float(_checksum(checksum, token_id)), [token_id], [0.0])


def prompt_scores(request: Request) -> list[TokenLogprobs]:
    """What prompt_logprobs are of a request."""
    checksum, scores = 0, []
    for token_id, target in itertools.pairwise(request.token_ids):
        checksum = _checksum(checksum, token_id)
        scores.append(score(checksum, target))
    return scores


@dataclass(frozen=True, slots=True)
class _Entry:
    position: int
    token_id: int
    checksum: int  # of the prefix that ends here


_Place = tuple[int, int, int]  # slot, which of its blocks, block id


@dataclass(slots=True)
class _Slot:
    start: SlotStart
    block_ids: list[int]  # the slot's row of the block tables
    num_computed: int
    last: int | None = None


class ToyRunner:
    """Also checks that each plan keeps plan.py's contract."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.plans: list[Plan] = []
        self.num_sampled = 0
        self.closed = False
        self._launched: deque[tuple[Plan, list[_Place]]] = deque()
        self._slots: list[_Slot | None] = [None] * info.max_num_seqs
        width = -(-info.max_model_len // info.block_size)
        self._tables = [[0] * width for _ in range(info.max_num_seqs)]
        self._num_blocks = [0] * info.max_num_seqs  # of the slots' rows, once all is carried out
        self._kv: list[list[_Entry | None]] = [
            [None] * info.block_size for _ in range(info.num_blocks + 1)
        ]

    def launch(self, plan: Plan) -> None:
        assert len(self._launched) < self.info.max_in_flight
        assert 0 < plan.num_tokens <= self.info.max_num_batched_tokens
        assert not self.plans or plan.step == self.plans[-1].step + 1
        advanced = [chunk.slot for chunk in plan.chunks] + list(plan.decode_slots)
        assert len(set(advanced)) == len(advanced) <= self.info.max_num_seqs
        started = {start.slot for start in plan.starts}
        assert len(started) == len(plan.starts)
        assert not started & {slot for slot, _ in plan.block_appends}
        self.plans.append(plan)
        places = self._note_blocks(plan)
        if not plan.starts and self.info.max_in_flight <= 2:
            self._write_blocks(places)
            places = []
        self._launched.append((plan, places))

    def _note_blocks(self, plan: Plan) -> list[_Place]:
        places = []
        for start in plan.starts:
            places += [(start.slot, index, block) for index, block in enumerate(start.block_ids)]
            self._num_blocks[start.slot] = len(start.block_ids)
        for number, block_id in plan.block_appends:
            assert self._num_blocks[number], f"slot {number} never started"
            places.append((number, self._num_blocks[number], block_id))
            self._num_blocks[number] += 1
        return places

    def _write_blocks(self, places: list[_Place]) -> None:
        for number, index, block_id in places:
            self._tables[number][index] = block_id

    def collect(self) -> StepResult:
        plan, places = self._launched.popleft()
        self._write_blocks(places)
        for start in plan.starts:
            assert start.num_computed_tokens % self.info.block_size == 0
            assert bool(start.token_ids) == start.sampling.needs_token_ids
            row = self._tables[start.slot]
            self._slots[start.slot] = _Slot(start, row, start.num_computed_tokens)
        # As in a layer of a model: everything is written before anything is read.
        rows: list[_Slot] = []
        for chunk in plan.chunks:
            slot = self._slot(chunk.slot)
            assert chunk.token_ids
            assert chunk.start == slot.num_computed
            for token_id in chunk.token_ids:
                self._write(slot, token_id)
            slot.last = None
            if chunk.samples:
                rows.append(slot)
        for number in plan.decode_slots:
            slot = self._slot(number)
            assert slot.last is not None, "a decode before its prompt was computed"
            self._write(slot, slot.last)
            rows.append(slot)
        for slot in rows:
            slot.last = self._sample(slot)
        self.num_sampled += len(rows)
        return StepResult(
            step=plan.step,
            token_ids=[slot.last or 0 for slot in rows],
            logprobs=[self._logprobs(slot) for slot in rows]
            if any(slot.start.sampling.logprobs is not None for slot in rows)
            else [],
            prompt_logprobs=[
                [
                    self._score(chunk, chunk.first_target + i, target)
                    for i, target in enumerate(chunk.target_ids)
                ]
                for chunk in plan.chunks
                if chunk.target_ids
            ],
        )

    def close(self) -> None:
        self.closed = True

    def _logprobs(self, slot: _Slot) -> TokenLogprobs | None:
        if slot.start.sampling.logprobs is None:
            return None
        assert slot.last is not None
        return score(self._read(slot, slot.num_computed - 1).checksum, slot.last)

    def _score(self, chunk: Chunk, row: int, target: int) -> TokenLogprobs:
        """Of the token after position chunk.start + row; read back through the KV."""
        return score(self._read(self._slot(chunk.slot), chunk.start + row).checksum, target)

    def _slot(self, number: int) -> _Slot:
        slot = self._slots[number]
        assert slot is not None, f"slot {number} never started"
        return slot

    def _write(self, slot: _Slot, token_id: int) -> None:
        position = slot.num_computed
        assert position < self.info.max_model_len
        index, offset = divmod(position, self.info.block_size)
        block_id = slot.block_ids[index]
        assert 1 <= block_id <= self.info.num_blocks
        known = slot.start.token_ids
        assert not known[position:] or known[position] == token_id, "a start with other tokens"
        before = self._read(slot, position - 1).checksum if position else 0
        self._kv[block_id][offset] = _Entry(position, token_id, _checksum(before, token_id))
        slot.num_computed += 1

    def _read(self, slot: _Slot, position: int) -> _Entry:
        index, offset = divmod(position, self.info.block_size)
        entry = self._kv[slot.block_ids[index]][offset]
        assert entry is not None, f"position {position} was never written"
        assert entry.position == position, f"read KV of position {entry.position} at {position}"
        return entry

    def _sample(self, slot: _Slot) -> int:
        prefix, checksum = [], 0
        for position in range(slot.num_computed):
            entry = self._read(slot, position)
            checksum = _checksum(checksum, entry.token_id)
            assert entry.checksum == checksum, f"KV at {position} belongs to another prefix"
            prefix.append(entry.token_id)
        start = slot.start
        banned = start.banned_token_ids if slot.num_computed < start.min_position else ()
        return next_token(prefix, start.sampling.seed, self.info.vocab_size, banned)


def create(config: EngineConfig, model_dir: Path | None = None) -> ToyRunner:
    """For `--runner tests.toy_runner:create`."""
    return ToyRunner(
        toy_info(
            max_num_seqs=config.max_num_seqs or 8,
            max_num_batched_tokens=config.max_num_batched_tokens or 64,
            max_model_len=config.max_model_len or 64,
            block_size=config.block_size or 4,
            num_blocks=64,
            max_in_flight=2,
        )
    )
