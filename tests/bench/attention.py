"""The attention kernels against the card's own limits, in one run: which configuration to ship.

    python -m tests.bench.attention [--cases decode schedule prefill store] [--json FILE]

Decode, and schedule (steps of the flagship run: how finely to cut sequences): GB/s of the K and V
read, and as a share of a plain read of as many bytes in the same run. Prefill: TFLOP/s, beside a
matrix product's. Everything in CUDA graphs over several layers' caches, so that no layer finds its
data in the L2; medians; every timed output is checked for some of its sequences. Kernels are
compiled first, in parallel, without the GPU. About 50 s.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from tests.bench.compilation import compile_in_parallel
from tests.bench.prefill_candidates import prefill_candidates

from millstream.client.workload import Workload
from millstream.kernels import paged_prefill, reference_attention
from millstream.kernels.heads import Heads
from millstream.kernels.paged_decode import DecodeConfig, PagedDecode
from millstream.kernels.prefill_configs import PrefillConfig
from millstream.kernels.qk_norm_rope_store import qk_norm_rope_store

BF16 = torch.bfloat16
STEP_S = 0.02  # time spent on one figure
_KEPT = 4  # configurations tried with a case's other block sizes
TOLERANCE = 1.5e-2  # of a row of bfloat16 against float32
# For whose heads schedules are tried, and every how many sequences: Qwen3-0.6B's, Qwen3-14B's.
SCHEDULES = {(16, 8, 128): 8, (40, 8, 128): 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    contexts: tuple[int, ...]
    heads: tuple[int, int, int]  # query heads, KV heads, head_dim
    layers: int
    block_sizes: tuple[int, ...] = (256, 64)  # after the first, only its best configurations
    query_lens: tuple[int, ...] = ()  # prefill

    @property
    def kv_bytes(self) -> int:
        return sum(self.contexts) * self.heads[1] * self.heads[2] * 4

    @property
    def prefill_flop(self) -> float:
        pairs = sum(q * (c - q) + q * (q + 1) / 2 for q, c in self._chunks())
        return 4.0 * pairs * self.heads[0] * self.heads[2]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        return zip(self.query_lens, self.contexts, strict=True)


@functools.cache
def flagship_lengths() -> list[tuple[int, int]]:
    """Prompt and output of each request of the flagship run."""
    drawn = Workload().draw()
    requests = zip(drawn.prompts, drawn.params, strict=True)
    return [(len(ids), params.max_tokens or 0) for ids, params in requests]


def flagship_contexts(step: int) -> tuple[int, ...]:
    """The contexts of the flagship run's sequences that are left after so many decode steps."""
    return tuple(prompt + step for prompt, output in flagship_lengths() if output > step)


def decode_cases() -> list[Case]:
    about_1k = tuple(random.Random(7).randint(512, 1536) for _ in range(256))
    mixed = (32_768, *(about_1k[:127]))
    qwen = (16, 8, 128)
    return [
        Case(name="step 100", contexts=flagship_contexts(100), heads=qwen, layers=6,
             block_sizes=(256, 128, 64)),
        Case(name="step 500", contexts=flagship_contexts(500), heads=qwen, layers=6),
        Case(name="32 x ~1k", contexts=about_1k[:32], heads=qwen, layers=12, block_sizes=(256,)),
        Case(name="8 x 32k", contexts=(32_768,) * 8, heads=qwen, layers=4),
        Case(name="1 x 32k", contexts=(32_768,), heads=qwen, layers=12),
        Case(name="1 x 1k", contexts=(1024,), heads=qwen, layers=48),
        Case(name="1 x 150", contexts=(150,), heads=qwen, layers=48, block_sizes=(256,)),
        Case(name="32k + 127 x ~1k", contexts=mixed, heads=qwen, layers=4, block_sizes=(256,)),
        Case(name="GQA 5", contexts=about_1k, heads=(40, 8, 128), layers=4, block_sizes=(256,)),
        Case(name="GQA 3", contexts=about_1k, heads=(24, 8, 128), layers=4, block_sizes=(256,)),
        Case(name="GQA 8", contexts=about_1k, heads=(32, 4, 128), layers=6, block_sizes=(256,)),
        Case(name="GQA 3 D 64", contexts=about_1k, heads=(9, 3, 64), layers=12,
             block_sizes=(256,)),
    ]  # fmt: skip


