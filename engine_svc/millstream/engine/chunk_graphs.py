"""Steps with chunks of prompts as CUDA graphs, where launching them takes longer than running them.

Such a step has as many shapes as there are mixtures of chunks and decodes. A graph is recorded for
a *bucket*: so many chunk tokens, chunks and decodes at most. A step takes the smallest that holds
it, filled up with tokens and decodes of the padding slot:

    tokens   [chunk 0 | chunk 1 | padding   ][decode 0 | decode 1 | padding]
              0 .................. bucket.tokens ............. + bucket.decodes

A bucket is recorded when it is first needed, or when the engine is idle: those without decodes, so
that even a first prompt finds its graph, then those with few.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from millstream.engine.graphs import Graph, Kind, Record, kind_of
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.plan import Plan
from millstream.engine.stepping.batch_layout import (
    BatchLayout,
    Bucket,
    HostLayout,
    layout_of,
    padded_arrays,
)

MAX_CHUNKS = 32  # a step of as many or more runs without a graph
_FEWEST_TOKENS = 64
_BUCKETS_AN_OCTAVE = 4
MOST_GRAPHS = 96
_MOST_AHEAD = 64  # recorded before they are needed
# Products that take about as long as their launch, at 600 TFLOP/s: 17 ms.
_LAUNCH_FLOP = 1e13


def most_tokens(config: ModelConfig) -> int:
    """Chunk tokens of a step that a graph is worth for: with more, the GPU is behind anyway, and
    what fills up a bucket would cost."""
    layer = sum(size * depth for size, depth in config.layer_products.values())
    weights = config.num_layers * layer
    return max(int(_LAUNCH_FLOP / (2 * weights)), _FEWEST_TOKENS)


def token_sizes(largest: int) -> list[int]:
    """Numbers of chunk tokens that are worth a graph, ascending, `largest` the last."""
    sizes = []
    octave = _FEWEST_TOKENS
    while octave < largest:
        sizes += [
            octave + octave * part // _BUCKETS_AN_OCTAVE for part in range(_BUCKETS_AN_OCTAVE)
        ]
        octave *= 2
    return [*(size for size in sizes if size < largest), largest]


def decode_sizes(largest: int) -> list[int]:
    """Numbers of decodes beside chunks that are worth a graph, ascending."""
    return [*(size for size in (0, 16, 64, 256) if size < largest), largest]


class ChunkGraphs:
    """The graphs of one engine; used by one thread."""

    def __init__(
        self,
        compute: Callable[[BatchLayout], torch.Tensor],
        record: Record,
        *,
        max_tokens: int,
        max_decodes: int,
        max_chunks: int = MAX_CHUNKS,
        padding_slot: int,
        device: torch.device,
    ) -> None:
        """compute: a step from a layout; returns a token id for each of its sequences, and leaves
        the padding slot as it was."""
        self._compute = compute
        self._record = record
        self._token_sizes = token_sizes(max_tokens)
        self._decode_sizes = decode_sizes(max_decodes)
        self._max_chunks = max_chunks
        self._padding_slot = padding_slot
        self._device = device
        self._graphs: dict[_Key, tuple[BatchLayout, Graph]] = {}

    def choose(self, host: HostLayout) -> Bucket | None:
        """The bucket for a step with chunks; None: it is to run without a graph. The same on every
        rank: what is special is among the whole rows of a plan that ranks have."""
        num_chunks = len(host.plan.chunks)
        num_tokens, num_decodes = int(host.query_starts[num_chunks]), len(host.slots) - num_chunks
        if (
            host.plan.whole_rows
            or host.special
            or num_chunks >= self._max_chunks
            or num_tokens > self._token_sizes[-1]
        ):
            return None
        bucket = self._bucket(
            _smallest(self._token_sizes, num_tokens), _smallest(self._decode_sizes, num_decodes)
        )
        if (bucket, kind_of(host)) in self._graphs or len(self._graphs) < MOST_GRAPHS:
            return bucket
        return None

    def record_largest(self) -> None:
        """That of the bucket that takes most memory."""
        largest = self._bucket(self._token_sizes[-1], self._decode_sizes[-1])
        self._graph((largest, Kind.PLAIN))

    def record_next(self) -> bool:
        """Records the next bucket, those with the fewest decodes first; False if none is left that
        is worth it before it is needed."""
        buckets = (
            self._bucket(tokens, decodes)
            for decodes in self._decode_sizes
            for tokens in self._token_sizes
        )
        key = next(((b, Kind.PLAIN) for b in buckets if (b, Kind.PLAIN) not in self._graphs), None)
        if key is None or len(self._graphs) >= _MOST_AHEAD:
            return False
        self._graph(key)
        return True

    def __call__(self, layout: BatchLayout) -> torch.Tensor:
        """Runs a step that `choose` found a bucket for; its sampled ids [R]."""
        assert layout.padded is not None
        inputs, graph = self._graph((layout.padded.bucket, kind_of(layout.host)))
        torch._foreach_copy_(_tensors(inputs), _tensors(layout))
        graph.replay()
        return graph.output.index_select(0, layout.padded.sampled)

    def _bucket(self, tokens: int, decodes: int) -> Bucket:
        return Bucket(tokens=tokens, chunks=self._max_chunks, decodes=decodes)

    def _graph(self, key: _Key) -> tuple[BatchLayout, Graph]:
        recorded = self._graphs.get(key)
        if recorded is None:
            bucket, kind = key
            nothing = replace(_NOTHING, has_filters=kind is Kind.FILTERED)
            arrays = padded_arrays(nothing, bucket, self._padding_slot)
            parts = (torch.tensor(array, device=self._device) for array in arrays)
            # Recording begins with a step that counts: none of a sequence's.
            inputs = layout_of(nothing, bucket, *parts)
            graph = self._record(functools.partial(self._compute, inputs))
            recorded = self._graphs[key] = inputs, graph
        return recorded


_Key = tuple[Bucket, Kind]


def _smallest(sizes: Sequence[int], at_least: int) -> int:
    return sizes[bisect.bisect_left(sizes, at_least)]


def _tensors(layout: BatchLayout) -> list[torch.Tensor]:
    return [
        layout.slots,
        layout.rows,
        layout.offsets,
        layout.query_starts,
        layout.chunk_token_ids,
        layout.sample_rows,
    ]


_NOTHING = HostLayout(
    plan=Plan(step=0),
    slots=np.empty(0, dtype=np.int64),
    query_lens=np.empty(0, dtype=np.int64),
    query_starts=np.zeros(1, dtype=np.int64),
    samples=np.empty(0, dtype=bool),
    sample_slots=np.empty(0, dtype=np.int64),
    has_filters=False,
    special=False,
)
