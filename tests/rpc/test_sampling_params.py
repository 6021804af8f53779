"""SamplingParams to protobuf and back: nothing is lost, and numbers look as they were written."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import fields
from typing import Any

import pytest

from millstream.rpc.sampling_params import SamplingParams, from_proto, to_proto
from millstream.v1 import engine_pb2

TEXT_FIELDS = {"stop", "include_stop", "skip_special_tokens"}  # not the engine's
VALUES: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": -1.1,
    "frequency_penalty": 1e-7,
    "repetition_penalty": 1.05,
    "seed": 2**64 - 1,
    "max_tokens": 0,
    "min_tokens": 3,
    "stop_token_ids": [3, 1],
    "ignore_eos": False,
    "n": 2,
    "logit_bias": {5: -0.1, 7: 100.0},
    "allowed_token_ids": [9],
    "bad_words": [[1, 2], [3]],
    "logprobs": 0,
    "prompt_logprobs": 5,
    "json_schema": "{}",
    "json_object": True,
    "regex": "a",
    "choice": ["x", "y"],
    "grammar": "root",
}


@pytest.mark.parametrize(
    "name", [field.name for field in fields(SamplingParams) if field.name not in TEXT_FIELDS]
)
def test_each_field_comes_back_as_it_was_written(name: str) -> None:
    back = from_proto(to_proto(SamplingParams(**{name: VALUES[name]})))
    assert getattr(back, name) == VALUES[name]
    assert to_proto(back) == to_proto(SamplingParams(**{name: VALUES[name]}))


def test_unset_stays_unset() -> None:
    back = from_proto(engine_pb2.SamplingParams())
    assert to_proto(back) == engine_pb2.SamplingParams()


def test_a_float32_that_nobody_wrote_stays_itself() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        (value,) = struct.unpack("f", rng.randbytes(4))
        if math.isfinite(value):
            message = engine_pb2.SamplingParams(temperature=value)
            assert to_proto(from_proto(message)) == message