def decode_configs(case: Case) -> dict[str, DecodeConfig]:
    def config(warps: int, stages: int, rows: bool, tail: bool, **more: Any) -> DecodeConfig:
        return DecodeConfig(
            tile=64, num_warps=warps, num_stages=stages, tokens_are_rows=rows, tail_apart=tail,
            **more,
        )  # fmt: skip

    kinds = {
        "swap w4 s3 r128": functools.partial(config, 4, 3, True, False, max_registers=128),
        "pad w4 s2": functools.partial(config, 4, 2, False, False),
        "pad w2 s2 tail": functools.partial(config, 2, 2, False, True),
    }
    if case.heads[2] == 64:
        kinds["pad w4 s3 r168"] = functools.partial(config, 4, 3, False, False, max_registers=168)
    elif case.heads[0] == 2 * case.heads[1]:
        kinds |= {
            "swap w4 s3": functools.partial(config, 4, 3, True, False),
            "swap w4 s3 tail": functools.partial(config, 4, 3, True, True),
            "pad w2 s3 tail": functools.partial(config, 2, 3, False, True),
        }
    else:
        kinds["pad w4 s2 r128"] = functools.partial(config, 4, 2, False, False, max_registers=128)
    schedules = (4, 8) if len(case.contexts) * case.heads[1] > 500 else (2, 4, 8)
    return {
        f"{kind} x{items}": make(items_per_multiprocessor=items)
        for kind, make in kinds.items()
        for items in schedules
    }


def schedule_cases(heads: tuple[int, int, int]) -> list[Case]:
    """For sizes that graphs have, the flagship run's first step of so few sequences."""
    first_steps = {len(flagship_contexts(step)): step for step in range(1023, 0, -1)}
    steps = {
        size: min(step for count, step in first_steps.items() if count <= size)
        for size in range(8, 257, SCHEDULES[heads])
    }
    return [
        Case(name=f"{size}: step {step}", contexts=flagship_contexts(step), heads=heads, layers=6,
             block_sizes=(64,))
        for size, step in steps.items()
    ]  # fmt: skip


def schedule_configs() -> dict[str, DecodeConfig]:
    narrow = functools.partial(
        DecodeConfig, tile=64, tokens_are_rows=False, tail_apart=True, least_share=256
    )
    wide = functools.partial(
        DecodeConfig,
        tile=64,
        num_warps=4,
        num_stages=3,
        tail_apart=False,
        max_registers=128,
        least_share=256,
    )
    kinds = {
        "pad w2 s2 tail": (functools.partial(narrow, num_warps=2, num_stages=2), (2, 4)),
        "pad w2 s3 tail": (functools.partial(narrow, num_warps=2, num_stages=3), (1, 3)),
        "pad w2 s4 tail": (functools.partial(narrow, num_warps=2, num_stages=4), (2,)),
        "pad w4 s2 tail": (functools.partial(narrow, num_warps=4, num_stages=2), (2, 4)),
        "pad w4 s3 tail": (functools.partial(narrow, num_warps=4, num_stages=3), (1, 3)),
        "swap w4 s3 r128": (functools.partial(wide, tokens_are_rows=True), (1, 2, 3)),
        "pad w4 s3 r128": (functools.partial(wide, tokens_are_rows=False), (2,)),
    }
    return {
        f"{kind} x{items}": make(items_per_multiprocessor=items)
        for kind, (make, schedules) in kinds.items()
        for items in schedules
    }


def prefill_cases() -> list[Case]:
    def case(name: str, count: int, queries: int, prefix: int, heads: tuple[int, int, int]) -> Case:
        return Case(
            name=name, contexts=(prefix + queries,) * count, query_lens=(queries,) * count,
            heads=heads, layers=2, block_sizes=(256, 64),
        )  # fmt: skip

    # A step of the flagship run: prompts of 100 to 1,024 tokens, in no order.
    lens = tuple(random.Random(7).sample(range(100, 1025, 33), 29))
    mixed = functools.partial(Case, contexts=lens, query_lens=lens, layers=2)
    return [
        mixed(name="29 x 100..1024", heads=(16, 8, 128)),
        mixed(name="the same, GQA 8", heads=(32, 4, 128)),
        case("29 x 562", 29, 562, 0, (16, 8, 128)),
        case("16 x 1024", 16, 1024, 0, (40, 8, 128)),
        case("4 x 4096", 4, 4096, 0, (40, 8, 128)),
        case("1 x 16384", 1, 16_384, 0, (40, 8, 128)),
        case("16 x 1024, GQA 2", 16, 1024, 0, (16, 8, 128)),
        case("4 x 4096, GQA 2", 4, 4096, 0, (16, 8, 128)),
        case("1 x 16384, GQA 2", 1, 16_384, 0, (16, 8, 128)),
        case("1 x 4096, GQA 2", 1, 4096, 0, (16, 8, 128)),
        case("1 x 1000", 1, 1000, 0, (16, 8, 128)),
        case("1 x 512 after 8k", 1, 512, 8192, (16, 8, 128)),
        case("16 x 1024 D 64", 16, 1024, 0, (9, 3, 64)),
    ]


