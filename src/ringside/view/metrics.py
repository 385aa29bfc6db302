"""A run's figures as Prometheus metrics: base units, and never more labels than a bounded number of ranks and kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ringside.monitor.alerts import Alert, as_text
from ringside.monitor.alerts_tally import RANK_FIELDS, STEP_BUCKETS_S, Figures
from ringside.monitor.excess import Floats
from ringside.view.top_plain import printable_lines

RANKS_SHOWN = 256
"""Up to so many ranks, each has its own series."""

WORST_SHOWN = 16
"""Of more ranks, those with the most own time over the last steps have."""

STATISTICS = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
LABEL_CHARACTERS = 128

WHAT = {
    "own_seconds": "own work: the steps without the time blocked on others",
    "wait_seconds": "waiting for the last rank to arrive at the synchronisation",
    "exposed_seconds": "blocked in gradient synchronisation after backward had no work left",
}


class RunMetrics(Collector):
    """One scrape of one run.

    Args:
        figures: The aggregate as it is now.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, always in the same order."""
        figures = self._figures
        yield from _run(figures)
        yield from _steps(figures)
        yield from _ranks(figures)
        yield from _verdicts(figures)
        yield from _monitor(figures)


def render(figures: Figures, accept: str = "") -> tuple[bytes, str]:
    """Return the page `/metrics` and its content type, in the format that the header `Accept` prefers."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(figures))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def _run(figures: Figures) -> Iterator[Metric]:
    info = figures.info
    labels = {
        "run": info.name,
        "engine": info.engine,
        "algorithm": info.algorithm,
        "version": info.versions.get("ringside", ""),
    }
    family = GaugeMetricFamily("ringside_run_info", "The run; always 1.", labels=list(labels))
    family.add_metric([_label(value) for value in labels.values()], 1)
    yield family
    yield _gauge("ringside_run_start_time_seconds", "When the run began, seconds since 1970.", info.started_unix)
    yield _gauge("ringside_ranks", "Ranks of the job.", info.world_size)


def _steps(figures: Figures) -> Iterator[Metric]:
    yield _counter("ringside_steps", "Training steps completed.", figures.steps)
    edges = [*(repr(edge) for edge in STEP_BUCKETS_S), "+Inf"]
    counts = np.cumsum(figures.step_counts)
    yield HistogramMetricFamily(
        "ringside_step_seconds",
        "How long a training step took.",
        buckets=[(edge, float(count)) for edge, count in zip(edges, counts, strict=True)],
        sum_value=figures.step_sum,
    )
    yield _gauge(
        "ringside_last_step_timestamp_seconds",
        "When the newest step was completed, seconds since 1970.",
        figures.last_step_unix,
    )
    sums = figures.job_totals
    yield _counter("ringside_payload_bytes", "Gradient bytes synchronised, over all ranks.", sums["payload_bytes"])
    yield _counter("ringside_samples", "Samples (or tokens) worked on, over all ranks.", sums["samples"])


def _ranks(figures: Figures) -> Iterator[Metric]:
    shown = ranks_shown(figures.rank_recent["own_seconds"])
    for field in RANK_FIELDS:
        totals = figures.rank_totals[field]
        family = CounterMetricFamily(f"ringside_rank_{field}", f"A rank's seconds of {WHAT[field]}.", labels=["rank"])
        for rank in shown:
            family.add_metric([str(rank)], float(totals[rank]))
        yield family
    for field in RANK_FIELDS:
        yield _statistics(field, figures.rank_recent[field])


def ranks_shown(own: Floats) -> list[int]:
    """Return the ranks that have series of their own, ascending.

    Args:
        own: Mean own seconds over the last steps, [ranks]; NaN = unknown.
    """
    if len(own) <= RANKS_SHOWN:
        return list(range(len(own)))
    worst = np.argsort(-np.nan_to_num(own), kind="stable")[:WORST_SHOWN]
    return sorted(int(rank) for rank in worst)


def _statistics(field: str, recent: Floats) -> Metric:
    family = GaugeMetricFamily(
        f"ringside_recent_{field}",
        f"Seconds per step over the last steps, over all ranks: {WHAT[field]}.",
        labels=["of"],
    )
    known = recent[np.isfinite(recent)]
    for name, quantile in STATISTICS.items() if known.size else ():
        family.add_metric([name], float(np.quantile(known, quantile)))
    return family


def _verdicts(figures: Figures) -> Iterator[Metric]:
    active = GaugeMetricFamily("ringside_verdict_active", "1 while a verdict holds.", labels=["kind", "rank"])
    excess = GaugeMetricFamily(
        "ringside_verdict_excess_ratio",
        "How much longer the culprit's own time was than the others' when the verdict was reached; 0.12 is 12 %.",
        labels=["kind", "rank"],
    )
    for (kind, rank), ratio in sorted(_by_rank(figures.active).items()):
        active.add_metric([kind, rank], 1)
        excess.add_metric([kind, rank], _finite(ratio))
    yield active
    yield excess
    opened = CounterMetricFamily("ringside_verdicts", "Verdicts so far.", labels=["kind"])
    for kind, count in figures.opened.items():
        opened.add_metric([kind], count)
    yield opened
    yield _counter(
        "ringside_cost_rank_seconds",
        "Rank-seconds that the job lost to the culprits of all verdicts.",
        figures.cost_rank_seconds,
    )


def _by_rank(active: Iterable[Alert]) -> dict[tuple[str, str], float]:
    """Return the excess by (kind, rank); a verdict on several ranks counts for each, one on none for rank ""."""
    found: dict[tuple[str, str], float] = {}
    for alert in active:
        for rank in [str(rank) for rank in alert.ranks[:RANKS_SHOWN]] or [""]:
            found[alert.kind, rank] = alert.verdict.excess_ratio
    return dict(sorted(found.items(), key=lambda item: -_finite(item[1]))[:RANKS_SHOWN])


def _monitor(figures: Figures) -> Iterator[Metric]:
    sums = figures.job_totals
    yield _counter(
        "ringside_overhead_seconds", "Ringside's own bookkeeping in steps, over all ranks.", sums["overhead_seconds"]
    )
    yield _counter("ringside_rank_step_seconds", "Durations of steps, over all ranks.", sums["step_seconds"])
    yield _gauge(
        "ringside_collector_lag_seconds",
        "End of the newest completed step on rank 0 until the collector had it.",
        figures.lag_seconds,
    )
    yield _gauge("ringside_collector_lag_steps", "Newest step reported minus newest step completed.", figures.lag_steps)
    yield _counter("ringside_records", "Step records taken in.", figures.records)
    dropped = CounterMetricFamily(
        "ringside_records_dropped",
        "Step records that no analysis saw: late, of ranks that do not exist, or never come.",
        labels=["reason"],
    )
    for reason in ("late", "invalid", "missing"):
        dropped.add_metric([reason], getattr(figures, reason))
    yield dropped
    told = CounterMetricFamily("ringside_notifications", "Alerts by what became of them.", labels=["hook", "outcome"])
    for (hook, outcome), count in sorted(figures.notifications.items()):
        told.add_metric([hook, outcome], count)
    yield told


def _gauge(name: str, words: str, value: float) -> Metric:
    """A gauge without labels; one whose value is not known has no sample."""
    family = GaugeMetricFamily(name, words)
    if math.isfinite(value):
        family.add_metric([], value)
    return family


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _label(value: str) -> str:
    """Text of somebody else's as a label: of bounded length and fit for a terminal; prometheus_client escapes it."""
    return printable_lines(as_text(value[:LABEL_CHARACTERS]))
