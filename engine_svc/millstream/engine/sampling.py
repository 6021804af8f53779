"""The sampler: rows of logits in, one token id a row out; small functions over explicit tensors.

A random row samples in two levels: first a block of the vocabulary, by the blocks' masses
(choose_block), then a token of that block (choose_token). P(block) * P(token | block) is P(token),
so this is exact, and noise is drawn for the blocks and for one block's tokens alone. Either level
takes the best of log mass - log(E), E = Exp(1) noise of that entry (Gumbel-max, an exponential
race; stepping/noise.py). Noise is a function of seed, position and id, a block's sum depends on
nothing but the block: a row samples the same whatever the batch, its place in it, and which other
blocks the process has.

The order is transformers' and vLLM's: temperature, top-k, top-p, min-p. Each filter is a threshold
on logit / temperature, so tokens tied with the last one kept are kept too; the likeliest token
always is. Tokens below it become -inf, which has no mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from millstream.engine.stepping.noise import block_noise, token_noise

# On the CPU, how many of the likeliest tokens top-p looks at before it sorts a whole row.
_TOP_P_WIDTH = 256
# On the CPU, exponentials are taken of so many rows at a time: those of 256 rows leave the cache.
_CPU_ROWS = 8

_LARGEST_BLOCK, _SMALLEST_BLOCK = 1024, 16  # token ids
_FEWEST_BLOCKS = 16  # of a vocabulary, if blocks need not be smaller than that for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How R rows sample; N of them are random, the others greedy. Reusable while the batch stays.

    Index tensors name the rows that use a filter, so that other rows do not pay for it.
    """

    random: torch.Tensor | None  # [N] int64, into the R rows; None: all rows are greedy
    temperatures: torch.Tensor  # [N] float32, never below GREEDY_BELOW
    seeds: torch.Tensor  # [N] int64: the bits of an unsigned seed
    top_k_rows: torch.Tensor | None = None  # [K] int64, into the N rows
    top_k: torch.Tensor | None = None  # [K] int64, from 1 to V
    max_top_k: int = 0
    top_p_rows: torch.Tensor | None = None  # [P] int64, into the N rows
    top_p: torch.Tensor | None = None  # [P] float32
    min_p: torch.Tensor | None = None  # [N] float32; None: off everywhere


ALL_GREEDY = SamplingRows(random=None, temperatures=torch.empty(0), seeds=torch.empty(0))