def prefill_configs(case: Case) -> dict[str, PrefillConfig]:
    return prefill_candidates(case.heads[0] // case.heads[1], case.heads[2])


# ---- inputs: caches cut out of one buffer, blocks in random order


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    queries: list[torch.Tensor]  # of each layer
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    block_tables: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor


def make_inputs(case: Case, block_size: int, buffer: torch.Tensor, layers: int) -> Inputs:
    num_heads, num_kv_heads, head_dim = case.heads
    device = buffer.device
    query_lens = case.query_lens or (1,) * len(case.contexts)
    counts = [-(-context // block_size) for context in case.contexts]
    num_blocks = sum(counts) + sum(counts) // 8 + 1
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_size))
    # A width of a multiple of 16 whatever the blocks, so that one compiled kernel fits.
    tables = torch.zeros(len(counts), -(-max(counts) // 16) * 16, dtype=torch.int32)
    at = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[at : at + count].int()
        at += count
    pairs = buffer[: 2 * layers * math.prod(shape)].view(layers, 2, *shape).unbind(0)
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    query = torch.randn(starts[-1], num_heads, head_dim, device=device).to(BF16)
    return Inputs(
        queries=[query.clone() for _ in range(layers)],
        caches=[(pair[0], pair[1]) for pair in pairs],
        block_tables=tables.to(device),
        slots=torch.arange(len(counts), dtype=torch.int32, device=device),
        context_lens=torch.tensor(case.contexts, dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
    )


def decode_calls(
    case: Case, config: DecodeConfig | None, inputs: Inputs
) -> list[Callable[[], torch.Tensor]]:
    block_size = inputs.caches[0][0].shape[1]
    decode = PagedDecode(
        len(case.contexts), *case.heads, block_size, 40_960, inputs.slots.device, config=config
    )
    decode.begin_step(inputs.block_tables, inputs.slots, inputs.context_lens)
    return [
        functools.partial(decode, query, *cache)
        for query, cache in zip(inputs.queries, inputs.caches, strict=True)
    ]


def prefill_calls(
    case: Case, config: PrefillConfig | None, inputs: Inputs
) -> list[Callable[[], torch.Tensor]]:
    return [
        functools.partial(
            paged_prefill.paged_prefill, query, *cache, inputs.block_tables, inputs.slots,
            inputs.query_starts, inputs.context_lens, config=config,
        )
        for query, cache in zip(inputs.queries, inputs.caches, strict=True)
    ]  # fmt: skip


# ---- compilation, in processes that have no GPU


def _compile(case: Case, block_size: int, config: DecodeConfig | PrefillConfig | None) -> str:
    small = Case(
        name=case.name, contexts=tuple(min(c, 64) for c in case.contexts[:2]), heads=case.heads,
        layers=1, query_lens=tuple(min(q, 64) for q in case.query_lens[:2]),
    )  # fmt: skip
    try:
        inputs = make_inputs(small, block_size, torch.zeros(1 << 22, dtype=BF16), 1)
        calls = prefill_calls if case.query_lens else decode_calls
        calls(small, config, inputs)[0]()  # type: ignore[arg-type]
    except Exception as error:
        return f"{case.name} block {block_size} {config}: {type(error).__name__} {error}"[:300]
    return ""


def compile_all(work: Sequence[tuple[Case, int, Any]]) -> None:
    started = time.monotonic()
    unique: dict[Any, tuple[Case, int, Any]] = {}
    for case, block_size, config in work:
        key = {**asdict(config), "items_per_multiprocessor": 0}
        unique[(case.heads, block_size, bool(case.query_lens), *key.values())] = (
            case, block_size, config,
        )  # fmt: skip
    for failure in filter(None, compile_in_parallel(_compile, unique.values())):
        print("compile failed:", failure)
    print(f"{len(unique)} kernels compiled in {time.monotonic() - started:.1f} s", flush=True)


# ---- measuring


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    acc = tl.zeros([BLOCK], tl.float32)
    blocks = count // BLOCK
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), loop_unroll_factor=UNROLL):
        acc += tl.load(x_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, axis=0))


def microseconds(calls: Sequence[Callable[[], object]], samples: int = 5) -> float:
    """Median time of one of the calls, when all of them are replayed as one CUDA graph."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        before.record()
        for _ in range(times):
            graph.replay()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3 / times / len(calls)

    replay(1)
    once = replay(1)
    times = max(1, int(STEP_S * 1e6 / samples / (once * len(calls))))
    return statistics.median(replay(times) for _ in range(samples))


def read_us(buffer: torch.Tensor, num_bytes: int, layers: int) -> float:
    """A plain read of so many bytes, each call another part of the buffer; the best of some."""
    count = num_bytes // 2
    sink = torch.empty(1 << 16, device=buffer.device)
    results = []
    for block, per_multiprocessor, unroll in ((2048, 8, 1), (4096, 8, 1), (2048, 4, 4)):
        grid = (132 * per_multiprocessor,)
        calls = [
            functools.partial(
                _read_kernel[grid], buffer[layer * count :], sink, count, BLOCK=block,
                UNROLL=unroll, num_warps=4,
            )
            for layer in range(layers)
        ]  # fmt: skip
        results.append(microseconds(calls))
    return min(results)


def row_error(case: Case, inputs: Inputs, out: torch.Tensor) -> float:
    """The largest relative error of a row of the last layer; of its shortest and longest
    sequence, and the last 64 rows of those."""
    order = sorted(range(len(case.contexts)), key=lambda row: case.contexts[row])
    worst = 0.0
    for row in {order[0], order[-1]}:
        start, stop = inputs.query_starts[row].item(), inputs.query_starts[row + 1].item()
        start = max(start, stop - 64)
        expected = reference_attention.paged_attention(
            inputs.queries[-1][start:stop], *inputs.caches[-1], inputs.block_tables,
            inputs.slots[row : row + 1], torch.tensor([0, stop - start]),
            inputs.context_lens[row : row + 1],
        )  # fmt: skip
        error = (out[start:stop].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, error.max().item() if not error.isnan().any() else math.inf)
    return worst


def measure(
    case: Case, make_calls: Callable[..., Any], configs: dict[str, Any], inputs: Inputs
) -> dict[str, float]:
    """Microseconds a layer by configuration, best first."""
    results = {}
    for name, config in configs.items():
        try:
            calls = make_calls(case, config, inputs)
            error = row_error(case, inputs, calls[-1]())
            if not error < TOLERANCE:
                print(f"{case.name}: {name} is WRONG, row error {error:.2g}", flush=True)
                continue
            results[name] = microseconds(calls)
        except Exception as error:  # one configuration less
            print(f"{case.name}: {name} failed: {str(error)[:200]}", flush=True)
    return dict(sorted(results.items(), key=lambda entry: entry[1]))


def bench_decode(buffer: torch.Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    return _bench_decode(buffer, [(case, decode_configs(case)) for case in decode_cases()])


def bench_schedule(buffer: torch.Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    configs = schedule_configs()
    cases = (case for heads in SCHEDULES for case in schedule_cases(heads))
    return _bench_decode(buffer, [(case, configs) for case in cases])


def _bench_decode(
    buffer: torch.Tensor, work: Sequence[tuple[Case, dict[str, DecodeConfig]]]
) -> tuple[list[str], list[dict[str, Any]]]:
    lines, records = [], []
    for case, configs in work:
        read = read_us(buffer, case.kv_bytes, case.layers)
        for block_size in case.block_sizes:
            inputs = make_inputs(case, block_size, buffer, case.layers)
            results = measure(case, decode_calls, configs, inputs)
            configs = {name: configs[name] for name in [*results][:_KEPT]}
            shipped = measure(case, decode_calls, {"shipped": None}, inputs)
            records.append(
                {
                    "case": case.name,
                    "heads": case.heads,
                    "block": block_size,
                    "read_us": read,
                    "us": results | shipped,
                }
            )
            texts = [
                f"{name} {us:.1f} ({read / us:.3f})" for name, us in [*results.items()][:4]
            ] + [f"shipped {us:.1f} ({read / us:.3f})" for us in shipped.values()]
            best = min(results.values(), default=math.inf)
            lines.append(
                f"{case.name:16} {case.heads} block {block_size:3}  "
                f"{case.kv_bytes / best / 1e3:5.0f} GB/s  read {read:.1f} us | " + " | ".join(texts)
            )
            print(lines[-1], flush=True)
    return lines, records


def bench_prefill(buffer: torch.Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    a, b = (buffer[at : at + (1 << 26)].view(8192, 8192) for at in (0, 1 << 26))
    matmul = 2 * 8192**3 / microseconds([lambda: a @ b]) / 1e6
    lines, records = [f"matmul 8192: {matmul:.0f} TFLOP/s"], []
    for case in prefill_cases():
        for block_size in case.block_sizes:
            inputs = make_inputs(case, block_size, buffer, case.layers)
            results = measure(case, prefill_calls, prefill_configs(case), inputs)
            shipped = measure(case, prefill_calls, {"shipped": None}, inputs)
            records.append({"case": case.name, "block": block_size, "us": results | shipped})
            texts = [
                f"{name} {us:.0f} us {case.prefill_flop / us / 1e6:.0f}"
                for name, us in [*results.items(), *shipped.items()]
            ]
            lines.append(f"{case.name:16} block {block_size:3} TFLOP/s | " + " | ".join(texts))
            print(lines[-1], flush=True)
    return lines, records


def bench_store(buffer: torch.Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    lines, records = [], []
    cache = buffer[: 2 * 1024 * 64 * 8 * 128].view(2, 1024, 64, 8, 128)
    weight = torch.ones(128, dtype=BF16, device=buffer.device)
    table = torch.randn(2048, 128, device=buffer.device).to(BF16)
    for tokens in (1, 32, 256, 16_384):
        qkv = torch.randn(tokens, 32 * 128, device=buffer.device).to(BF16)
        positions = torch.arange(tokens, device=buffer.device) % 2048
        indices = torch.randperm(1024 * 64, device=buffer.device)[:tokens]
        heads = Heads(
            num_heads=16,
            num_kv_heads=8,
            q_weight=weight,
            k_weight=weight,
            eps=1e-6,
            cos=table[:, :64],
            sin=table[:, 64:],
            positions=positions,
            kv_indices=indices,
            key_cache=cache[0],
            value_cache=cache[1],
        )
        us = microseconds([functools.partial(qk_norm_rope_store, qkv, heads)] * 20)
        lines.append(f"store {tokens:5} tokens {us:.2f} us, {qkv.nbytes * 2 / us / 1e3:.0f} GB/s")
        records.append({"tokens": tokens, "us": us})
        print(lines[-1], flush=True)
    case = decode_cases()[0]
    inputs = make_inputs(case, 64, buffer, 1)
    decode = PagedDecode(256, *case.heads, 64, 40_960, buffer.device)
    begin = functools.partial(
        decode.begin_step, inputs.block_tables, inputs.slots, inputs.context_lens
    )
    lines.append(f"work list of 256 sequences {microseconds([begin] * 20):.2f} us")
    print(lines[-1], flush=True)
    return lines, records


BENCHES = {
    "decode": bench_decode,
    "schedule": bench_schedule,
    "prefill": bench_prefill,
    "store": bench_store,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=BENCHES, default=[*BENCHES])
    parser.add_argument("--json")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    arguments = parser.parse_args()
    started = time.monotonic()
    work: list[tuple[Case, int, Any]] = []
    if "decode" in arguments.cases:
        for case in decode_cases():
            for block_size in case.block_sizes:
                work += [(case, block_size, config) for config in decode_configs(case).values()]
    if "schedule" in arguments.cases:
        for heads in SCHEDULES:
            case = schedule_cases(heads)[0]
            work += [(case, 64, config) for config in schedule_configs().values()]
    if "prefill" in arguments.cases:
        for case in prefill_cases():
            for size in case.block_sizes:
                work += [(case, size, config) for config in prefill_configs(case).values()]
    compile_all(work)
    if arguments.compile_only:
        return
    buffer = torch.empty(3 << 30, dtype=BF16, device="cuda")
    for at in range(0, len(buffer), 1 << 28):
        buffer[at : at + (1 << 28)].normal_()
    tables, records = [], {}
    for name in arguments.cases:
        lines, records[name] = BENCHES[name](buffer)
        tables += lines
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(records, file)
    print(f"\n==== {torch.cuda.get_device_name()}, {time.monotonic() - started:.0f} s")
    print("\n".join(tables))


if __name__ == "__main__":
    main()
