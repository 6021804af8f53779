"""The sampler: rows of logits in, one token id a row out; small functions over explicit tensors.

A random row draws by Gumbel-max (an exponential race): the token whose score x - log(E) is largest,
x = logit / temperature and E = Exp(1) noise of that token alone. The noise comes from Philox, keyed
by (seed, position, token id): it is the same whatever the batch, the row's place in it, and which
other tokens are looked at. Only a comparison of scores is left, so softmax is never formed.

The order is transformers' and vLLM's: temperature, top-k, top-p, min-p. Each filter is a threshold
on x, so tokens tied with the last one kept are kept too; the likeliest token always is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# log(E) is from log(2**-33) = -22.87 to log(log(2**24)) = 2.81: no noise lifts a token over another
# that is likelier by more than this.
_NOISE_RANGE = 25.7
# On the CPU, how many of the likeliest tokens top-p looks at before it sorts a whole row.
_TOP_P_WIDTH = 256
# On the CPU, noise is drawn token by token when fewer than one in so many tokens can win.
_SPARSE = 8
# On the CPU, noise is drawn for so many rows at a time: temporaries of 256 rows leave the cache.
_CPU_ROWS = 8

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


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


def sample(logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The token ids [R] int64 of float32 logits [R, V]; ids at -inf are never sampled.

    positions: [R] int64, the index of the token to sample in prompt + output.
    """
    if rows.random is None:
        return logits.argmax(dim=-1)
    if len(rows.random) == len(logits):
        return _sample_random(logits, positions, rows)
    token_ids = logits.argmax(dim=-1)
    drawn = _sample_random(logits[rows.random], positions[rows.random], rows)
    return token_ids.index_copy(0, rows.random, drawn)


def _sample_random(
    logits: torch.Tensor, positions: torch.Tensor, rows: SamplingRows
) -> torch.Tensor:
    # The likeliest token's is 0, so that no temperature, however small, can overflow.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / rows.temperatures[:, None]
    lowest = torch.full_like(rows.temperatures, -_NOISE_RANGE)
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
    return _race(scaled, lowest, rows.seeds, positions)


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


def race_shard(
    scaled: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the tokens from id first_id on, a multiple of 4, without filters: its column, and
    its score. scaled: [N, V], the largest of a row 0."""
    lowest = torch.full((len(scaled),), -_NOISE_RANGE, device=scaled.device)
    columns = _race(scaled, lowest, seeds, positions, first_id)
    noise = exponential_noise(seeds, positions, columns + first_id)
    return columns, scaled.gather(1, columns[:, None])[:, 0] - noise.log()


def _race(
    scaled: torch.Tensor,
    lowest: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int = 0,
) -> torch.Tensor:
    """The column with the best score among those not below `lowest` [N]; at least one is not."""
    if scaled.device.type != "cpu":
        running = scaled >= lowest[:, None]
        return _dense_race(scaled, running, seeds, positions, first_id)
    some = [slice(i, i + _CPU_ROWS) for i in range(0, len(scaled), _CPU_ROWS)]
    return torch.cat(
        [_cpu_race(scaled[i], lowest[i], seeds[i], positions[i], first_id) for i in some]
    )


def _dense_race(
    scaled: torch.Tensor,
    running: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int,
) -> torch.Tensor:
    noise = exponential_noise_rows(seeds, positions, scaled.shape[1], first_id)
    return (scaled - noise.log()).masked_fill(~running, -torch.inf).argmax(dim=1)


def _cpu_race(
    scaled: torch.Tensor,
    lowest: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_id: int,
) -> torch.Tensor:
    """When few tokens are left, draws noise for these alone; a GPU would wait for their number."""
    running = scaled >= lowest[:, None]
    if _SPARSE * int(running.count_nonzero()) > running.numel():
        return _dense_race(scaled, running, seeds, positions, first_id)
    row, column = running.nonzero(as_tuple=True)
    noise = exponential_noise(seeds[row], positions[row], column + first_id)
    scores = torch.full_like(scaled, -torch.inf)
    scores[row, column] = scaled[row, column] - noise.log()
    return scores.argmax(dim=1)


def exponential_noise_rows(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, first_id: int = 0
) -> torch.Tensor:
    """Exp(1) noise of vocab_size token ids from first_id on, a multiple of 4: [N], [N] ->
    [N, vocab_size] float32."""
    first = first_id // 4
    blocks = torch.arange(first, first + (vocab_size + 3) // 4, device=seeds.device)
    words = philox(seeds[:, None], blocks[None, :], positions[:, None])
    return _to_exponential(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Exp(1) noise of single tokens: three [n] -> [n] float32, as exponential_noise_rows has it."""
    words = torch.stack(philox(seeds, token_ids // 4, positions))
    return _to_exponential(words.gather(0, (token_ids % 4)[None])[0])


def _to_exponential(words: torch.Tensor) -> torch.Tensor:
    """Uniform 32-bit words to Exp(1): -log1p(-u), u = (word + 0.5) / 2**32, at most 1 - 2**-24.

    Small u, hence the small E that win, keep all 32 bits of resolution; Triton's own mapping to
    floats keeps 31 and can give 0, whose logarithm is no score.
    """
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def philox(
    seeds: torch.Tensor, counters_low: torch.Tensor, counters_high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words below 2**32 as int64, per counter.

    The same words as Triton's tl.randint4x(seed, high << 32 | low); arguments broadcast. Low is
    token id // 4 and high the position here; word token id % 4 is the token's.
    """
    key_0, key_1 = seeds & _MASK, (seeds >> 32) & _MASK
    word_0, word_1 = counters_low, counters_high
    word_2 = word_3 = torch.zeros((), dtype=torch.int64, device=seeds.device)
    for _ in range(_ROUNDS):
        # The products wrap around in int64, which leaves their 64 bits as they should be.
        product_a, product_b = word_0 * _MULTIPLIER_A, word_2 * _MULTIPLIER_B
        word_0 = (product_b >> 32).bitwise_and_(_MASK) ^ (word_1 ^ key_0)
        word_2 = (product_a >> 32).bitwise_and_(_MASK) ^ (word_3 ^ key_1)
        word_1, word_3 = product_b.bitwise_and_(_MASK), product_a.bitwise_and_(_MASK)
        key_0, key_1 = (key_0 + _WEYL_A) & _MASK, (key_1 + _WEYL_B) & _MASK
    return word_0, word_1, word_2, word_3
