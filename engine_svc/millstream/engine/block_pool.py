"""BlockPool: who holds which KV block, and which block holds which prefix.

A block is free when nobody holds it. A free block keeps its content, and its entry in the prefix
cache, until it is taken for something else: least recently freed first, blocks that no prefix names
before all others. Block ids are 1..num_blocks; block 0 is the runner's scratch.

A prefix is named by a chain of sha256 digests over (digest of the prefix before, the block's token
ids), which starts at a digest of the cache salt: equal digests mean equal salt and equal tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items


def root_digest(cache_salt: str) -> bytes:
    """Where the chain of a salt starts; no salt ("") is a namespace of its own."""
    namespace = b"salt:" + cache_salt.encode() if cache_salt else b"unsalted"
    return hashlib.sha256(namespace).digest()


def extend_digests(
    digests: list[bytes], token_ids: list[int], block_size: int, num_blocks: int
) -> None:
    """Lengthens a chain [root, block 0, block 1, ...] in place to cover `num_blocks` blocks."""
    first = len(digests) - 1
    if first >= num_blocks:
        return
    data = array("I", token_ids[first * block_size : num_blocks * block_size])
    for start in range(0, len(data), block_size):
        block = data[start : start + block_size].tobytes()
        digests.append(hashlib.sha256(digests[-1] + block).digest())


class BlockPool:
    """Counts references to blocks. Asking (match, can_allocate) and taking (allocate) are apart, so
    nothing is ever rolled back. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of digests."""
        block_ids = []
        for digest in digests:
            block_id = self._block_of.get(digest)
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
        digest = self._digests[block_id]
        if digest is not None:  # its content goes, so the cache must forget it
            del self._block_of[digest]
            self._digests[block_id] = None
        return block_id

    def free(self, block_ids: Items[int]) -> None:
        """Gives up a block table, deepest block first: the heads of prefixes live longest."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._digests[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_ids: Items[int], digests: Items[bytes]) -> None:
        """Names the contents of held, full blocks. Where another block has a name, it keeps it."""
        for block_id, digest in zip(block_ids, digests, strict=True):
            if self._block_of.setdefault(digest, block_id) == block_id:
                self._digests[block_id] = digest

    def check_invariants(self, tables: Iterable[Items[int]]) -> None:
        """Raises AssertionError unless the pool agrees with itself and with the tables in use."""
        held = Counter(block_id for table in tables for block_id in table)
        assert held.get(0) is None, "block 0 was given away"
        for block_id in range(1, self.num_blocks + 1):
            count = self._ref_counts[block_id]
            assert count == held[block_id], f"block {block_id}: {count} != {held[block_id]}"
            assert (count == 0) == (block_id in self._free), f"block {block_id} free, {count} refs"
        named = {digest: i for i, digest in enumerate(self._digests) if digest is not None}
        assert named == self._block_of, "the prefix cache names blocks that do not hold its prefix"
        assert self.prefix_caching or not named
