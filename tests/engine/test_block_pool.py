"""BlockPool: reference counts, reuse order, prefix names."""

import random
from array import array

import pytest

from millstream.engine.block_pool import BlockPool
from millstream.engine.scheduling.prefix import BlockName, BlockRemoved, BlockStored, extend_names


def chain(token_ids: list[int], salt: str = "", block_size: int = 4) -> list[BlockName]:
    names: list[BlockName] = []
    extend_names(names, salt, token_ids, block_size, len(token_ids) // block_size)
    return names


def test_ids_start_at_one_and_run_out() -> None:
    pool = BlockPool(3, 4, True)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert not pool.can_allocate(1)
    pool.check_invariants([[1, 2, 3]])


def test_matched_free_blocks_count_as_taken() -> None:
    """Two of the three free blocks are the cached ones, so only one new block is left."""
    pool = BlockPool(3, 4, True)
    names = chain(list(range(8)))
    table = pool.allocate(2)
    pool.register(table, names)
    pool.free(table)
    cached = pool.match(names)
    assert cached == table
    assert pool.can_allocate(1, cached)
    assert not pool.can_allocate(2, cached)
    assert pool.allocate(1, cached)[:2] == table


def test_the_deepest_block_is_reused_first() -> None:
    pool = BlockPool(3, 4, True)
    names = chain(list(range(12)))
    table = pool.allocate(3)
    pool.register(table, names)
    pool.free(table)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(names) == table[:left]


def test_blocks_without_a_name_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2, 4, True)
    cached, unnamed = pool.allocate(2)
    pool.register([cached], chain([1, 2, 3, 4]))
    pool.free([cached])
    pool.free([unnamed])
    assert pool.allocate(1) == [unnamed]


def test_row_46_a_reused_block_loses_its_name() -> None:
    pool = BlockPool(1, 4, True)
    names = chain([1, 2, 3, 4])
    table = pool.allocate(1)
    pool.register(table, names)
    pool.free(table)
    pool.free(pool.allocate(1))
    assert pool.match(names) == []
    pool.check_invariants([])


def test_equal_content_in_two_blocks_has_one_name() -> None:
    pool = BlockPool(2, 4, True)
    names = chain([1, 2, 3, 4])
    first, second = pool.allocate(2)
    pool.register([first], names)
    pool.register([second], names)
    assert pool.match(names) == [first]
    pool.check_invariants([[first], [second]])


def test_row_48_names_differ_by_salt_parent_and_tokens() -> None:
    prompt = list(range(8))
    chains = [
        chain(prompt),
        chain(prompt, "a"),
        chain(prompt, "b"),
        chain(prompt, "unsalted"),
        chain(prompt, "salt:a"),
        chain([9, *prompt[1:]]),
    ]
    digests = [name.digest for names in chains for name in names]
    assert len(set(digests)) == len(digests)


def test_names_do_not_depend_on_how_the_chain_grew() -> None:
    token_ids = list(range(100, 120))
    grown: list[BlockName] = []
    for num_blocks in (0, 1, 1, 3, 2, 5):
        extend_names(grown, "s", token_ids, 4, num_blocks)
    assert grown == chain(token_ids, "s")
    assert [name.parent for name in grown] == [None, *(name.digest for name in grown[:-1])]
    assert list(array("I", b"".join(name.token_ids for name in grown))) == token_ids


def test_nothing_is_noted_while_nobody_watches() -> None:
    pool = BlockPool(2, 4, True)
    names = chain(list(range(8)))
    pool.register(pool.allocate(2), names)
    assert pool.take_events() == []
    assert pool.watch() == names
    assert pool.take_events() == []
    pool.unwatch()
    pool.free([1, 2])
    pool.allocate(2)
    assert pool.take_events() == []
    assert pool.watch() == []


def test_a_watcher_hears_of_each_name_once() -> None:
    pool = BlockPool(3, 4, True)
    names = chain(list(range(12)))
    assert pool.watch() == []
    table = pool.allocate(3)
    pool.register(table[:2], names[:2])
    pool.register(table[2:], names[2:])
    assert pool.take_events() == [BlockStored(name) for name in names]
    pool.register(table, names)  # they are named already
    pool.free(table)
    assert pool.take_events() == []
    pool.allocate(2)
    assert pool.take_events() == [BlockRemoved(names[2].digest), BlockRemoved(names[1].digest)]
    assert pool.watch() == names[:1]


def test_prefixes_come_before_their_continuations_even_when_named_later() -> None:
    pool = BlockPool(4, 4, True)
    names = chain(list(range(8)))
    head, tail, other = pool.allocate(3)
    pool.register([head, tail], names)
    pool.free([head])  # the tail lives on, held with an equal head that has no name
    pool.allocate(2)  # takes the nameless one and the head
    assert pool.watch() == names[1:]
    pool.register([other], names[:1])
    assert pool.watch() == names


@pytest.mark.parametrize("seed", range(20))
def test_random_use_agrees_with_a_naive_model(seed: int) -> None:
    """The model remembers the tokens in each block; a match must show exactly these."""
    rng = random.Random(seed)
    block_size, num_blocks = 2, rng.randint(2, 9)
    pool = BlockPool(num_blocks, block_size, True)
    content: dict[int, tuple[int, ...]] = {}  # block id -> the whole prefix that it ends
    tables: list[list[int]] = []
    assert pool.watch() == []
    heard: dict[bytes, BlockName] = {}
    for _ in range(400):
        if tables and rng.random() < 0.45:
            pool.free(tables.pop(rng.randrange(len(tables))))
        else:
            prompt = [rng.randrange(2) for _ in range(block_size * rng.randint(1, 4))]
            prefixes = [
                tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)
            ]
            names = chain(prompt, block_size=block_size)
            cached = pool.match(names)
            assert [content[block_id] for block_id in cached] == prefixes[: len(cached)]
            num_new = len(prefixes) - len(cached)
            if pool.can_allocate(num_new, cached):
                table = pool.allocate(num_new, cached)
                content.update(zip(table, prefixes, strict=True))
                pool.register(table[len(cached) :], names[len(cached) :])
                assert len(pool.match(names)) == len(table)
                tables.append(table)
        pool.check_invariants(tables)
        for event in pool.take_events():
            match event:
                case BlockStored(name):
                    assert name.digest not in heard
                    heard[name.digest] = name
                case BlockRemoved(digest):
                    del heard[digest]
        cached = pool.watch()
        assert {name.digest: name for name in cached} == heard
        seen = set()
        for name in cached:
            assert name.parent is None or name.parent in seen or name.parent not in heard
            seen.add(name.digest)
    for table in tables:
        pool.free(table)
    pool.check_invariants([])
    assert pool.num_free == num_blocks
