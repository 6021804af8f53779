"""The engine on one GPU, in process, random weights: one JSON line for each figure.

    python3 -m tests.bench.engine_gpu [--model qwen3-0.6b] [--only latency ttft flagship ...]

latency: ms per token of one sequence, 128-token prompt, 512 tokens. flagship: the workload of
millstream.client.workload, the second of two runs. ttft: the first token of a 1,000-token prompt on
an idle engine. idle: the share of 50 steady steps at batch 256 in which no kernel runs. bare: a
decode step of contexts of a few tokens, by batch: all that is not attention. prefill: TFLOP/s of a
step of as many tokens as steps take, in prompts of 1,024 and in one, beside a matrix product's.
edited: a steady step of 256 sequences of which none, one or all ask for something that changes or
scores logits. crowd: four times the flagship's requests at once, with as many sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tests.bench.graph_timing import graph_time
from tests.bench.json_lines import report

from millstream.client.workload import Workload
from millstream.engine import LLM, SamplingParams
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.shapes import named_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--only", nargs="+", default=["latency", "ttft", "flagship", "idle"])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--profile", action="store_true", help="print the kernels of idle's steps")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.cuda.init()
    cuda_s = time.perf_counter() - started
    llm = LLM(
        arguments.model,
        load_format="dummy",
        enforce_eager=arguments.enforce_eager,
        attention_backend=arguments.attention_backend,
        batch_invariant=arguments.batch_invariant,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    report(
        "startup",
        seconds=time.perf_counter() - started,
        cuda_s=cuda_s,
        phases={name: round(seconds, 2) for name, seconds in llm.info.phases},
        num_blocks=llm.info.num_blocks,
    )
    measures = {
        "latency": lambda: latency(llm),
        "ttft": lambda: ttft(llm),
        "flagship": lambda: flagship(llm, arguments.runs),
        "idle": lambda: idle(llm, arguments.profile),
        "bare": lambda: bare(llm),
        "prefill": lambda: prefill(llm, arguments.model),
        "edited": lambda: edited(llm),
        "crowd": lambda: crowd(llm),
    }
    for name in arguments.only:
        measures[name]()
    free, total = torch.cuda.mem_get_info()
    report("memory", free_gib=free / 2**30, total_gib=total / 2**30)


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(length)]


def generate(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    """Runs prompts greedily; returns seconds."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    started = time.perf_counter()
    llm.generate(list(prompts), params, use_tqdm=False)
    return time.perf_counter() - started


def latency(llm: LLM, tokens: int = 512) -> None:
    generate(llm, [random_prompt(128, 0)], 8)
    runs = []
    for seed in range(1, 4):
        first = generate(llm, [random_prompt(128, seed)], 1)
        whole = generate(llm, [random_prompt(128, 100 + seed)], tokens)
        runs.append(1e3 * (whole - first) / (tokens - 1))
    report("latency", ms_per_token=statistics.median(runs), runs=[round(r, 4) for r in runs])


def ttft(llm: LLM) -> None:
    times = [1e3 * generate(llm, [random_prompt(1000, 10 + seed)], 1) for seed in range(8)]
    report("ttft", ms=statistics.median(times[3:]), first_ms=times[0])


def flagship(llm: LLM, num_runs: int) -> None:
    drawn = Workload().draw()
    for run in range(num_runs):
        requests = drawn.shifted(7 * run, llm.info.vocab_size)
        started = time.perf_counter()
        outputs = llm.generate(requests.prompts, requests.params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output["token_ids"]) for output in outputs)
        report("flagship", run=run + 1, tokens_per_s=tokens / seconds, seconds=seconds)


def idle(llm: LLM, print_kernels: bool, batch: int = 256, steps: int = 50) -> None:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps + 60)
    batch = min(batch, llm.info.max_num_seqs)
    for index in range(batch):
        llm.add_request(random_prompt(500, 1000 + index), params)
    while llm.stats().generation_tokens == 0:
        llm.step()
    for _ in range(40):
        llm.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps // 5):
        llm.step()
    plain_ms = 1e3 * (time.perf_counter() - started) / (steps // 5)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.synchronize()
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy = 0.0
    end = spans[0][0]
    for start, stop in spans:  # dependent launches overlap: the union of spans
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    wall = end - spans[0][0]
    report(
        "idle",
        batch=batch,
        step_ms=plain_ms,
        profiled_step_ms=1e-3 * wall / steps,
        busy_ms=1e-3 * busy / steps,
        idle_share=1 - busy / wall,
        kernels_per_step=len(spans) / steps,
    )
    if print_kernels:
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))
    while not llm.is_finished():
        llm.step()


