"""The parts of a runner's start: which model, its weights, a first step, how large its KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millstream.engine.attention import bytes_per_block
from millstream.engine.backends.torch_ops import TorchOps
from millstream.engine.config import LOAD_FORMATS, EngineConfig
from millstream.engine.hardware import (
    LoadError,
    ResolvedConfig,
    cpu_kv_bytes,
    gpu_kv_bytes,
    num_kv_blocks,
)
from millstream.engine.model_files.model_config import ModelConfig, load_model_config
from millstream.engine.model_files.shapes import SHAPE_NAMES, named_shape
from millstream.engine.models import DecoderModel, build_model
from millstream.engine.ops import Ops
from millstream.engine.parallel import Group, share_of
from millstream.engine.plan import Chunk, Plan, SlotStart
from millstream.engine.request import Sampling
from millstream.engine.stepping.results import GpuResults, copy_by_torch
from millstream.engine.weights import init_dummy_weights, load_weights
from millstream.kernels.prefill_configs import MANY_TOKENS, SHORT_CONTEXT
from millstream.rpc.integer_ranges import MAX_LOGPROBS

if TYPE_CHECKING:
    from millstream.engine.grammars.compiled import CompiledGrammars

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (bytes of weights read, bytes in all)


def model_config(config: EngineConfig, model_dir: Path | None) -> ModelConfig:
    if config.load_format not in LOAD_FORMATS:
        raise LoadError(
            f"load_format: one of {', '.join(LOAD_FORMATS)}, not {config.load_format!r}"
        )
    if model_dir is not None:
        return load_model_config(model_dir)
    shape = named_shape(config.model or "") if config.load_format == "dummy" else None
    if shape is None:
        raise LoadError(
            f"model: a folder, or with load_format dummy one of {', '.join(SHAPE_NAMES)}, "
            f"not {config.model!r}"
        )
    return shape


def make_grammars(
    model_config: ModelConfig, model_dir: Path | None, group: Group | None
) -> CompiledGrammars | None:
    """What structured output follows; None without tokenizer.json or EOS ids, and on other ranks
    than the first, which samples. Loads the vocabulary beside the weights."""
    if group is not None and group.rank != 0:
        return None
    file = model_dir / "tokenizer.json" if model_dir is not None else None
    if file is None or not file.is_file() or not model_config.eos_token_ids:
        return None
    from millstream.engine.grammars.compiled import CompiledGrammars  # loads the library

    return CompiledGrammars(
        file, vocab_size=model_config.vocab_size, eos_token_ids=model_config.eos_token_ids
    )


def make_ops(resolved: ResolvedConfig, model_config: ModelConfig) -> Ops:
    """What resolve chose."""
    if resolved.attention_backend == "torch":
        return TorchOps(model_config)
    # These need Triton, which not every platform has.
    from millstream.engine.backends.step_attention import load_flash
    from millstream.engine.backends.triton_ops import TritonOps

    return TritonOps(
        model_config,
        batch_sizes=resolved.batch_sizes,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
        dtype=resolved.dtype,
        device=resolved.device,
        invariant=resolved.batch_invariant,
        flash=load_flash() if resolved.attention_backend == "flash-attn" else None,
    )


def gpu_results(resolved: ResolvedConfig, ops: Ops) -> GpuResults:
    copy_out = copy_by_torch if ops.on_slots is None else ops.on_slots.copy_out
    return GpuResults(
        max_num_seqs=resolved.max_num_seqs,
        max_in_flight=resolved.max_in_flight,
        copy_out=copy_out,
    )


def rank_config(model_config: ModelConfig, group: Group | None) -> ModelConfig:
    """The config of this rank's part of the model. Raises LoadError if it has no such part."""
    return model_config if group is None else share_of(model_config, group.rank, group.size).config


