"""Torch oracles of decode_state.py."""

from __future__ import annotations

import torch


def read_slots(
    slots: torch.Tensor,
    computed: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids, positions, KV indices, context lengths) of slots that decode."""
    positions = computed[slots]
    blocks = block_tables[slots, positions // block_size].long()
    indices = blocks * block_size + positions % block_size
    return last_tokens[slots], positions, indices, (positions + 1).int()


def embed(token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """[n, hidden]: the rows of an embedding [vocab_size, hidden]."""
    return embedding[token_ids]


def advance_slots(
    slots: torch.Tensor, token_ids: torch.Tensor, computed: torch.Tensor, last_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(computed, last_tokens) after the step; the last slot pads batches and stays as it is."""
    real = slots != len(computed) - 1
    computed, last_tokens = computed.clone(), last_tokens.clone()
    computed[slots[real]] += 1
    last_tokens[slots[real]] = token_ids[real]
    return computed, last_tokens
