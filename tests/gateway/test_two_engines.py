"""The gateway in front of two engines: prefixes go where they are cached, and one may die."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.engine_processes import EngineProcess, Stream, connect, submission
from tests.gateway.conftest import MODEL, default_engines
from tests.gateway.processes import Gateway, gateway
from tests.gateway.test_openai import stats

from millstream.tokenizer.codec import Codec

pytestmark = [pytest.mark.gateway, pytest.mark.timeout(300)]

STORIES = [
    "Once there was a miller who had three sons, his mill, a donkey and a tom cat. ",
    "In a village by the sea lived an old fisherman, who went out with his boat each day. ",
    "The king of a far country had a daughter, and nobody had ever heard her laugh aloud. ",
]
ROUNDS = 4


def complete(started: Gateway, prompt: str) -> str:
    done = started.client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=2
    )
    return done.choices[0].text


def test_prompts_with_one_beginning_go_to_one_engine(
    engines: Sequence[EngineProcess], tmp_path: Path
) -> None:
    """Seen in the engines' own counters: of each prompt but a family's first, the whole common
    part came from the prefix cache. (In turns, each of three families would visit both engines.)"""
    with gateway([server.target for server in engines], MODEL, tmp_path / "log", "--policy",
                 "cache_aware") as started:  # fmt: skip
        before = [stats(server) for server in engines]
        for number in range(ROUNDS):
            for story in STORIES:
                complete(started, story * 8 + f"Chapter {number}.")
        after = [stats(server) for server in engines]
    hits = [b.prefix_cache_hits - a.prefix_cache_hits for a, b in zip(before, after, strict=True)]
    queries = [
        b.prefix_cache_queries - a.prefix_cache_queries for a, b in zip(before, after, strict=True)
    ]
    share = sum(hits) / sum(queries)
    assert share > 0.9 * (ROUNDS - 1) / ROUNDS, (hits, queries)


def test_a_new_gateway_learns_what_is_cached_where(
    engines: Sequence[EngineProcess], default_model_dir: Path, tmp_path: Path
) -> None:
    """Each engine computes a prompt that the gateway never sees; then a gateway starts, subscribes
    to their KV events, and sends each continuation to the engine that has its beginning."""
    codec = Codec.load(default_model_dir)
    prompts = [f"Number {number} of the tales. " + STORIES[0] * 8 for number in range(4)]
    (*token_ids,) = codec.encode_batch(prompts, add_special_tokens=True)

    async def warm(server: EngineProcess, prompt: list[int]) -> None:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, prompt, max_tokens=1))
            await stream.until_ended(1, timeout_s=60)
            stream.call.cancel()

    for number, prompt in enumerate(token_ids):
        asyncio.run(warm(engines[number % 2], prompt))
    with gateway([server.target for server in engines], MODEL, tmp_path / "log", "--policy",
                 "cache_aware") as started:  # fmt: skip
        for number in (0, 2, 1, 3):  # not in turns
            server = engines[number % 2]
            before = stats(server)
            complete(started, prompts[number] + "The end.")
            after = stats(server)
            cached = after.prefix_cache_hits - before.prefix_cache_hits
            assert cached > 0.8 * len(token_ids[number]), f"prompt {number} went elsewhere"


def test_a_gateway_elsewhere_takes_the_tokenizer_from_the_engine(
    engines: Sequence[EngineProcess], default_model_dir: Path, tmp_path: Path
) -> None:
    """Elsewhere: in a mount namespace of its own, where the model's folder is empty."""
    hide = f"mount -t tmpfs none {shlex.quote(str(default_model_dir))}"
    probe = ["unshare", "--mount", "--map-root-user", "sh", "-c", hide]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces here")
    wrapper = [*probe[:-1], f'{hide} && exec "$@"', "sh"]
    log = tmp_path / "log"
    with gateway([engines[0].target], MODEL, log, wrapper=wrapper) as started:
        assert complete(started, "The capital of France is") == " Paris."
    assert "Fetching tokenizer from worker" in log.read_text()


def test_an_engine_is_killed(default_model_dir: Path, tmp_path: Path) -> None:
    """A stream from it ends with an error. A call that waits for it is answered by the other one,
    and so is everything afterwards."""
    with default_engines(default_model_dir, 2) as mortals:
        targets = [server.target for server in mortals]
        flags = ["--policy", "round_robin", "--health-check-interval-secs", "1"]
        with (
            gateway(targets, MODEL, tmp_path / "log", *flags) as started,
            ThreadPoolExecutor(2) as pool,
        ):
            streams = [_story(started, stream=True) for _ in mortals]
            for stream in streams:
                next(iter(stream))
            calls = [pool.submit(_story, started, stream=False) for _ in mortals]
            while [stats(server).num_requests_running for server in mortals] != [2, 2]:
                time.sleep(0.02)
            for pid in (mortals[0].process.pid, mortals[0].core_pid()):
                os.kill(pid, signal.SIGKILL)
            assert sorted(_outcome(stream) for stream in streams) == ["broken", "whole"]
            assert [call.result().choices[0].finish_reason for call in calls] == ["length"] * 2
            for number in range(6):
                assert complete(started, f"The capital of France is ({number})")
            # The gateway's own first request, a stream, two calls and six prompts.
            assert stats(mortals[1]).requests_finished >= 9


def _story(started: Gateway, *, stream: bool) -> Any:
    return started.client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=1, max_tokens=60, seed=1, stream=stream
    )


def _outcome(stream: openai.Stream[openai.types.Completion]) -> str:
    try:
        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
    except openai.OpenAIError:
        return "broken"
    return "whole" if reasons and reasons[-1] in ("stop", "length") else "broken"
