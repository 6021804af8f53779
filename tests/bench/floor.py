"""What no engine can beat on one H200: bytes and products of the flagship run at measured rates.

    python3 -m tests.bench.floor [--model qwen3-0.6b] [--kv-tb-per-s 4.5] [--weights-tb-per-s 4.3]
                                 [--tflops 790]

Needs no GPU. The KV cache is read once a step. A decode step takes as long as its weights' bytes or
its rows' products, whichever is longer; prompts are products alone. Numbers have 16 bits. One line.
"""

from __future__ import annotations

import argparse
import json

from millstream.client.workload import Workload
from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.shapes import named_shape

_BYTES = 2  # of a number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--kv-tb-per-s", type=float, default=4.5)
    parser.add_argument("--weights-tb-per-s", type=float, default=4.3)
    parser.add_argument("--tflops", type=float, default=790)
    arguments = parser.parse_args()
    shape = named_shape(arguments.model)
    if shape is None:
        parser.error(f"--model: no such shape: {arguments.model}")
    kv_rate = 1e12 * arguments.kv_tb_per_s
    weights_rate = 1e12 * arguments.weights_tb_per_s
    drawn = Workload().draw()
    prompts = [len(ids) for ids in drawn.prompts]
    outputs = [params.max_tokens or 0 for params in drawn.params]
    weights, kv_bytes = _layers(shape) + _head(shape), kv_bytes_per_token(shape)
    kv_s = kv_bytes * _contexts(prompts, outputs) / kv_rate
    products_s = sum(
        max(_BYTES * weights / weights_rate, 2e-12 * weights * rows / arguments.tflops)
        for rows in _rows_by_step(outputs)
    )
    prefill_s = 1e-12 * sum(prompt_flop(shape, length) for length in prompts) / arguments.tflops
    seconds = kv_s + products_s + prefill_s
    token_s = _BYTES * weights / weights_rate
    figures = {
        "seconds": seconds,
        "tokens_per_s": sum(outputs) / seconds,
        "kv_s": kv_s,
        "decode_products_s": products_s,
        "prefill_s": prefill_s,
        "one_sequence_ms_without_context": 1e3 * token_s,
        "one_sequence_ms_at_1k": 1e3 * (token_s + 1024 * kv_bytes / kv_rate),
    }
    print(json.dumps({name: float(f"{figure:.4g}") for name, figure in figures.items()}))


def kv_bytes_per_token(shape: ModelConfig) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _BYTES


def prompt_flop(shape: ModelConfig, length: int) -> float:
    """Of the layers for all tokens, causal attention, and the LM head for the last one."""
    attention = 2.0 * shape.num_heads * shape.head_dim * length * (length + 1)
    return 2.0 * (_layers(shape) * length + _head(shape)) + shape.num_layers * attention


def _layers(shape: ModelConfig) -> int:
    return shape.num_layers * sum(size * depth for size, depth in shape.layer_products.values())


def _head(shape: ModelConfig) -> int:
    return shape.hidden_size * shape.vocab_size


def _rows_by_step(outputs: list[int]) -> list[int]:
    """How many sequences decode in each step behind the prompts', which give the first tokens."""
    return [sum(output > step for output in outputs) for step in range(1, max(outputs))]


def _contexts(prompts: list[int], outputs: list[int]) -> int:
    """The tokens that decoding reads, over all steps."""
    return sum(
        sum(range(prompt + 1, prompt + output))
        for prompt, output in zip(prompts, outputs, strict=True)
    )


if __name__ == "__main__":
    main()
