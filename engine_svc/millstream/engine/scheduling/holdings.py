"""Holdings: the slots and KV blocks of running sequences, and what the prefix cache learns of them.

A sequence has both or neither. Blocks for all known tokens come with the slot; one more at a time
while it decodes. Asking and taking are apart, as in the block pool.

What decoding writes to the cache differs by rounding from what chunks write. Where bits count
(RunnerInfo.batch_invariant) it is neither shared nor computed again: a sequence is taken when there
is room for all that it and the others may come to need.
"""

from __future__ import annotations

from collections.abc import Collection

from millstream.engine.block_pool import BlockPool
from millstream.engine.plan import RunnerInfo
from millstream.engine.sequence import Sequence


class Holdings:
    """Changes the holdings of sequences and nothing else of them."""

    def __init__(self, info: RunnerInfo, prefix_caching: bool) -> None:
        self.pool = BlockPool(info.num_blocks, info.block_size, prefix_caching)
        self._max_num_seqs = info.max_num_seqs
        self._block_size = info.block_size
        self._free_slots = list(reversed(range(info.max_num_seqs)))
        # Kept free at admission, so that a newcomer is not preempted at once.
        self._spare_blocks = info.num_blocks // 100
        self._batch_invariant = info.batch_invariant
        self._blocks_to_come = 0  # at most, of all that hold a slot

    @property
    def num_slots_used(self) -> int:
        return self._max_num_seqs - len(self._free_slots)

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def has_block(self) -> bool:
        return self.pool.can_allocate(1)

    def take(self, sequence: Sequence) -> bool:
        """Gives it a slot, of which one must be free, and blocks for all its known tokens: those
        that the prefix cache has, which count as computed, and new ones. False if there are too
        few; then it gets nothing."""
        known, size = len(sequence.token_ids), self._block_size
        cached = self._cached(sequence)
        num_new = -(-known // size) - len(cached)
        spare = self._spare_blocks if self.num_slots_used else 0
        if self._batch_invariant:
            spare = self._blocks_to_come + sequence.most_blocks(size) - (-(-known // size))
        if not self.pool.can_allocate(num_new + spare, cached):
            return False
        sequence.slot = self._free_slots.pop()
        sequence.num_computed_tokens = len(cached) * size
        sequence.num_registered_blocks = len(cached)
        self._blocks_to_come += sequence.most_blocks(size)
        self._give_blocks(sequence, self.pool.allocate(num_new, cached))
        return True

    def tokens_to_compute(self, sequence: Sequence) -> int:
        """How many known tokens of one that waits the prefix cache does not have."""
        return len(sequence.token_ids) - len(self._cached(sequence)) * self._block_size

    def _cached(self, sequence: Sequence) -> list[int]:
        """The cached blocks of its leading tokens, which need not be computed."""
        # The last token always is: its logits are wanted. So are those of the whole prompt if its
        # log probabilities are.
        if not self.pool.prefix_caching or sequence.wants_targets:
            return []
        size = self._block_size
        return self.pool.match(sequence.block_names(0, (len(sequence.token_ids) - 1) // size, size))

    def extend(self, sequence: Sequence) -> tuple[int, int]:
        """Gives it one more block, which must be free: (slot, block id)."""
        self.register(sequence)
        self._give_blocks(sequence, self.pool.allocate(1))
        return sequence.slot, sequence.block_ids[-1]

    def register(self, sequence: Sequence) -> None:
        """Tells the prefix cache of full blocks whose tokens are known and computed: by a launched
        plan or an earlier chunk of this plan at the latest, so that what comes after may read."""
        size, first = self._block_size, sequence.num_registered_blocks
        shared = sequence.prompt_len if self._batch_invariant else len(sequence.token_ids)
        full = min(sequence.num_computed_tokens, shared) // size
        if self.pool.prefix_caching and full > first:
            names = sequence.block_names(first, full, size)
            self.pool.register(sequence.block_ids[first:full], names)
            sequence.num_registered_blocks = full

    def give_back(self, sequence: Sequence) -> None:
        """Takes slot and blocks from it. Plans in flight may still write to them; whatever plan
        uses them next runs after those."""
        self.register(sequence)
        self._blocks_to_come -= sequence.most_blocks(self._block_size) - len(sequence.block_ids)
        self.pool.free(sequence.block_ids)
        self._free_slots.append(sequence.slot)
        sequence.block_ids = []
        sequence.slot = -1

    def _give_blocks(self, sequence: Sequence, block_ids: list[int]) -> None:
        sequence.block_ids += block_ids
        self._blocks_to_come -= len(block_ids)
        backed = len(sequence.block_ids) * self._block_size
        sequence.compute_limit = min(backed, sequence.max_computed_tokens)

    def check_invariants(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless these, and only these, hold something."""
        slots = [sequence.slot for sequence in running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "slots leak"
        self.pool.check_invariants([sequence.block_ids for sequence in running])
        size = self._block_size
        to_come = [sequence.most_blocks(size) - len(sequence.block_ids) for sequence in running]
        assert sum(to_come) == self._blocks_to_come
