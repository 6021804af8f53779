"""The benchmark's workload and what is made of its measurements."""

from __future__ import annotations

import pytest

from millstream.client.bench import latencies, percentiles_ms, step_latencies
from millstream.client.workload import Workload
from millstream.v1 import engine_pb2


def test_the_flagship_workload_is_the_documented_one() -> None:
    requests = Workload().draw()
    assert len(requests.prompts) == 256
    assert requests.prompt_tokens == 142_827
    assert requests.output_tokens == 133_966
    assert {params.temperature for params in requests.params} == {0.6}
    assert all(params.ignore_eos for params in requests.params)


def test_runs_share_no_prefix() -> None:
    requests = Workload(num_requests=3).draw()
    shifted = requests.shifted(1, 50)
    assert [len(ids) for ids in shifted.prompts] == [len(ids) for ids in requests.prompts]
    assert shifted.prompts[0][0] == (requests.prompts[0][0] + 1) % 50
    assert shifted.params == requests.params


def test_latencies_of_arrivals() -> None:
    step = engine_pb2.StepOutput
    arrivals = [
        (11.0, step(handles=[1, 2], token_ids=[5, 5])),
        (11.5, step(handles=[1], token_ids=[5])),
        (12.5, step(handles=[1, 2], token_ids=[5] * 5, counts=[2, 3])),
    ]
    ttft_s, itl_s = latencies(10.0, arrivals)
    assert ttft_s == [1.0, 1.0]
    assert itl_s == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_latencies_of_steps() -> None:
    steps = [(1.0, 2, 0), (1.5, 3, 1), (2.5, 2, 2)]  # when, tokens, ended
    ttft_s, itl_s = step_latencies(0.0, steps)
    assert ttft_s == [1.0, 1.0, 1.5]
    assert itl_s == [0.5, 0.5, 1.0, 1.0]


def test_percentiles() -> None:
    assert percentiles_ms([]) == {}
    assert percentiles_ms([0.001 * i for i in range(101)]) == pytest.approx(
        {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    )
