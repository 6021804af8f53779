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

from millstream.engine.parallel import Group, Span

_HAS_ONEDNN = torch._C._has_mkldnn
# oneDNN takes longer for fewer rows than for so many.
_FEWEST_PACKED_ROWS = 4


class ParameterPart:
    """The place of one checkpoint tensor, or of a rank's part of it, inside a parameter: some of
    its rows."""

    def __init__(
        self,
        parameter: Tensor,
        start: int = 0,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> None:
        """start: the parameter's first row of it. rows, columns: the part of the tensor that is
        taken; None: as many as the parameter has."""
        rows = rows or Span.whole(parameter.shape[0])
        self.parameter = parameter
        self._start = start
        self._num_rows = rows.length
        self.shape = (rows.size, *parameter.shape[1:])  # of the checkpoint's tensor
        self.taken: tuple[slice, ...] | None = None  # what of it is taken; None: all
        if columns is not None and not columns.is_whole:
            self.shape = (rows.size, columns.size)
            self.taken = (slice(None), slice(columns.start, columns.stop))
        elif not rows.is_whole:
            self.taken = (slice(rows.start, rows.stop),)

    def take(self, tensor: Tensor) -> None:
        """Copies in what is taken of a checkpoint tensor, converting its dtype."""
        self.parameter.detach().narrow(0, self._start, self._num_rows).copy_(tensor)


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
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """What this process's weight makes of x."""
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

    def __init__(
        self, in_features: int, outputs: Mapping[str, Span], *, bias: bool = False
    ) -> None:
        """outputs: checkpoint name -> the rows that are held, in order."""
        super().__init__(in_features, sum(rows.length for rows in outputs.values()), bias=bias)
        self.outputs = dict(outputs)

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        parent = prefix.rpartition(".")[0]  # the checkpoint knows nothing of the fused layer
        start = 0
        for output, rows in self.outputs.items():
            for name, parameter in self.named_parameters(recurse=False):
                yield f"{parent}.{output}.{name}", ParameterPart(parameter, start, rows)
            start += rows.length


class RowParallelLinear(Linear):
    """A projection whose columns, hence whose inputs, are spread over ranks; the bias is rank 0's.

    Its forward adds up the ranks' products.
    """

    def __init__(
        self, in_features: Span, out_features: int, *, bias: bool = False, group: Group
    ) -> None:
        super().__init__(in_features.length, out_features, bias=bias and group.rank == 0)
        self._in_features = in_features
        self._elsewhere = bias and group.rank > 0
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.product(x))

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        weight = self.weight
        yield f"{prefix}.weight", ParameterPart(weight, columns=self._in_features)
        if self.bias is not None:
            yield f"{prefix}.bias", ParameterPart(self.bias)
        elif self._elsewhere:
            nothing = weight.new_empty(0)
            yield f"{prefix}.bias", ParameterPart(nothing, rows=Span(0, 0, weight.shape[0]))


def row_linear(in_features: Span, out_features: int, *, bias: bool, group: Group | None) -> Linear:
    """A projection of what column-parallel layers give."""
    if group is None:
        return Linear(in_features.length, out_features, bias=bias)
    return RowParallelLinear(in_features, out_features, bias=bias, group=group)


class RMSNorm(Layer):
    """The weight of a root-mean-square norm; ops compute it, often with the addition before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps
        self.folded = False  # the weight is ones, what it was is in the projection behind it

    def fold_into(self, layer: Linear) -> None:
        """Multiplies the columns of the projection behind the norm by the weight, once, which is
        ones from then on: what is left of the norm is one factor for each row."""
        layer.weight.detach().mul_(self.weight)
        self.weight.detach().fill_(1)
        self.folded = True


class Embedding(Layer):
    def __init__(self, rows: Span, size: int) -> None:
        super().__init__()
        self.weight = _parameter(rows.length, size)
        self.rows = rows

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        yield f"{prefix}.weight", ParameterPart(self.weight, rows=self.rows)


class ParallelEmbedding(Embedding):
    """An embedding whose rows are spread over ranks."""

    def __init__(self, rows: Span, size: int, group: Group) -> None:
        super().__init__(rows, size)
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.length)
        embedded = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        embedded.masked_fill_(elsewhere[:, None], 0)
        # The residual stream: it outlives the next sum.
        return embedded.copy_(self._group.all_reduce(embedded))


def embedding(rows: Span, size: int, group: Group | None) -> Embedding:
    return Embedding(rows, size) if group is None else ParallelEmbedding(rows, size, group)


class LMHead(Linear):
    """Hidden states to logits, of a rank's part of the vocabulary; shares the embedding's weight
    when the two are tied."""

    def __init__(self, rows: Span, size: int, *, tied_to: Embedding | None = None) -> None:
        weight = tied_to.weight if tied_to is not None else None
        super().__init__(size, rows.length, weight=weight)
        self.rows = rows

    def checkpoint_parts(self, prefix: str) -> Iterator[tuple[str, ParameterPart]]:
        yield f"{prefix}.weight", ParameterPart(self.weight, rows=self.rows)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
