"""Structured output of the real default model through both services; tests/bench/structured.py is
the long run of the same."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
from tests.structured_schemas import ORDER, ORDER_MAX_TOKENS, ORDER_PROMPT

from millstream.client import Client, FinishReason, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = [{"role": "user", "content": ORDER_PROMPT}]


def test_random_temperatures_validate_beside_one_that_is_free(default_client: Client) -> None:
    rng = random.Random(5)
    params = [
        SamplingParams(
            json_schema=ORDER,
            temperature=rng.uniform(0, 2),
            seed=seed,
            max_tokens=ORDER_MAX_TOKENS,
        )
        for seed in range(30)
    ]
    free = SamplingParams(temperature=0, max_tokens=32)
    *outputs, beside = default_client.chat([ASK] * 30 + [QUESTION], [*params, free])
    for output in outputs:
        jsonschema.validate(json.loads(output.text), ORDER)
        assert output.finish_reason is FinishReason.STOP
        compact = json.dumps(json.loads(output.text), separators=(",", ":"), ensure_ascii=False)
        assert "\\" in output.text or output.text == compact, "whitespace"
    assert len({output.text for output in outputs}) >= 25
    assert beside.text == "The capital of France is Paris."


def test_the_other_kinds(default_client: Client) -> None:
    def answer(**params: object) -> str:
        limits = SamplingParams(temperature=0, max_tokens=40, **params)  # type: ignore[arg-type]
        return default_client.generate("The capital of France is", limits).text

    assert answer(choice=[" Lyon", " Paris", " Marseille"]) == " Paris"
    assert re.fullmatch(r"[A-Z]{3,8}", answer(regex="[A-Z]{3,8}"))
    assert answer(grammar='root ::= (" Lyon" | " Paris") "!"') == " Paris!"
    assert isinstance(json.loads(answer(json_object=True, min_tokens=4)), dict)
    assert answer(choice=["日本 – é"]) == "日本 – é"


def test_a_stop_string_ends_it_too(default_client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "x, y"}}, "required": ["a"]}
    params = SamplingParams(json_schema=schema, stop=", ", max_tokens=40)
    output = default_client.chat(QUESTION, params)
    assert (output.text, output.stop_reason) == ('{"a":"x', ", ")
    streamed = list(default_client.chat_stream(QUESTION, params))
    assert "".join(delta.text for delta in streamed) == '{"a":"x'


def test_from_the_command_line(default_client: Client, tmp_path: Path) -> None:
    (tmp_path / "city.json").write_text('{"enum": ["Lyon", "Paris"]}')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "millstream.client", "generate", "The capital of France?"),
            *("--json-schema", str(tmp_path / "city.json"), "--temperature", "0"),
            *("--engine", default_client.engine_target or ""),
            *("--tokenizer", default_client.tokenizer_target or ""),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in ('"Lyon"\n', '"Paris"\n')
