"""How a runner's steps get from logits to token ids: alone, or as one of the ranks that hold parts
of the vocabulary. Which of the two is settled when the runner loads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from millstream.engine.ops import SlotOps
from millstream.engine.ranks.shard_sampling import ShardSampler
from millstream.engine.sampling import sample
from millstream.engine.slots import SlotTable
from millstream.engine.stepping.batch_layout import BatchLayout

# Token ids [R] int64 out of whole rows of logits [R, vocab_size].
Choose = Callable[[Tensor], Tensor]


class Sampler:
    """Where the model gives logits of the whole vocabulary."""

    def __init__(self, slots: SlotTable, ops: SlotOps | None) -> None:
        """ops: None where only the host can lay rows out."""
        self._slots = slots
        self._ops = ops

    def sample(self, layout: BatchLayout, logits: Tensor, positions: Tensor) -> Tensor:
        """Token ids [R] of the model's logits [R, V], the layout's rows that sample, at positions
        [R]."""
        return self.sample_whole(layout, logits, positions)

    def sample_slots(
        self, logits: Tensor, positions: Tensor, slots: Tensor, *, filtered: bool
    ) -> Tensor:
        """The same for `slots` [R] alone, without the host: a CUDA graph may record it."""
        return self._slot_ops.sample(
            logits, positions, slots, self._slots.sampling, filtered=filtered
        )

    def sample_and_advance(
        self, logits: Tensor, positions: Tensor, slots: Tensor, *, filtered: bool
    ) -> Tensor:
        """As sample_slots, of slots that decode: their state is the next step's then."""
        sampling, state = self._slots.sampling, self._slots.state
        return self._slot_ops.sample(
            logits, positions, slots, sampling, filtered=filtered, advanced=state
        )

    def choose(self, logits: Tensor, choose: Choose) -> Tensor:
        """What `choose` makes of the model's logits, once their rows are whole; on all ranks."""
        return choose(logits)

    def whole_rows(self, logits: Tensor) -> Tensor:
        """[R, vocab_size] of the model's logits."""
        return logits

    def sample_whole(self, layout: BatchLayout, whole: Tensor, positions: Tensor) -> Tensor:
        """As sample, of rows that are whole already."""
        if self._ops is None:
            return sample(whole.float(), positions, self._slots.sampling_rows(layout))
        # Not self's: a rank's is of its share.
        return Sampler.sample_slots(
            self, whole, positions, layout.sample_slots, filtered=layout.host.has_filters
        )

    @property
    def _slot_ops(self) -> SlotOps:
        assert self._ops is not None, "resolve chose graphs for ops that can"
        return self._ops


class RankSampler(Sampler):
    """Where the model gives a share of the vocabulary's logits."""

    def __init__(self, slots: SlotTable, ops: SlotOps | None, shards: ShardSampler) -> None:
        super().__init__(slots, ops)
        self._shards = shards

    def sample(self, layout: BatchLayout, logits: Tensor, positions: Tensor) -> Tensor:
        if layout.host.plan.whole_rows:
            return self.choose(logits, lambda whole: self.sample_whole(layout, whole, positions))
        if self._ops is None:
            rows = self._slots.sampling_rows(layout)
            return self._shards.sample(logits.float(), positions, rows)
        return self.sample_slots(logits, positions, layout.sample_slots, filtered=False)

    def sample_slots(
        self, logits: Tensor, positions: Tensor, slots: Tensor, *, filtered: bool
    ) -> Tensor:
        """Whatever `filtered`: random rows with filters are gathered whole."""
        sampling = self._slots.sampling
        return self._shards.sample_slots(logits, positions, slots, sampling, self._slot_ops)

    def sample_and_advance(
        self, logits: Tensor, positions: Tensor, slots: Tensor, *, filtered: bool
    ) -> Tensor:
        token_ids = self.sample_slots(logits, positions, slots, filtered=filtered)
        self._slot_ops.advance(slots, token_ids, self._slots.state)
        return token_ids

    def choose(self, logits: Tensor, choose: Choose) -> Tensor:
        return self._shards.sample_whole(logits, choose)

    def whole_rows(self, logits: Tensor) -> Tensor:
        return self._shards.whole_rows(logits)
