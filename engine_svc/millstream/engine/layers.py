"""The layers that models are made of, and how each takes its tensors from a checkpoint.

Projections that read the same input are fused into one matrix. Which checkpoint tensors make up a
fused parameter is data beside the layer: `checkpoint_parts` maps their names to ParameterParts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HAS_ONEDNN = torch._C._has_mkldnn
# oneDNN takes longer for fewer rows than for so many.
_FEWEST_PACKED_ROWS = 4


class ParameterPart:
    """The place of one checkpoint tensor inside a parameter: rows [start, start + shape[0])."""

    def __init__(self, parameter: Tensor, start: int = 0, rows: int | None = None) -> None:
        self._parameter = parameter
        self._start = start
        self.shape = (rows if rows is not None else parameter.shape[0], *parameter.shape[1:])

    def take(self, tensor: Tensor) -> None:
        """Copies a checkpoint tensor of `shape` in, converting its dtype."""
        self._parameter.detach().narrow(0, self._start, self.shape[0]).copy_(tensor)


class Layer(nn.Module):
    """A module that owns parameters and knows their names in checkpoints."""

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        """(checkpoint name, part) for every tensor of this layer; `prefix` is its module path."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{prefix}.{name}", ParameterPart(parameter)


class Linear(Layer):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features) if weight is None else weight
        self.bias = _parameter(out_features) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows < _FEWEST_PACKED_ROWS:
            x = F.pad(x, (0, 0, 0, _FEWEST_PACKED_ROWS - rows))
        output = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return cast(Tensor, output)[:rows]

    def pack(self) -> None:
        """Replaces the weight by oneDNN's blocked layout, where that exists: float32 on a CPU.

        For 1 to 8 rows this reads the weights two to three times as fast as F.linear does.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and _HAS_ONEDNN:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, None)
            del self.weight


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
    """The weight of a root-mean-square norm; ops compute it, often with the addition before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps


class Embedding(Layer):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = _parameter(rows, size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(Linear):
    """Hidden states to logits; shares the embedding's weight when the two are tied."""

    def __init__(self, rows: int, size: int, *, tied_to: Embedding | None = None) -> None:
        super().__init__(size, rows, weight=tied_to.weight if tied_to is not None else None)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
