"""The benchmark's workload and when its requests come."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from millstream.client.workload import Workload, poisson_arrivals


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


def test_parts() -> None:
    requests = Workload(num_requests=4, input_len=(1, 1)).draw()
    part = requests.part(1, 3)
    assert (part.prompts, part.params) == (requests.prompts[1:3], requests.params[1:3])
    assert part.texts is None


def test_poisson_arrivals() -> None:
    due_s = poisson_arrivals(4.0, 4000, seed=1)
    assert due_s == poisson_arrivals(4.0, 4000, seed=1) != poisson_arrivals(4.0, 4000, seed=2)
    assert (len(due_s), due_s[0], due_s == sorted(due_s)) == (4000, 0.0, True)
    gaps = [after - before for before, after in itertools.pairwise(due_s)]
    # An exponential distribution's mean and standard deviation are the same.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.06)
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]
    assert poisson_arrivals(2.0, 1, seed=0) == [0.0]
