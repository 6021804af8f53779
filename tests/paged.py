"""Drives a model over paged sequences, step by step, as a runner does: for tests of the model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from millstream.engine.attention import KVCache, allocate_kv_cache
from millstream.engine.backends.torch_ops import TorchOps
from millstream.engine.batch import ForwardBatch
from millstream.engine.model_files.model_config import ModelConfig, load_model_config
from millstream.engine.models import DecoderModel, build_model
from millstream.engine.weights import load_weights

CPU = torch.device("cpu")


def load_model(
    model_dir: Path,
    *,
    max_model_len: int = 512,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> DecoderModel:
    config = load_model_config(model_dir)
    model = build_model(
        config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        ops=TorchOps(config),
    )
    load_weights(model, model_dir)
    return model


@dataclass
class PagedSequence:
    prompt_len: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedBatches:
    """Makes ForwardBatches; blocks come in shuffled order out of a cache full of NaN."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.kv_cache: KVCache = allocate_kv_cache(
            config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device
        )
        self.kv_cache.data.fill_(float("nan"))
        self.free_blocks = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(self.free_blocks)

    def batch(
        self,
        chunks: Sequence[tuple[PagedSequence, Sequence[int]]],
        decodes: Sequence[tuple[PagedSequence, int]] = (),
    ) -> ForwardBatch:
        """The next tokens of sequences; the logits of all of them are wanted."""
        work = [*chunks, *((sequence, [token_id]) for sequence, token_id in decodes)]
        size = self.kv_cache.block_size
        token_ids, positions, kv_indices, rope_lens = [], [], [], []
        for sequence, ids in work:
            start, end = sequence.num_computed, sequence.num_computed + len(ids)
            while len(sequence.blocks) * size < end:
                sequence.blocks.append(self.free_blocks.pop())
            token_ids += ids
            positions += range(start, end)
            kv_indices += [sequence.blocks[p // size] * size + p % size for p in range(start, end)]
            rope_lens += [max(sequence.prompt_len, p + 1) for p in range(start, end)]
            sequence.num_computed = end
        widest = max(len(sequence.blocks) for sequence, _ in work)
        query_lens = tuple(len(ids) for _, ids in work)
        contexts = tuple(sequence.num_computed for sequence, _ in work)
        tables = [s.blocks + [-1] * (widest - len(s.blocks)) for s, _ in work]  # -1: never read

        def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            kv_indices=tensor(kv_indices),
            query_starts=tensor([0, *itertools.accumulate(query_lens)], torch.int32),
            context_lens=tensor(contexts, torch.int32),
            block_tables=tensor(tables, torch.int32),
            slots=tensor(range(len(work))),
            sample_rows=tensor(range(len(token_ids))),
            num_decodes=len(decodes),
            query_lens=query_lens,
            contexts=contexts,
            rope_lens=tensor(rope_lens),
        )


@torch.inference_mode()
def paged_logits(
    model: DecoderModel,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    chunk_tokens: int,
    num_blocks: int = 64,
    block_size: int = 4,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Logits [tokens, vocab] of each (prompt, continuation), all sequences run in one batch.

    Prompts are computed in chunks of at most chunk_tokens; a sequence whose prompt is done decodes
    its continuation token by token beside the others' chunks.
    """
    weight = model.model.embed_tokens.weight
    batches = PagedBatches(
        model.config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=weight.dtype,
        device=weight.device,
        seed=seed,
    )
    states = [PagedSequence(prompt_len=len(prompt)) for prompt, _ in sequences]
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    while True:
        chunks, decodes, order = [], [], []
        for index, ((prompt, continuation), state) in enumerate(
            zip(sequences, states, strict=True)
        ):
            done = state.num_computed
            if done < len(prompt):
                chunks.append((state, prompt[done : done + chunk_tokens]))
                order.insert(len(chunks) - 1, index)
            elif done < len(prompt) + len(continuation):
                decodes.append((state, continuation[done - len(prompt)]))
                order.append(index)
        if not order:
            return [torch.cat(rows).cpu() for rows in outputs]
        batch = batches.batch(chunks, decodes)
        for index, rows in zip(
            order, model(batch, batches.kv_cache).split(batch.query_lens), strict=True
        ):
            outputs[index].append(rows)
