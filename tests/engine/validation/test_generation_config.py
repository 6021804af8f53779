"""Sampling defaults from generation_config.json: what is taken, what wins, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.engine.model_files.config_values import ModelConfigError
from millstream.engine.plan import RunnerInfo
from millstream.engine.request import Sampling
from millstream.engine.validation.generation_config import sampling_defaults
from millstream.engine.validation.submissions import to_requests
from millstream.v1 import engine_pb2

INFO = RunnerInfo(
    vocab_size=100,
    eos_token_ids=(2,),
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    block_size=4,
    num_blocks=32,
)
# As Qwen3 has it.
QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def written(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def resolved(defaults: engine_pb2.SamplingParams, **asked: Any) -> Sampling:
    submission = engine_pb2.Submission(
        token_ids=[1], sampling=engine_pb2.SamplingParams(seed=1, max_tokens=4, **asked)
    )
    (request,) = to_requests(submission, key=0, info=INFO, random_seed=0, defaults=defaults)
    return request.sampling


def test_the_file_sets_what_the_request_does_not(tmp_path: Path) -> None:
    defaults = sampling_defaults("auto", written(tmp_path, **QWEN3, min_p=0.05))
    got = resolved(defaults)
    assert got.temperature == pytest.approx(0.6)
    assert (got.top_k, got.top_p) == (20, pytest.approx(0.95))
    assert got.min_p == pytest.approx(0.05)
    assert not got.stop_token_ids, "EOS ids are the model's, not the request's"


@pytest.mark.parametrize(
    ("name", "neutral"),
    [("temperature", 0.0), ("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)],
)
def test_a_field_that_the_request_sets_wins_zero_too(
    tmp_path: Path, name: str, neutral: float
) -> None:
    defaults = sampling_defaults("auto", written(tmp_path, **QWEN3))
    assert getattr(resolved(defaults, **{name: neutral}), name) == neutral
    others = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    del others[name]
    got = resolved(defaults, **{name: neutral})
    assert {other: pytest.approx(value) for other, value in others.items()} == {
        other: getattr(got, other) for other in others
    }


def test_none_no_file_and_no_folder_leave_the_protocols_defaults(tmp_path: Path) -> None:
    plain = resolved(engine_pb2.SamplingParams())
    assert resolved(sampling_defaults("auto", tmp_path)) == plain
    assert resolved(sampling_defaults("auto", None)) == plain
    folder = written(tmp_path, **QWEN3)
    assert resolved(sampling_defaults("none", folder)) == plain


def test_null_and_unknown_keys_say_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path, temperature=None, do_sample=False, max_new_tokens=7, num_beams=4)
    assert sampling_defaults("auto", folder) == engine_pb2.SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "0.6"),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**40),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e400),
    ],
)
def test_a_value_that_no_request_could_have_is_an_error_at_start(
    tmp_path: Path, name: str, value: Any
) -> None:
    folder = written(tmp_path, **{name: value})
    with pytest.raises(ModelConfigError, match=f"^generation_config.json: {name}.*config none"):
        sampling_defaults("auto", folder)
    sampling_defaults("none", folder)


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not JSON"):
        sampling_defaults("auto", tmp_path)
