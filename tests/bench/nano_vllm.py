"""nano-vllm on the flagship workload, beside us: one JSON line for each run.

    python3 -m tests.bench.nano_vllm [--runs 3] [--turns 0]

Needs nano-vllm (https://github.com/GeeeekExplorer/nano-vllm) and flash-attn on PYTHONPATH. Its
weights are random, nothing is turned into text; the second run counts. --turns: so many times our
flagship run (tests.bench.engine_gpu) and then nano-vllm's, each in a process of its own, both with
steps of up to 16,384 tokens, and the ratio of the second runs' medians: cards and their neighbours
change from minute to minute.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.bench.json_lines import report

from millstream.client.workload import Workload
from millstream.engine.model_files.shapes import config_json

# nano-vllm's own default: a step of each takes as many tokens.
_SAME_STEPS = ("--max-num-batched-tokens", "16384")
# What transformers wants beside what tells the shape.
CONFIG = {
    **config_json("qwen3-0.6b"),
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}


class NoTokenizer:
    """Stands in for the model's: prompts are token ids, and answers stay such."""

    eos_token_id = -1

    def decode(self, token_ids: list[int]) -> str:
        return ""


def fill_at_random(model: torch.nn.Module, path: str) -> None:
    """In place of loading the weights."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)


def load(folder: Path) -> Any:
    """nano-vllm's LLM."""
    transformers = importlib.import_module("transformers")
    transformers.AutoTokenizer.from_pretrained = lambda *arguments, **options: NoTokenizer()
    importlib.import_module("nanovllm.engine.model_runner").load_model = fill_at_random
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return importlib.import_module("nanovllm").LLM(str(folder), max_model_len=4096)


def run_nano(runs: int) -> None:
    sampling_params = importlib.import_module("nanovllm").SamplingParams
    drawn = Workload().draw()
    with tempfile.TemporaryDirectory() as folder:
        llm = load(Path(folder))
        for run in range(1, runs + 1):
            requests = drawn.shifted(7 * run, CONFIG["vocab_size"])
            params = [
                sampling_params(temperature=0.6, ignore_eos=True, max_tokens=each.max_tokens)
                for each in requests.params
            ]
            started = time.perf_counter()
            outputs = llm.generate(requests.prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            tokens = sum(len(output["token_ids"]) for output in outputs)
            assert tokens == requests.output_tokens
            report("nano_vllm", run=run, tokens_per_s=round(tokens / seconds, 1))


def in_turns(turns: int, runs: int) -> None:
    modules = {
        "flagship": ("tests.bench.engine_gpu", "--only", "flagship", *_SAME_STEPS),
        "nano_vllm": ("tests.bench.nano_vllm",),
    }
    second_runs: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(turns):
        for name, module in modules.items():
            command = [sys.executable, "-m", *module, "--runs", str(runs)]
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for line in lines.splitlines():
                figures = json.loads(line) if line.startswith("{") else {}
                if figures.get("bench") == name:
                    print(line, flush=True)
                    if figures["run"] == 2:
                        second_runs[name].append(figures["tokens_per_s"])
    ours, theirs = (statistics.median(second_runs[name]) for name in modules)
    report("ratio", ours=ours, nano_vllm=theirs, ratio=round(ours / theirs, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.turns:
        in_turns(arguments.turns, max(arguments.runs, 2))
    else:
        run_nano(arguments.runs)


if __name__ == "__main__":
    main()
