"""decode_state against its oracle: interpreted on a CPU, natively under -m gpu."""

from __future__ import annotations

import pytest
import torch

from millstream.kernels import reference_state
from millstream.kernels.decode_state import advance_slots, read_slots


def check(device: str, batch: int, padding: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_slots, width, block_size = 400, 9, 16
    padding_slot = num_slots - 1
    real = torch.randperm(padding_slot, generator=generator)[:batch]
    slots = torch.cat((real, torch.full((padding,), padding_slot)))
    computed = torch.randint(0, width * block_size, (num_slots,), generator=generator)
    last_tokens = torch.randint(0, 1 << 40, (num_slots,), generator=generator)
    tables = torch.randint(0, 1 << 30, (num_slots, width), generator=generator).int()
    computed[-1] = last_tokens[-1] = 0
    sampled = torch.randint(0, 1 << 40, (len(slots),), generator=generator)

    on_device = [t.to(device, copy=True) for t in (slots, computed, last_tokens, tables, sampled)]
    inputs = read_slots(*on_device[:4], block_size)
    expected = reference_state.read_slots(slots, computed, last_tokens, tables, block_size)
    got = (inputs.token_ids, inputs.positions, inputs.kv_indices, inputs.context_lens)
    for actual, oracle in zip(got, expected, strict=True):
        assert actual.dtype == oracle.dtype and torch.equal(actual.cpu(), oracle)
    advance_slots(on_device[0], on_device[4], on_device[1], on_device[2])
    state = reference_state.advance_slots(slots, sampled, computed, last_tokens)
    assert torch.equal(on_device[1].cpu(), state[0])
    assert torch.equal(on_device[2].cpu(), state[1])


SHAPES = [(1, 0), (3, 1), (128, 0), (130, 6), (0, 4)]


@pytest.mark.parametrize(("batch", "padding"), SHAPES)
def test_equals_the_oracle(batch: int, padding: int) -> None:
    check("cpu", batch, padding, batch)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "padding"), SHAPES)
def test_equals_the_oracle_on_cuda(batch: int, padding: int) -> None:
    check("cuda", batch, padding, batch)


def test_wrong_tensors_are_refused() -> None:
    slots, table = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    blocks = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="int64"):
        read_slots(slots.int(), table, table, blocks, 16)
    with pytest.raises(ValueError, match="block_tables"):
        read_slots(slots, table, table, blocks.long(), 16)
    with pytest.raises(ValueError, match="token_ids"):
        advance_slots(slots, slots[:1], table, table)