STEPS = 40
PLAIN: dict[str, Any] = {"temperature": 0.6, "ignore_eos": True, "max_tokens": STEPS + 20}


def record_graphs(llm: LLM) -> None:
    """Each size's own, which a service records while it is idle; no other stands in for it."""
    while llm._core.prepare_ahead():
        pass


def bare(llm: LLM) -> None:
    record_graphs(llm)
    times = {}
    for batch in (1, 4, 8, 16, 32, 48, 64, 72, 96, 128, 136, 160, 192, 224, 256):
        if batch > llm.info.max_num_seqs:
            break
        times[batch] = steady_ms(llm, [SamplingParams(**PLAIN)] * batch)
    report("bare", ms_by_batch=times)


def steady_ms(llm: LLM, params: Sequence[SamplingParams]) -> float:
    """Of a decode step of so many sequences, with contexts of a few tokens."""
    for index, each in enumerate(params):
        llm.add_request(random_prompt(8, index), each)
    for _ in range(12):
        llm.step()
    started = time.perf_counter()
    for _ in range(STEPS):
        llm.step()
    seconds = time.perf_counter() - started
    while not llm.is_finished():
        llm.step()
    return round(1e3 * seconds / STEPS, 4)


def edited(llm: LLM, batch: int = 256) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "filters": {"top_k": 50, "top_p": 0.9},
        "logprobs": {"logprobs": 5},
        "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
        "bias": {"logit_bias": dict.fromkeys(range(100), 1.0)},
        "static mask": {"allowed_token_ids": list(range(1000, 20_000))},
        "mask that follows": {"bad_words": [[token, token + 1] for token in range(50)]},
    }
    plain = SamplingParams(**PLAIN)
    report("edited", kind="none", batch=batch, step_ms=steady_ms(llm, [plain] * batch))
    for kind, fields in kinds.items():
        special = SamplingParams(**PLAIN, **fields)
        one = steady_ms(llm, [special, *[plain] * (batch - 1)])
        report(
            "edited", kind=kind, batch=batch, one_ms=one, all_ms=steady_ms(llm, [special] * batch)
        )


def crowd(llm: LLM) -> None:
    requests = Workload(num_requests=1024).draw().shifted(3, llm.info.vocab_size)
    started = time.perf_counter()
    outputs = llm.generate(requests.prompts, requests.params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(output["token_ids"]) for output in outputs)
    report(
        "crowd",
        requests=len(outputs),
        tokens_per_s=tokens / seconds,
        preemptions=llm.stats().num_preemptions,
    )


def prefill(llm: LLM, model: str) -> None:
    shape = named_shape(model)
    assert shape is not None
    matmul = matmul_tflops()
    budget = llm.info.max_num_batched_tokens
    for length in (1024, budget):
        times = []
        for seed in range(5):
            prompts = [random_prompt(length, 97 * seed + n) for n in range(budget // length)]
            times.append(generate(llm, prompts, 1))
        seconds = statistics.median(times[1:])
        tflops = 1e-12 * prefill_flop(shape, length) * (budget // length) / seconds
        share = tflops / matmul
        report("prefill", prompt=length, tokens=budget, tflops=tflops, matmul=matmul, share=share)


def prefill_flop(shape: ModelConfig, length: int) -> float:
    """The products of a prompt: the layers' weights and causal attention, without the LM head."""
    attended = shape.num_heads * shape.head_dim
    weights = sum(size * depth for size, depth in shape.layer_products.values())
    pairs = length * (length + 1) / 2
    return shape.num_layers * (2.0 * weights * length + 4.0 * attended * pairs)


def matmul_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e-12 * size**3 / graph_time([lambda: a @ b] * 4)


if __name__ == "__main__":
    main()
