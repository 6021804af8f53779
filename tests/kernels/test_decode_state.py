"""decode_state against its oracle: interpreted on a CPU, natively under -m gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millstream.kernels import reference_state
from millstream.kernels.decode_state import SlotTables, advance_slots, read_slots

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 500


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "padding"), [(1, 0), (3, 1), (128, 0), (130, 6), (0, 4)])
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(None, None), (64, torch.bfloat16), (100, torch.float32)]
)
def test_equals_the_oracle(
    device: str, batch: int, padding: int, hidden: int | None, dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(batch)
    num_slots, width, block_size = 400, 9, 16
    padding_slot = num_slots - 1
    real = torch.randperm(padding_slot, generator=generator)[:batch]
    slots = torch.cat((real, torch.full((padding,), padding_slot)))
    computed = torch.randint(0, width * block_size, (num_slots,), generator=generator)
    last_tokens = torch.randint(0, VOCAB if hidden else 1 << 40, (num_slots,), generator=generator)
    block_tables = torch.randint(0, 1 << 30, (num_slots, width), generator=generator).int()
    computed[-1] = last_tokens[-1] = 0
    sampled = torch.randint(0, 1 << 40, (len(slots),), generator=generator)
    embedding = torch.randn(VOCAB, hidden, generator=generator).to(dtype) if hidden else None

    tables = SlotTables(
        computed=computed.to(device, copy=True), last_tokens=last_tokens.to(device, copy=True)
    )
    on_device = slots.to(device)
    inputs = read_slots(
        on_device,
        tables,
        block_tables.to(device),
        block_size,
        None if embedding is None else embedding.to(device),
    )
    expected = reference_state.read_slots(slots, computed, last_tokens, block_tables, block_size)
    got = (inputs.token_ids, inputs.positions, inputs.kv_indices, inputs.context_lens)
    for actual, oracle in zip(got, expected, strict=True):
        assert actual.dtype == oracle.dtype and torch.equal(actual.cpu(), oracle)
    if embedding is None:
        assert inputs.embedded is None
    else:
        assert inputs.embedded is not None and inputs.embedded.dtype == dtype
        assert torch.equal(inputs.embedded.cpu(), reference_state.embed(expected[0], embedding))
    advance_slots(on_device, sampled.to(device), tables)
    state = reference_state.advance_slots(slots, sampled, computed, last_tokens)
    assert torch.equal(tables.computed.cpu(), state[0])
    assert torch.equal(tables.last_tokens.cpu(), state[1])


def test_wrong_tensors_are_refused() -> None:
    slots, table = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    tables = SlotTables(computed=table, last_tokens=table)
    blocks = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="int64"):
        read_slots(slots.int(), tables, blocks, 16)
    with pytest.raises(ValueError, match="one entry a slot"):
        read_slots(slots, replace(tables, computed=table[:3]), blocks, 16)
    with pytest.raises(ValueError, match="block_tables"):
        read_slots(slots, tables, blocks.long(), 16)
    for embedding in (torch.zeros(8), torch.zeros(8, 6)[:, ::2]):
        with pytest.raises(ValueError, match="embedding"):
            read_slots(slots, tables, blocks, 16, embedding)
    with pytest.raises(ValueError, match="token_ids"):
        advance_slots(slots, slots[:1], tables)
