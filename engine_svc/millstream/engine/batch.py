"""ForwardBatch: the only input of a model for one step; no global steers a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The tokens of S sequences, flattened: chunks first, then decodes of one token.

        sequence 0          sequence 1      ...    T = query_starts[S] tokens in all
        [q_start0 ..)[q_start1 ..)

    A sequence's context is its computed tokens and this step's: its queries are the last ones of
    it. Device tensors are what kernels read; the tuples are the same numbers for torch code on the
    host.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, index in prompt + output
    # [T] int64: where each token's K and V go: block id * block_size + offset. Block 0 is scratch.
    kv_indices: torch.Tensor
    query_starts: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [rows, width] int32; entries past a context are never read
    slots: torch.Tensor  # [S] int64: the sequences' rows of block_tables
    sample_rows: torch.Tensor  # [R] int64: the tokens whose logits are wanted
    num_decodes: int  # the last so many sequences have one token each
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]  # empty in a CUDA graph, where only the device knows them
    # [T] int64, read only by models with dynamic RoPE: the length that a token is rotated for,
    # max(prompt length, position + 1). None: position + 1, right for prompts within the original
    # limit of the model.
    rope_lens: torch.Tensor | None = None
    # [T, hidden]: the tokens' embeddings, for the model to add to. None: it looks them up.
    embedded: torch.Tensor | None = None
