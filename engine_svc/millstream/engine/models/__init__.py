"""Models, from a ModelConfig to a module whose only input is a ForwardBatch."""

from __future__ import annotations

import torch
from torch import nn

from millstream.engine.model_files.model_config import ModelConfig
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
    _give_memory(model, device)
    if config.tie_word_embeddings:  # that made two parameters of the one
        model.lm_head.weight = model.model.embed_tokens.weight
    model.rope = RotaryEmbedding(
        config.rope, config.head_dim, max_model_len=max_model_len, dtype=dtype, device=device
    )
    return model.eval()


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """As Module.to_empty, which imports SymPy for tensors on meta: 3 s of a start."""
    for module in model.modules():
        for name, laid_out in list(module.named_parameters(recurse=False)):
            tensor = torch.empty(laid_out.shape, dtype=laid_out.dtype, device=device)
            setattr(module, name, nn.Parameter(tensor, requires_grad=laid_out.requires_grad))