def set_threads(config: EngineConfig, resolved: ResolvedConfig, group: Group | None) -> None:
    """CPU threads for the arithmetic; ranks share the cores."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif group is not None and not resolved.on_gpu:
        torch.set_num_threads(max(torch.get_num_threads() // group.size, 1))


def time_limit(seconds: float, group: Group | None) -> Callable[[], bool]:
    """Whether so many seconds have not passed yet, for no rank."""
    deadline = time.monotonic() + seconds

    def is_left() -> bool:
        left = time.monotonic() < deadline
        return left if group is None else bool(group.smallest(left))

    return is_left


def load_model(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    ops: Ops,
    model_dir: Path | None,
    on_progress: OnProgress | None,
    group: Group | None,
) -> DecoderModel:
    """This rank's part of the model of `model_config`."""
    try:
        model = build_model(
            model_config,
            dtype=resolved.dtype,
            device=resolved.device,
            max_model_len=resolved.max_model_len,
            ops=ops,
            group=group,
        )
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed)
        else:
            assert model_dir is not None
            load_weights(model, model_dir, on_progress=on_progress)
    except torch.OutOfMemoryError as error:
        raise LoadError(f"model: its weights do not fit in the memory of {resolved.device}") from (
            error
        )
    return model


def warm_up_plan(resolved: ResolvedConfig, num_tokens: int, *, short: bool = False) -> Plan:
    """A step of `num_tokens` tokens of as many sequences as there can be, all in scratch block 0:
    chunks as long as can be, then decodes; sampling with every filter and edit. short: no more
    tokens and sequences than let short prompts take tiles of their own, none of them scored."""
    num_seqs = min(resolved.max_num_seqs, num_tokens)
    longest = resolved.max_model_len - 1
    if short:
        longest = min(longest, SHORT_CONTEXT)
        num_tokens = min(num_tokens, MANY_TOKENS)
        num_seqs = min(num_seqs, -(-num_tokens // longest))  # decodes would be no prompts' tokens
    spare = num_tokens - num_seqs  # tokens beyond one for each sequence
    chunks: list[Chunk] = []
    while spare and len(chunks) < num_seqs and longest > 1:
        length = min(longest, spare + 1)
        chunks.append(
            Chunk(
                slot=len(chunks),
                start=0,
                token_ids=(0,) * length,
                samples=True,
                target_ids=() if short else (0,) * (length - 1),
            )
        )
        spare -= length - 1
    sampling = Sampling(
        max_tokens=1,
        top_k=1,
        top_p=0.5,
        min_p=0.1,
        frequency_penalty=1.0,
        logit_bias=((0, 1.0),),
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=None if short else MAX_LOGPROBS,
    )
    starts = [
        SlotStart(
            slot=slot,
            sampling=sampling,
            min_position=resolved.max_model_len,
            banned_token_ids=(0,),
            num_computed_tokens=0,
            block_ids=(0,) * -(-longest // resolved.block_size) if slot < len(chunks) else (0,),
        )
        for slot in range(num_seqs)
    ]
    return Plan(
        step=0,
        starts=tuple(starts),
        chunks=tuple(chunks),
        decode_slots=tuple(range(len(chunks), num_seqs)),
    )


def cache_blocks(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: ModelConfig,
    reserved_bytes: int,
    group: Group | None,
) -> int:
    """How many blocks each rank has room for."""
    if config.kv_cache_bytes is not None:
        kv_bytes = config.kv_cache_bytes
    elif resolved.on_gpu:
        kv_bytes = gpu_kv_bytes(
            resolved.device,
            utilization=config.gpu_memory_utilization,
            group_bytes=0 if group is None else group.device_bytes,
            reserved_bytes=reserved_bytes,
        )
    else:
        kv_bytes = cpu_kv_bytes() // (1 if group is None else group.size)
    if group is not None:
        kv_bytes = group.smallest(kv_bytes)
    block_bytes = bytes_per_block(model, resolved.block_size, resolved.dtype)
    return num_kv_blocks(resolved, kv_bytes=kv_bytes, block_bytes=block_bytes)


def served_len(config: EngineConfig, resolved: ResolvedConfig, num_blocks: int) -> int:
    """max_model_len as clients see it: one that nobody asked for shrinks to what the pool holds."""
    pool_tokens = num_blocks * resolved.block_size
    if resolved.max_model_len <= pool_tokens:
        return resolved.max_model_len
    if config.max_model_len is not None:
        logger.warning(
            "the KV cache holds %d tokens, fewer than max_model_len (%d): longer requests are "
            "refused",
            pool_tokens,
            resolved.max_model_len,
        )
        return resolved.max_model_len
    logger.warning(
        "max_model_len is %d instead of the model's %d: that is what the KV cache holds",
        pool_tokens,
        resolved.max_model_len,
    )
    return pool_tokens
