"""Tiny random checkpoints, written by transformers, for tests of everything that loads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def make_tiny_model(
    directory: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Saves a checkpoint in `directory` and returns it.

    Biases and norms are random too, so that one that is dropped or misplaced changes outputs, and
    the weights are large enough for greedy outputs to vary. A small max_shard_size (bytes) gives
    several files with an index. config_overrides are keywords of transformers' config class.
    """
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    model = model_class(config_class(**{**_SHAPE, **config_overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
