"""The layers that models are made of, and how each takes its tensors from a checkpoint.

Projections that read the same input are fused into one matrix. Which checkpoint tensors make up a
fused parameter is data beside the layer: `checkpoint_parts` maps their names to ParameterParts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ParameterPart:
    """The place of one checkpoint tensor inside a parameter: rows [start, start + shape[0])."""

    def __init__(self, parameter: nn.Parameter, start: int = 0, rows: int | None = None) -> None:
        self._parameter = parameter
        self._start = start
        self.shape = (rows if rows is not None else parameter.shape[0], *parameter.shape[1:])

    def take(self, tensor: Tensor) -> None:
        """Copies a checkpoint tensor of `shape` in, converting its dtype."""
        self._parameter.data.narrow(0, self._start, self.shape[0]).copy_(tensor)


class Layer(nn.Module):
    """A module that owns parameters and knows their names in checkpoints."""

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        """(checkpoint name, part) for every tensor of this layer; `prefix` is its module path."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{prefix}.{name}", ParameterPart(parameter)


class Linear(Layer):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of the same input, one below the other in one matrix."""

    def __init__(self, in_features: int, outputs: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(outputs.values()), bias=bias)
        self.outputs = dict(outputs)  # checkpoint name -> rows, in order

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        parent = prefix.rpartition(".")[0]  # the checkpoint knows nothing of the fused layer
        start = 0
        for output, rows in self.outputs.items():
            for name, parameter in self.named_parameters(recurse=False):
                yield f"{parent}.{output}.{name}", ParameterPart(parameter, start, rows)
            start += rows


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, rounding where transformers rounds."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)  # rounded before the weight multiplies


class Embedding(Layer):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = _parameter(rows, size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(Layer):
    """Hidden states to float32 logits; shares the embedding's weight when the two are tied."""

    def __init__(self, rows: int, size: int, *, tied_to: Embedding | None = None) -> None:
        super().__init__()
        self.weight = tied_to.weight if tied_to is not None else _parameter(rows, size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
