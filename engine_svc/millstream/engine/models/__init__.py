"""Models, from a ModelConfig to a module whose only input is a ForwardBatch."""

from __future__ import annotations

import torch

from millstream.engine.model_config import ModelConfig
from millstream.engine.models.decoder import DecoderModel, Hidden
from millstream.engine.ops import Ops
from millstream.engine.parallel import Group, share_of
from millstream.engine.rope import RotaryEmbedding

__all__ = ["DecoderModel", "Hidden", "build_model"]

# ModelConfig.family -> class; a new family is an entry here and in model_config.FAMILIES.
_MODELS = {"llama": DecoderModel, "qwen3": DecoderModel}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    ops: Ops,
    group: Group | None = None,
) -> DecoderModel:
    """A model whose parameters have memory on `device` but no contents: weights.py fills them.

    group: whose rank's part of the model it is. `ops` are for the config of that part.

    It is laid out on the meta device first, so nothing is initialised only to be overwritten.
    """
    share = share_of(config) if group is None else share_of(config, group.rank, group.size)
    with torch.device("meta"):
        model = _MODELS[config.family](share, ops, group).to(dtype)
    model.to_empty(device=device)
    if config.tie_word_embeddings:  # to_empty made two parameters of the one
        model.lm_head.weight = model.model.embed_tokens.weight
    model.rope = RotaryEmbedding(
        config.rope, config.head_dim, max_model_len=max_model_len, dtype=dtype, device=device
    )
    return model.eval()
