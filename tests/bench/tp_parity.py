"""Tokens of a random model on one GPU and on several: one JSON line for each comparison.

    python3 -m tests.bench.tp_parity [--ranks 2] [--device cpu]

float32 token for token: greedy, seeded and filtered; bfloat16 up to ties (docs/performance.md).
Mixed prompts in small chunks, shared prefixes, and a KV cache so small that requests are preempted.
On a GPU a model of real shape (8 layers), on a CPU a tiny one over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.bench.engine_gpu import record_graphs
from tests.bench.json_lines import report
from tests.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from millstream.engine import LLM, SamplingParams

SHAPES = {
    "cuda": {
        "vocab_size": 151_931,  # not a multiple of anything
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "cpu": {
        "vocab_size": 1003,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
    },
}
TIE = 0.25  # of the logits' standard deviation
TOKENS = 64
KV_CACHE_TOKENS = 40 * 64
BYTES = {"float32": 4, "bfloat16": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=BYTES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            compare(arguments.ranks, arguments.device, Path(folder))
    else:
        run(arguments.ranks, arguments.device, arguments.folder, arguments.dtype)
        os._exit(0)


def compare(ranks: int, device: str, folder: Path) -> None:
    make_tiny_model(folder, "qwen3", dtype=torch.bfloat16, **SHAPES[device])
    outputs = {
        (dtype, size): output_of(size, device, folder, dtype)
        for dtype in BYTES
        for size in (1, ranks)
    }
    for kind, one in outputs["float32", 1].items():
        many = outputs["float32", ranks][kind]
        differing = sum(a != b for a, b in zip(one, many, strict=True))
        figures = {"requests": len(one), "differing": differing}
        report("tp_parity_float32", ranks=ranks, kind=kind, equal=not differing, **figures)
    for size in (1, ranks):
        told = ties(folder, device, outputs["bfloat16", size]["greedy"])
        report("tp_parity_bfloat16", ranks=size, **told)


def output_of(ranks: int, device: str, folder: Path, dtype: str) -> dict[str, list[list[int]]]:
    """Of a process of its own."""
    command = [sys.executable, "-m", "tests.bench.tp_parity", "--ranks", str(ranks)]
    command += ["--device", device, "--folder", str(folder), "--dtype", dtype]
    subprocess.run(command, check=True)
    outputs: dict[str, list[list[int]]] = json.loads((folder / "outputs.json").read_text())
    return outputs


def run(ranks: int, device: str, folder: Path, dtype: str) -> None:
    """Writes outputs.json: token ids of each request, by kind."""
    shape = SHAPES[device]
    drawn = prompts(device)
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    kinds = {
        "greedy": [SamplingParams(temperature=0, **common)] * len(drawn),
        "sampled": [SamplingParams(seed=i, **common) for i in range(len(drawn))],
        "filtered": [SamplingParams(seed=i, top_p=0.9, **common) for i in range(len(drawn))],
    }
    values_per_token = 2 * shape["num_hidden_layers"] * shape["head_dim"]
    values_per_token *= shape["num_key_value_heads"] // ranks
    llm = LLM(
        folder,
        device=device,
        dtype=dtype,
        tensor_parallel_size=ranks,
        max_num_seqs=16,
        max_num_batched_tokens=500,
        kv_cache_bytes=KV_CACHE_TOKENS * values_per_token * BYTES[dtype],
    )
    record_graphs(llm)
    outputs = {
        kind: [each["token_ids"] for each in llm.generate(drawn, params, use_tqdm=False)]
        for kind, params in kinds.items()
    }
    preemptions = llm.stats().num_preemptions
    report("tp_parity_run", ranks=ranks, dtype=dtype, preemptions=preemptions)
    (folder / "outputs.json").write_text(json.dumps(outputs))
    llm.close()


def prompts(device: str) -> list[list[int]]:
    """Mixed lengths, every third with a prefix of 200 tokens."""
    rng = random.Random(3)
    largest = SHAPES[device]["vocab_size"] - 3
    shared = [rng.randrange(3, largest) for _ in range(200)]
    return [
        (shared if i % 3 == 0 else [])
        + [rng.randrange(3, largest) for _ in range(rng.randint(1, 300))]
        for i in range(24)
    ]


def ties(folder: Path, device: str, outputs: list[list[int]]) -> dict[str, Any]:
    """How far tokens are behind the likeliest of a float32 model that is given those before."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    worst, count = 0.0, 0
    for prompt, output in zip(prompts(device), outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output], device=device)).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
        behind = (logits.amax(1) - chosen) / logits.std()
        worst = max(worst, float(behind.max()))
        count += int((behind > 0).sum())
    tokens = sum(map(len, outputs))
    return {"good": worst < TIE, "worst_std": worst, "not_largest": count, "tokens": tokens}


if __name__ == "__main__":
    main()
