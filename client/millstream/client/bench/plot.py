"""Draws runs: the distribution of each latency, and rates against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.client.bench.metrics import Goals, Latencies
from millstream.client.bench.runs import Run
from millstream.client.processes import LaunchError

SUFFIXES = (".png", ".svg")
_LATENCIES = ("ttft", "itl", "e2e")


def new_figure() -> Any:
    """An empty matplotlib figure. Raises LaunchError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LaunchError(
            f"a plot needs {error.name}, which the bare client does without: "
            "pip install 'millstream[bench]'"
        ) from None
    return Figure(figsize=(12, 8), layout="constrained")


def draw(figure: Any, runs: Sequence[Run], title: str, goals: Goals | None) -> None:
    """A panel for TTFT, ITL and E2E each: the share of values up to a number of milliseconds; and
    one of throughput and goodput."""
    from matplotlib.ticker import LogFormatter

    figure.suptitle(title)
    panels = figure.subplots(2, 2).flat
    for panel, name in zip(panels, _LATENCIES, strict=False):
        for run in runs:
            _draw_shares(panel, _values_s(run.latencies, name), run.name)
        limit = getattr(goals, name) if goals is not None else None
        if limit is not None:
            panel.axvline(limit, color="black", linestyle=":", label="goal")
        panel.set(xlabel=f"{name.upper()}, ms", ylabel="share of values", xscale="log")
        panel.xaxis.set_major_formatter(LogFormatter())  # plain numbers
        panel.xaxis.set_minor_formatter(LogFormatter())
        panel.set_ylim(0, 1)
        panel.grid(visible=True, alpha=0.3)
        if panel.lines:
            panel.legend()
    _draw_rates(panels[len(_LATENCIES)], runs)


def save(figure: Any, file: Path) -> None:
    """PNG or SVG, as the file's suffix says."""
    figure.savefig(file, format=file.suffix.lower().removeprefix("."), dpi=120)


def _values_s(latencies: Latencies, name: str) -> Sequence[float]:
    values: Sequence[float] = getattr(latencies, f"{name}_s")
    return values


def _draw_shares(panel: Any, values_s: Sequence[float], name: str) -> None:
    if values_s:
        ordered = sorted(1000 * value for value in values_s)
        panel.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)


def _draw_rates(panel: Any, runs: Sequence[Run]) -> None:
    """Bars of what was reached in each run; of goodput, where goals were set."""
    names = [run.name for run in runs]
    places = range(len(runs))
    with_goals = all("goodput" in run.figures for run in runs)
    if with_goals:
        reached = [run.figures["requests_per_s"] for run in runs]
        good = [run.figures["goodput"]["requests_per_s"] for run in runs]
        panel.bar([place - 0.2 for place in places], reached, width=0.4, label="answered")
        panel.bar([place + 0.2 for place in places], good, width=0.4, label="within the goals")
        panel.set_ylabel("requests/s")
        panel.legend()
    else:
        panel.bar(places, [run.figures["output_tokens_per_s"] for run in runs], width=0.6)
        panel.set_ylabel("output tokens/s")
    panel.set_xticks(places, names, rotation=20)
