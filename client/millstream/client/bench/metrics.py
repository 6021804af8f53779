"""Figures made of traces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.client.bench.traces import Trace

Figures = dict[str, Any]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A service level: what a request's latencies may be at most, in milliseconds; None: anything.

    A request is good when it was answered and keeps all of them; `itl` is about its mean ITL.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def kept_by(self, trace: Trace) -> bool:
        if trace.failure is not None:
            return False
        limits = ((self.ttft, trace.ttft_s), (self.itl, trace.tpot_s), (self.e2e, trace.e2e_s))
        return all(limit is None or 1000 * value <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Every measured value of a run, in seconds: one a request (TTFT, TPOT, E2E), one a token
    (ITL)."""

    ttft_s: Sequence[float] = ()
    itl_s: Sequence[float] = ()
    tpot_s: Sequence[float] = ()
    e2e_s: Sequence[float] = ()

    def figures(self) -> Figures:
        return {
            "ttft_ms": percentiles_ms(self.ttft_s),
            "itl_ms": percentiles_ms(self.itl_s),
            "tpot_ms": percentiles_ms(self.tpot_s),
            "e2e_ms": percentiles_ms(self.e2e_s),
        }


def answered(traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if trace.failure is None]


def latencies(traces: Sequence[Trace]) -> Latencies:
    """Of the requests that were answered."""
    good = answered(traces)
    return Latencies(
        ttft_s=[trace.ttft_s for trace in good],
        itl_s=[itl for trace in good for itl in trace.itl_s()],
        tpot_s=[trace.tpot_s for trace in good if len(trace.pieces) > 1],
        e2e_s=[trace.e2e_s for trace in good],
    )


def summary(traces: Sequence[Trace], elapsed_s: float, goals: Goals | None = None) -> Figures:
    """Counts, rates and percentiles of one run that took `elapsed_s`."""
    good = answered(traces)
    figures = run_figures(
        latencies(traces),
        elapsed_s=elapsed_s,
        requests=len(traces),
        failed=len(traces) - len(good),
        prompt_tokens=sum(trace.prompt_tokens for trace in good),
        cached_tokens=sum(trace.cached_tokens for trace in good),
        output_tokens=sum(trace.output_tokens for trace in good),
    )
    if goals is not None:
        kept = sum(map(goals.kept_by, traces))
        share = kept / len(traces) if traces else 0.0
        figures["goodput"] = {"requests_per_s": kept / elapsed_s, "share": share}
    return figures


def run_figures(measured: Latencies, *, elapsed_s: float, **counts: int) -> Figures:
    """`counts` have at least requests, failed and output_tokens."""
    answers = counts["requests"] - counts["failed"]
    return {
        "elapsed_s": elapsed_s,
        **counts,
        "output_tokens_per_s": counts["output_tokens"] / elapsed_s,
        "requests_per_s": answers / elapsed_s,
        **measured.figures(),
    }


def percentiles_ms(values_s: Sequence[float]) -> Mapping[str, float]:
    """Nearest-rank percentiles, in milliseconds; empty of no values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    last = len(ordered) - 1
    return {f"p{p}": 1000 * ordered[round(p / 100 * last)] for p in PERCENTILES}
