"""EngineConfig: values out of range or of a wrong type name themselves, as flags and keywords."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.engine import LLM
from millstream.engine.config import EngineConfig, add_arguments, from_arguments
from millstream.rpc.parsing import Parser


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": 8},
        {"device": "tpu"},
        {"load_format": None},
        {"max_num_seqs": 0},
        {"max_num_seqs": "8"},
        {"max_num_seqs": 8.0},
        {"max_num_seqs": True},
        {"max_num_seqs": 10**9},  # an array of so many slots
        {"max_num_batched_tokens": 0},
        {"max_model_len": 1},
        {"block_size": 0},
        {"kv_cache_bytes": 0},
        {"threads": 0},
        {"threads": 10**6},  # torch dies of a segmentation fault
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.01},
        {"gpu_memory_utilization": float("nan")},
        {"prefix_caching": "no"},
        {"prefix_caching": 1},
        {"max_queued_requests": -1},
        {"step_timeout_s": 0},
        {"seed": -1},
        {"seed": 2**70},
        {"runner": 3},
        {"served_model_name": 3},
    ],
)
def test_bad_settings_name_themselves(options: dict[str, Any]) -> None:
    match = f"^{next(iter(options))}: "
    with pytest.raises(ValueError, match=match):
        EngineConfig(**options)
    with pytest.raises(ValueError, match=match):
        LLM("/no/such/model", **options)


def test_flags_have_the_same_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="prog")
    add_arguments(parser)
    assert from_arguments(parser.parse_args([])) == EngineConfig()
    bad = ("--max-num-seqs=0", "--threads=1000000", "--step-timeout-s=nan", "--block-size=x")
    for flag in bad:
        with pytest.raises(SystemExit):
            parser.parse_args([flag])
        said = capsys.readouterr().err
        assert said.startswith(f"prog: error: argument {flag.partition('=')[0]}: ")
        assert said.count("\n") == 1
