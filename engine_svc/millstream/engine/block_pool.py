"""BlockPool: who holds which KV block, and which block holds which prefix.

A block is free when nobody holds it. A free block keeps its content, and its entry in the prefix
cache, until it is taken for something else: least recently freed first, blocks that no prefix names
before all others. Block ids are 1..num_blocks; block 0 is the runner's scratch.

Names are scheduling/prefix.py's. While somebody watches, the pool notes each block that it names or
forgets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items

from millstream.engine.scheduling.prefix import BlockEvent, BlockName, BlockRemoved, BlockStored


class BlockPool:
    """Counts references to blocks. Asking (match, can_allocate) and taking (allocate) are apart, so
    nothing is ever rolled back. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * (num_blocks + 1)
        self._names: list[BlockName | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._events: list[BlockEvent] | None = None  # None while nobody watches

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def match(self, names: Iterable[BlockName]) -> list[int]:
        """The blocks of the longest cached prefix of a sequence with these names."""
        block_ids = []
        for name in names:
            block_id = self._block_of.get(name.digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, num_new: int, cached: Items[int] = ()) -> bool:
        """Whether `num_new` blocks can be taken besides the matched ones, some of them free too."""
        return num_new + sum(not self._ref_counts[block_id] for block_id in cached) <= self.num_free

    def allocate(self, num_new: int, cached: Items[int] = ()) -> list[int]:
        """Takes the matched blocks and new ones, in this order. can_allocate must hold."""
        for block_id in cached:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        return [*cached, *(self._take() for _ in range(num_new))]

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        name = self._names[block_id]
        if name is not None:  # its content goes, so the cache must forget it
            del self._block_of[name.digest]
            self._names[block_id] = None
            if self._events is not None:
                self._events.append(BlockRemoved(name.digest))
        return block_id

    def free(self, block_ids: Items[int]) -> None:
        """Gives up a block table, deepest block first: the heads of prefixes live longest."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._names[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_ids: Items[int], names: Items[BlockName]) -> None:
        """Names the contents of held, full blocks. Where another block has a name, it keeps it."""
        for block_id, name in zip(block_ids, names, strict=True):
            if name.digest not in self._block_of:
                self._block_of[name.digest] = block_id
                self._names[block_id] = name
                if self._events is not None:
                    self._events.append(BlockStored(name))

    # ---- for who watches the prefix cache

    def watch(self) -> list[BlockName]:
        """What is cached, a prefix before its continuations; from now on events are noted."""
        if self._events is None:
            self._events = []
        return self._cached_names()

    def unwatch(self) -> None:
        """Notes no events any longer."""
        self._events = None

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last call, in order; nothing while nobody watches."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def _cached_names(self) -> list[BlockName]:
        ordered: dict[bytes, BlockName] = {}
        for block_id in self._block_of.values():
            path = []
            name = self._names[block_id]
            while name is not None and name.digest not in ordered:
                path.append(name)
                parent_id = self._block_of.get(name.parent) if name.parent else None
                name = None if parent_id is None else self._names[parent_id]
            ordered.update((name.digest, name) for name in reversed(path))
        return list(ordered.values())

    def check_invariants(self, tables: Iterable[Items[int]]) -> None:
        """Raises AssertionError unless the pool agrees with itself and with the tables in use."""
        held = Counter(block_id for table in tables for block_id in table)
        assert held.get(0) is None, "block 0 was given away"
        for block_id in range(1, self.num_blocks + 1):
            count = self._ref_counts[block_id]
            assert count == held[block_id], f"block {block_id}: {count} != {held[block_id]}"
            assert (count == 0) == (block_id in self._free), f"block {block_id} free, {count} refs"
        named = {name.digest: i for i, name in enumerate(self._names) if name is not None}
        assert named == self._block_of, "the prefix cache names blocks that do not hold its prefix"
        assert self.prefix_caching or not named
