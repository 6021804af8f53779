"""What a benchmark says: a line a run, and a JSON document of everything."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.client.bench.metrics import Goals
from millstream.client.bench.runs import Run
from millstream.client.bench.targets import Target
from millstream.client.workload import Workload
from millstream.rpc.version import millstream_version

_SHOWN = ("ttft", "itl", "tpot", "e2e")


@dataclass(slots=True, kw_only=True)
class Results:
    """What a benchmark has come to so far."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # what it says of itself
    runs: list[Run] = field(default_factory=list)
    has_ended: bool = False  # by itself

    @property
    def measured(self) -> list[Run]:
        return [run for run in self.runs if run.measured]

    @property
    def complete(self) -> bool:
        """Whether all that was asked for was sent."""
        return self.has_ended and all(run.ended_early is None for run in self.runs)


def line(run: Run) -> str:
    figures = run.figures
    failed = f", {figures['failed']} failed" if figures["failed"] else ""
    goodput = ""
    if "goodput" in figures:
        good = figures["goodput"]
        goodput = f", goodput {good['requests_per_s']:.2f} requests/s ({good['share']:.0%})"
    latencies = "".join(
        f", {name.upper()} " + "/".join(f"{value:.2f}" for value in values.values())
        for name in _SHOWN
        if (values := figures[f"{name}_ms"])
    )
    return (
        f"{run.name}: {figures['output_tokens_per_s']:,.0f} output tokens/s "
        f"({figures['requests']} requests, {figures['prompt_tokens']:,} + "
        f"{figures['output_tokens']:,} tokens in {figures['elapsed_s']:.2f} s"
        f"{failed}){goodput}{latencies}" + (" ms (p50/p90/p99)" if latencies else "")
    )


def failures(runs: Sequence[Run]) -> str | None:
    """What to say of requests that failed, in one line; None if none did."""
    failed = [run for run in runs if run.errors]
    if not failed:
        return None
    first = failed[0]
    count = sum(len(run.errors) for run in failed)
    total = sum(run.figures["requests"] for run in runs)
    which = "" if first.measured else f" (of the {first.name})"
    said = f"{count} of {total} requests failed, the first one{which} with: {first.errors[0]}"
    if (last := failed[-1].ended_early) is not None:
        said += "; ended early, as nothing answers any more"
        said += f": {last}" if last != first.errors[0] else ""
    return " ".join(said.split())


def document(
    bench: str,
    target: Target,
    workload: Workload,
    results: Results,
    *,
    in_process: bool,
    goals: Goals | None,
) -> dict[str, Any]:
    """Every setting and figure; plain JSON values."""
    return {
        "bench": bench,
        "mode": "in-process" if in_process else "grpc",
        **dataclasses.asdict(target),
        "workload": dataclasses.asdict(workload),
        "goals_ms": None if goals is None else dataclasses.asdict(goals),
        "engine_info": dict(results.engine),
        "client": {
            "millstream": millstream_version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "complete": results.complete,
        "runs": [
            {
                "name": run.name,
                **run.figures,
                "errors": list(run.errors),
                "ended_early": run.ended_early,
            }
            for run in results.measured
        ],
    }
