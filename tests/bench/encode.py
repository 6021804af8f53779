"""Encode throughput through gRPC against the bare `tokenizers` library, side by side.

    python -m tests.bench.encode [--model DIR] [--texts 300] [--threads 2] [--in-flight 2]

A plain Python client of `millstream-tokenizer` with some batches in flight (a service takes the
next while an answer is on its way) against encode_batch_fast in this process, both with the same
number of threads; texts in, lists of ids out; each run has texts of its own and arms alternate. The
ratio is the median over runs of bare / grpc time: pairs that ran next to each other, so that a
change in the machine's load hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from typing import Any

import grpc

from millstream.rpc.options import channel_options
from millstream.v1.tokenizer_pb2 import EncodeInput, EncodeRequest
from millstream.v1.tokenizer_pb2_grpc import TokenizerStub

_BATCHES = 4  # a run

Encode = Callable[[list[str]], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with a tokenizer.json; default: the embedded model")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--bytes", type=int, default=1024, help="of each text, about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=2, help="batches at once, through gRPC")
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)  # before `tokenizers` starts its pool

    from millstream import hub

    model = str(hub.resolve(arguments.model))
    bare = _bare(model)
    process, through_grpc = _serve(model, arguments.threads)
    try:
        result = _compare(bare, through_grpc, arguments)
    finally:
        process.terminate()
        process.wait()
    print(json.dumps(result))


def _compare(bare: Encode, through_grpc: Encode, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {"bare": [], "grpc": []}
    token_count = 0
    for number in range(arguments.runs + 2):
        batches = [_texts(rng, arguments.texts, arguments.bytes) for _ in range(_BATCHES)]
        arms = [("bare", bare, 1), ("grpc", through_grpc, arguments.in_flight)]
        answers = []
        for name, encode, in_flight in arms if number % 2 else arms[::-1]:
            with ThreadPoolExecutor(in_flight) as callers:
                started = time.perf_counter()
                answers.append(list(callers.map(encode, batches)))
                elapsed = time.perf_counter() - started
            if number >= 2:  # the first two warm up
                seconds[name].append(elapsed / _BATCHES)
        assert answers[0] == answers[1]
        token_count = sum(len(ids) for ids in answers[0][0])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [bare / grpc for bare, grpc in zip(seconds["bare"], seconds["grpc"], strict=True)]
    return {
        "threads": arguments.threads,
        "in_flight": arguments.in_flight,
        "texts": arguments.texts,
        "tokens": token_count,
        "bare_ms": round(medians["bare"] * 1e3, 2),
        "grpc_ms": round(medians["grpc"] * 1e3, 2),
        "grpc_tokens_per_s": round(token_count / medians["grpc"]),
        "ratio_of_best": round(min(seconds["bare"]) / min(seconds["grpc"]), 3),
        "ratio": round(statistics.median(ratios), 3),
    }


def _texts(rng: random.Random, count: int, size: int) -> list[str]:
    prose = "\n".join(topics.values())  # Python's own manual: 700 kB of English
    starts = [rng.randrange(len(prose) - size) for _ in range(count)]
    return [prose[start : start + size] for start in starts]


def _bare(model: str) -> Encode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def _serve(model: str, threads: int) -> tuple[subprocess.Popen[bytes], Encode]:
    control, theirs = socket.socketpair()
    command = [sys.executable, "-m", "millstream.tokenizer", "--model", model, "--port", "0"]
    command += ["--threads", str(threads), "--control-fd", str(theirs.fileno())]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"], pass_fds=[theirs.fileno()], start_new_session=True
    )
    theirs.close()
    target = f"127.0.0.1:{json.loads(control.makefile().readline())['port']}"
    stub = TokenizerStub(grpc.insecure_channel(target, options=channel_options(target)))

    def encode(texts: list[str]) -> list[list[int]]:
        _ = control  # the service ends with it
        request = EncodeRequest(inputs=[EncodeInput(text=text) for text in texts])
        return [list(sequence.token_ids) for sequence in stub.Encode(request).sequences]

    return process, encode


if __name__ == "__main__":
    main()
