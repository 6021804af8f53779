"""Sampling where each rank has the logits of its part of the vocabulary.

Rows that are greedy or drawn without filters are sampled where the shards lie. Shares are whole
blocks of the vocabulary: each rank chooses one of its own and a token of it, with the noise that
they have in the whole vocabulary, and three numbers a row are gathered; the token of the best block
is the row's. Rows that need more (filters, bans, logprobs) are gathered whole, rank 0 samples them,
and the others take its word; so these need not know how.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.engine.edits.slot_edits import is_special
from millstream.engine.ops import SlotOps, SlotSampling
from millstream.engine.parallel import Group, vocab_spans
from millstream.engine.plan import Plan, SlotStart
from millstream.engine.sampling import SamplingRows, block_scores, draw, vocab_block


class RowNeeds:
    """Rank 0's memory of which slots need whole rows."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slots = [False] * max_num_seqs
        self._decodes: tuple[tuple[int, ...], bool] = ((), False)  # those asked for last

    def whole_rows(self, plan: Plan) -> bool:
        """Whether a slot of the plan does, though it may not sample yet: all ranks treat the step
        alike. Plans come in their order."""
        slots = self._slots
        for start in plan.starts:
            slots[start.slot] = needs_whole_row(start)
        if plan.starts or plan.decode_slots is not self._decodes[0]:
            some = any(slots[slot] for slot in plan.decode_slots)
            self._decodes = plan.decode_slots, some
        return self._decodes[1] or any(slots[chunk.slot] for chunk in plan.chunks)


def needs_whole_row(start: SlotStart) -> bool:
    sampling = start.sampling
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return (filters and not sampling.greedy) or is_special(start)


class ShardSampler:
    """Token ids out of the logits of a rank's part of the vocabulary, the same on all ranks."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self._group = group
        self._block_size = vocab_block(vocab_size)
        self._spans = vocab_spans(vocab_size, group.size)
        self._first_id = self._spans[group.rank].start

    def sample_slots(
        self, logits: Tensor, positions: Tensor, slots: Tensor, table: SlotSampling, ops: SlotOps
    ) -> Tensor:
        """As ops.sample without filters, of this rank's logits [R, its share]."""
        if not len(logits):
            return _no_ids(logits)
        best = ops.best_of_shard(logits, positions, slots, table, self._first_id)
        return ops.best_of_shards(self._group.all_gather(best), slots, table)

    def sample(self, logits: Tensor, positions: Tensor, rows: SamplingRows) -> Tensor:
        """As sampling.sample, of this rank's logits in float32 and rows without filters."""
        if not len(logits):
            return _no_ids(logits)
        best = best_of_shard(logits, positions, rows, self._first_id, self._block_size)
        temperatures = torch.zeros_like(best[0])
        if rows.random is not None:
            temperatures.index_copy_(0, rows.random, rows.temperatures)
        return best_of_shards(self._group.all_gather(best), temperatures)

    def sample_whole(self, logits: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """What `sample` makes on rank 0 of the whole rows of this rank's logits."""
        if not len(logits):
            return _no_ids(logits)
        whole = self.whole_rows(logits)
        if self._group.rank == 0:
            token_ids = sample(whole)
        else:
            token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return self._group.from_first(token_ids)

    def whole_rows(self, logits: Tensor) -> Tensor:
        """[R, vocab_size] of every rank's [R, its share]: shares are gathered as wide as the widest
        and cut to what they are."""
        widest = max(span.length for span in self._spans)
        shares = self._group.all_gather(F.pad(logits, (0, widest - logits.shape[1])))
        parts = [share[:, : span.length] for share, span in zip(shares, self._spans, strict=True)]
        return torch.cat(parts, dim=1)


def _no_ids(logits: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=logits.device)


def best_of_shard(
    logits: Tensor, positions: Tensor, rows: SamplingRows, first_id: int, block_size: int
) -> Tensor:
    """[3, R] float32 of logits [R, V]: of each row the two parts of its best block's score
    (sampling.block_scores) and the token id chosen of it; of a greedy row the largest logit, 0, and
    whose it is.

    V logits are of the ids from first_id on, a multiple of block_size, which is the whole
    vocabulary's. Ids are exact in float32: there are fewer than 2**24.
    """
    token_ids = logits.argmax(dim=1)
    largest = logits.gather(1, token_ids[:, None])[:, 0]
    token_ids, noisy = token_ids + first_id, torch.zeros_like(largest)
    if rows.random is not None:
        random = rows.random
        drawn = draw(logits[random], positions[random], rows, block_size, first_id)
        token_ids = token_ids.index_copy(0, random, drawn.token_ids)
        largest = largest.index_copy(0, random, drawn.largest)
        noisy = noisy.index_copy(0, random, drawn.noisy)
    return torch.stack((largest, noisy, token_ids.float()))


def best_of_shards(shards: Tensor, temperatures: Tensor) -> Tensor:
    """The ids [R] int64 that the rows sample, of every rank's best [size, 3, R]; the lowest id of
    equals. temperatures: [R]; 0: greedy."""
    largest, noisy, token_ids = shards.unbind(1)
    scores = block_scores(largest, noisy, torch.where(temperatures > 0, temperatures, 1.0))
    return token_ids.gather(0, scores.argmax(dim=0)[None])[0].long()
