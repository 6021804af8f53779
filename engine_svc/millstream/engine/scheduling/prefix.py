"""What a full KV block is called: by all the tokens from the start of a sequence to its end.

A prefix is named by a chain of sha256 digests over (digest of the prefix before, the block's token
ids), which starts at a digest of the cache salt: equal digests mean equal salt and equal tokens.
Pure.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec


class BlockName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prefix that ends with a full block, and what the block itself holds. The token ids are kept
    (4 bytes a token) so that whoever asks late what is cached hears of all of it."""

    digest: bytes  # 32 bytes
    parent: bytes | None  # the digest of the prefix before; None for the first block
    token_ids: bytes  # of this block alone, 32 bits each in native order
    cache_salt: str


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The prefix cache has a new block."""

    name: BlockName


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The prefix cache forgot a block."""

    digest: bytes


BlockEvent = BlockStored | BlockRemoved


def extend_names(
    names: list[BlockName], cache_salt: str, token_ids: list[int], block_size: int, num_blocks: int
) -> None:
    """Lengthens the names of a sequence's leading blocks in place to cover `num_blocks` of them."""
    first = len(names)
    if first >= num_blocks:
        return
    parent = names[-1].digest if names else None
    data = array("I", token_ids[first * block_size : num_blocks * block_size])
    for start in range(0, len(data), block_size):
        block = data[start : start + block_size].tobytes()
        digest = hashlib.sha256((parent or _root_digest(cache_salt)) + block).digest()
        names.append(BlockName(digest, parent, block, cache_salt))
        parent = digest


def _root_digest(cache_salt: str) -> bytes:
    """Where the chain of a salt starts; no salt ("") is a namespace of its own."""
    namespace = b"salt:" + cache_salt.encode() if cache_salt else b"unsalted"
    return hashlib.sha256(namespace).digest()