def vocab_block(vocab_size: int) -> int:
    """How many token ids a block of a vocabulary has, but for the last: a power of two.

    It depends on the whole vocabulary, not on a rank's share of it: which tokens a seed samples
    depends on it.
    """
    most = max(vocab_size // _FEWEST_BLOCKS, _SMALLEST_BLOCK)
    return min(1 << (most.bit_length() - 1), _LARGEST_BLOCK)


def sample(logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token ids [R] int64 of float32 logits [R, V]; ids at -inf are never sampled.

    positions: [R] int64, the index of the token to sample in prompt + output.
    """
    if rows.random is None:
        return logits.argmax(dim=-1)
    block_size = vocab_block(logits.shape[1])
    if len(rows.random) == len(logits):
        return draw(_filtered(logits, rows), positions, rows, block_size).token_ids
    token_ids = logits.argmax(dim=-1)
    kept = _filtered(logits[rows.random], rows)
    drawn = draw(kept, positions[rows.random], rows, block_size).token_ids
    return token_ids.index_copy(0, rows.random, drawn)


def _filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits [N, V] with those that the rows' filters cut at -inf."""
    if rows.top_k_rows is None and rows.top_p_rows is None and rows.min_p is None:
        return logits
    # The likeliest token's is 0, so that no temperature, however small, can overflow.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / rows.temperatures[:, None]
    lowest = torch.full_like(rows.temperatures, -torch.inf)
    if rows.top_k_rows is not None:
        assert rows.top_k is not None
        threshold = top_k_threshold(_pick(scaled, rows.top_k_rows), rows.top_k, rows.max_top_k)
        lowest = _raise(lowest, rows.top_k_rows, threshold)
    if rows.top_p_rows is not None:
        assert rows.top_p is not None
        kept = _pick(scaled, rows.top_p_rows)
        if rows.top_k_rows is not None:
            kept = kept.masked_fill(kept < lowest[rows.top_p_rows, None], -torch.inf)
        lowest = _raise(lowest, rows.top_p_rows, top_p_threshold(kept, rows.top_p))
    if rows.min_p is not None:
        lowest = torch.maximum(lowest, rows.min_p.log())
    return logits.masked_fill(scaled < lowest[:, None], -torch.inf)


def _raise(lowest: torch.Tensor, rows: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return lowest.index_copy(0, rows, torch.maximum(lowest[rows], threshold))


def _pick(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """The top_k[i]-th largest of each row: [K, V], [K] -> [K]. No sort of the whole row."""
    largest = logits.topk(max_top_k, dim=1).values
    return largest.gather(1, top_k[:, None] - 1)[:, 0]


def top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least logit of the smallest set of likeliest tokens whose mass reaches top_p.

    The token that crosses top_p is in the set, as in transformers. [P, V], [P] -> [P].
    """
    log_total = logits.logsumexp(dim=1, keepdim=True)
    width = logits.shape[1]
    if logits.device.type == "cpu" and width > _TOP_P_WIDTH:
        threshold, complete = _top_p_of_largest(logits, log_total, top_p, _TOP_P_WIDTH)
        rest = (~complete).nonzero()[:, 0]
        if len(rest):
            threshold[rest], _ = _top_p_of_largest(
                logits[rest], log_total[rest], top_p[rest], width
            )
        return threshold
    return _top_p_of_largest(logits, log_total, top_p, width)[0]


def _top_p_of_largest(
    logits: torch.Tensor, log_total: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """top_p_threshold from each row's `width` largest logits, and which rows those suffice for."""
    largest = logits.topk(width, dim=1).values
    mass = (largest - log_total).exp()
    reached = mass.cumsum(dim=1)
    inside = reached - mass < top_p[:, None]  # the mass of the likelier tokens
    last = inside.sum(dim=1).clamp(min=1) - 1
    return largest.gather(1, last[:, None])[:, 0], reached[:, -1] >= top_p


class Drawn(NamedTuple):
    """Tokens of N random rows, and the scores (block_scores) of the blocks that they are of."""

    token_ids: torch.Tensor  # [N] int64
    largest: torch.Tensor  # [N] float32
    noisy: torch.Tensor  # [N] float32


def draw(
    logits: torch.Tensor,
    positions: torch.Tensor,
    rows: SamplingRows,
    block_size: int,
    first_id: int = 0,
) -> Drawn:
    """Samples float32 logits [N, V] of the ids from first_id on, a multiple of block_size, as the
    random rows of `rows` do; filters, and which rows these are, are not looked at."""
    seeds, temperatures = rows.seeds, rows.temperatures
    blocks = _in_blocks(logits, block_size)
    largest, log_sums = block_masses(blocks, temperatures)
    noise = block_noise(seeds, positions, first_id // block_size, blocks.shape[1])
    block, *score = choose_block(largest, log_sums, temperatures, noise)
    first_ids = first_id + block * block_size
    token = choose_token(
        blocks[torch.arange(len(block), device=block.device), block],
        temperatures,
        token_noise(seeds, positions, first_ids, block_size),
    )
    return Drawn(first_ids + token, *score)


def choose_block(
    largest: torch.Tensor, log_sums: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block [N] that each row samples of, by the masses [N, B] of its blocks and their noise
    [N, B]; and its score, in the two parts that block_scores adds up."""
    noisy = log_sums - noise.log()
    block = block_scores(largest, noisy, temperatures[:, None]).argmax(dim=1)
    at = block[:, None]
    return block, largest.gather(1, at)[:, 0], noisy.gather(1, at)[:, 0]


def choose_token(
    logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The column [N] that each row samples of its block's logits and noise [N, block size]."""
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperatures[:, None]
    return (scaled - noise.log()).argmax(dim=1)


def block_masses(
    blocks: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's largest logit, and the logarithm of its sum of exp((logit - largest) /
    temperature): [N, B, block size], [N] -> [N, B] twice. Of a block of -inf: -inf, 0."""
    largest = blocks.amax(dim=2)
    step = _CPU_ROWS if blocks.device.type == "cpu" else max(len(blocks), 1)
    some = [slice(at, at + step) for at in range(0, max(len(blocks), 1), step)]
    return largest, torch.cat([_log_sums(blocks[i], largest[i], temperatures[i]) for i in some])


def _log_sums(
    blocks: torch.Tensor, largest: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    shift = largest[:, :, None].clamp(min=torch.finfo(blocks.dtype).min)  # not -inf - -inf
    scaled = (blocks - shift).div_(temperatures[:, None, None])
    return scaled.exp_().sum(dim=2).clamp_(min=1).log_()


def block_scores(
    largest: torch.Tensor, noisy: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """largest / temperature + noisy in float64: blocks of ranks that know nothing of each other's
    compare as those of one, and no temperature is so small that a large logit drowns the noise."""
    return largest.double() / temperatures + noisy


def _in_blocks(logits: torch.Tensor, block_size: int) -> torch.Tensor:
    """[N, V] -> [N, B, block_size], filled up with -inf."""
    missing = -logits.shape[1] % block_size
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits.reshape(len(logits), -1, block_size)
