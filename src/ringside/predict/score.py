"""How well predictions meet tables of measurements: hold-out, larger sizes, another scale, no fit at all.

A test row never has a part in its prediction: not in the fit, not in the scale of the band, not in the choice of the
law, which is made from the table's words and counts. Only the row checks of `checks.py` have seen it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from ringside.errors import UsageError
from ringside.predict.laws import mpi
from ringside.predict.laws.bumps import Floats
from ringside.predict.laws.calibrate import Calibration, Prediction, expect, fit, transfer, vague
from ringside.predict.laws.fabric import STRAIGHT, Law
from ringside.predict.laws.knowledge import Knowledge, is_mpi
from ringside.predict.laws.nccl import nccl_constants
from ringside.predict.tables.checks import check_rows
from ringside.predict.tables.table import ALL_REDUCE, BUS_FACTORS, Flag, Table, TableRow

LARGE_BYTES = 1 << 20
FULL_SWEEP = (18, 1 << 15)  # rows, and how many times the smallest size the largest is, of a sweep from end to end
LEAST_HELD = 4  # rows for a hold-out
BASELINES = ("hockney", "interpolation", "nccl_constants")


@dataclass(frozen=True)
class Errors:
    """Errors of predictions, as ratios to the measured time: 0.07 is 7%.

    Args:
        mape: Mean of their absolute values.
        median: Their median.
        bias: Their mean with sign: above 0, the prediction is slow.
        worst_size_bytes: Where the largest is.
        mape_large: Mean from 1 MiB up; None where there is no such row.
    """

    mape: float
    median: float
    bias: float
    worst_size_bytes: int
    mape_large: float | None


@dataclass(frozen=True)
class Score:
    """One table, predicted.

    Args:
        table: As `check_rows` left it.
        mode: `hold-out`, `larger sizes`, `other scale` or `preset`.
        words: What the law was made from.
        fitted: Rows that had a part in the fit.
        scored: The rows that were predicted.
        prediction: Their times and bands; None where the table was refused.
        errors: None where it was refused.
        baselines: By name; None for one that does not apply.
        refused: Why it could not be scored; empty if it was.
    """

    table: Table
    mode: str
    words: str = ""
    fitted: int = 0
    scored: tuple[TableRow, ...] = ()
    prediction: Prediction | None = None
    errors: Errors | None = None
    baselines: Mapping[str, Errors | None] = field(default_factory=dict)
    refused: str = ""

    @property
    def band_coverage(self) -> float | None:
        """Share of the scored rows inside their 95% band."""
        if self.prediction is None:
            return None
        return float(np.mean(self.prediction.covers(measured(self.scored))))

    @property
    def full_sweep(self) -> bool:
        """Whether the table goes from small to large sizes."""
        sizes = _sizes(self.table.rows)
        return len(sizes) >= FULL_SWEEP[0] and float(sizes.max() / sizes.min()) >= FULL_SWEEP[1]


def errors_of(sizes: Floats, times_s: Floats, measured_s: Floats) -> Errors:
    """Return the errors of predicted times, all float64 [n], n ≥ 1."""
    error = times_s / measured_s - 1.0
    size, large = np.abs(error), sizes >= LARGE_BYTES
    worst_size = int(sizes[int(size.argmax())])
    mape_large = float(size[large].mean()) if large.any() else None
    return Errors(float(size.mean()), float(np.median(size)), float(error.mean()), worst_size, mape_large)


# ------------------------------------------------------------------------------------------------ the four ways


def hold_out(table: Table, known: Knowledge, *, others: Sequence[Table] = (), first: int = 0) -> Score:
    """Fit every second row of a checked table and score the rest.

    Args:
        table: Rows by size.
        known: Of its hardware.
        others: Tables of other scales of its cluster, of which all rows may be fitted.
        first: 0: rows 0, 2, 4, ... are fitted; 1: rows 1, 3, 5, ...
    """
    if len(table.rows) < LEAST_HELD:
        return _refused(table, "hold-out", f"{len(table.rows)} usable rows; a hold-out needs {LEAST_HELD}")
    rows, held = table.rows[first::2], table.rows[1 - first :: 2]
    found = moved_law(others, table, known) if others else known.law_or_vague(table)
    return _scored(table, "hold-out", fit(_sizes(rows), measured(rows), found), rows, held, known)


def larger_sizes(table: Table, known: Knowledge, limit_bytes: float) -> Score:
    """Fit the rows up to `limit_bytes` and score those above."""
    small = tuple(row for row in table.rows if row.size_bytes <= limit_bytes)
    large = tuple(row for row in table.rows if row.size_bytes > limit_bytes)
    if len(small) < 2 or not large:
        why = f"{len(small)} usable rows up to {limit_bytes:.0f} bytes and {len(large)} above; 2 and 1 are needed"
        return _refused(table, "larger sizes", why)
    fitted = fit(_sizes(small), measured(small), known.law_or_vague(table))
    return _scored(table, "larger sizes", fitted, small, large, known)


def preset_only(table: Table, known: Knowledge) -> Score:
    """Score all rows without any fit."""
    if not table.rows:
        return _refused(table, "preset", "no usable row")
    found = known.law(table)
    if found is None:
        words = "its text names no known hardware; give --preset NAME"
        if is_mpi(table):
            words = "processes on CPUs: give their point-to-point tables (osu_latency, osu_bw) too, or --preset NAME"
        return _refused(table, "preset", words)
    return _scored(table, "preset", expect(found), (), table.rows, known)


def other_scale(fit_tables: Sequence[Table], test: Table, known: Knowledge) -> Score:
    """Fit tables of one cluster and score one of another scale."""
    usable = [table for table in fit_tables if table.rows and table.collective == test.collective]
    if not usable or not test.rows:
        return _refused(test, "other scale", "no usable rows to fit or to score")
    rows = tuple(row for table in usable for row in table.rows)
    return _scored(test, "other scale", expect(moved_law(usable, test, known)), rows, test.rows, known)


def moved_law(others: Sequence[Table], table: Table, known: Knowledge) -> Law:
    """Return what is expected of a table when tables of other scales of its cluster are known."""
    # The laws of all of them, or where one's is not known vague ones.
    tables = (table, *others)
    laws = [law for table in tables if (law := known.law(table)) is not None]
    if len(laws) < len(tables):
        laws = [vague(table.ranks, noisy=is_mpi(table)) for table in tables]
    there, *theirs = laws
    fitted = [fit(_sizes(t.rows), measured(t.rows), law) for t, law in zip(others, theirs, strict=True)]
    moved = transfer(fitted, there)
    if table.collective in STRAIGHT and any(other.collective != table.collective for other in others):
        return replace(moved, beside=None)  # by other protocols: an all-reduce's bumps are not theirs
    return moved


def _refused(table: Table, mode: str, why: str) -> Score:
    flags = "; ".join(f"line {flag.line}: {flag.reason}" for flag in table.flags[:3])
    return Score(table, mode, refused=why + (f" ({flags})" if flags else ""))


def _scored(
    table: Table,
    mode: str,
    calibration: Calibration,
    rows: Sequence[TableRow],
    held: Sequence[TableRow],
    known: Knowledge,
) -> Score:
    sizes, times = _sizes(held), measured(held)
    prediction = calibration.predict(sizes)
    errors = errors_of(sizes, prediction.times_s, times)
    # What it must be better than: two need rows to fit, one a topology of GPUs.
    beside: dict[str, Errors | None] = dict.fromkeys(BASELINES)
    if len(rows) >= 2:
        fitted = _sizes(rows), measured(rows)
        beside["hockney"] = errors_of(sizes, hockney(*fitted, sizes), times)
        beside["interpolation"] = errors_of(sizes, interpolate(*fitted, sizes), times)
    topology = known.topology(table) if table.collective == ALL_REDUCE and not is_mpi(table) else None
    if topology is not None and topology.ranks > 1:
        beside["nccl_constants"] = errors_of(sizes, nccl_constants(topology, sizes), times)
    return Score(table, mode, calibration.law.words, len(rows), tuple(held), prediction, errors, beside)


def _sizes(rows: Sequence[TableRow]) -> Floats:
    return np.array([row.size_bytes for row in rows], dtype=np.float64)


def measured(rows: Sequence[TableRow]) -> Floats:
    """Return the times of rows, seconds, float64 [n]."""
    return np.array([row.time_s for row in rows], dtype=np.float64)


# ------------------------------------------------------------------------------------------------ many tables


def check_tables(tables: Sequence[Table]) -> tuple[list[Table], tuple[mpi.Pairs, ...]]:
    """Return the collectives among tables, checked, and the point-to-point costs among them.

    Raises:
        UsageError: There is no table of a collective.
    """
    done = [check_rows(table) for table in tables]
    collectives = [table for table in done if table.collective in BUS_FACTORS]
    if not collectives:
        raise UsageError(
            "no table of a collective among these files; point-to-point tables only give the cost of messages"
        )
    return collectives, tuple(mpi.pairs_of(done))


def line_flags(table: Table) -> tuple[Flag, ...]:
    """Return the flags of a table, each line once."""
    first = {flag.line: flag for flag in reversed(table.flags)}
    return tuple(first[line] for line in sorted(first))


def same_cluster(fit_tables: Sequence[Table], test: Table) -> list[Table]:
    """Return the tables of the cluster that `test` is of; all of them where words do not tell several apart."""
    named = [table for table in fit_tables if table.cluster == test.cluster]
    different = {table.cluster for table in fit_tables}
    return named if named and len(different) > 1 else list(fit_tables)


def with_ranks(table: Table, ranks: int, hosts: int) -> Table:
    """Return the table with counts that it did not say."""
    return replace(table, ranks=table.ranks or ranks, hosts=table.hosts or hosts)


# -------------------------------------------------------------------------------------------------
# Scores of many tables together: medians over tables, coverage over rows.


@dataclass(frozen=True)
class Summary:
    """Scores pooled: medians over tables, coverage over rows.

    Args:
        tables: How many were scored.
        rows: How many rows were scored.
        mape: Median over tables.
        mape_large: Median over tables of the error from 1 MiB up.
        bias: Median over tables.
        band_coverage: Over all rows.
        baselines: Median error over the tables to which each applies.
    """

    tables: int
    rows: int
    mape: float | None
    mape_large: float | None
    bias: float | None
    band_coverage: float | None
    baselines: Mapping[str, float | None]


def summary(scores: Sequence[Score]) -> Summary:
    """Return what scores come to together; figures are None where there is nothing to pool."""
    done = [(score, score.errors, score.prediction) for score in scores if score.errors is not None]
    hits = [prediction.covers(measured(score.scored)) for score, _, prediction in done if prediction is not None]
    beside = [score.baselines for score, _, _ in done]
    others = {name: [errors.mape for each in beside if (errors := each.get(name))] for name in BASELINES}
    return Summary(
        len(done),
        sum(len(hit) for hit in hits),
        _median([errors.mape for _, errors, _ in done if errors]),
        _median([errors.mape_large for _, errors, _ in done if errors]),
        _median([errors.bias for _, errors, _ in done if errors]),
        float(np.mean(np.concatenate(hits))) if hits else None,
        {name: _median(mapes) for name, mapes in others.items()},
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


# -------------------------------------------------------------------------------------------------
# What a prediction must be better than: one Hockney line, interpolation, and NCCL's own constants used as a timer.


def hockney(sizes: ArrayLike, times_s: ArrayLike, requested: ArrayLike) -> Floats:
    """Return times by t = α + S/B, fitted to rows by iterated least squares on relative errors.

    R. W. Hockney, "The communication challenge for MPP", 1994. α and 1/B are kept positive.

    Args:
        sizes: Bytes of the fitted rows, [n], n ≥ 1.
        times_s: Their seconds, [n].
        requested: Bytes to predict, [m].

    Returns:
        Seconds, float64 [m].
    """
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    weights = np.ones(len(x))
    alpha, beta = float(t.min()), 0.0
    for _ in range(30):
        scaled = np.stack([np.ones(len(x)), x], axis=1) * (weights / t)[:, None]
        found = np.linalg.lstsq(scaled, weights, rcond=None)[0]
        alpha, beta = max(float(found[0]), 1e-9), max(float(found[1]), 0.0)
        if found[1] < 0:  # only latency is left
            alpha = float(np.exp(np.mean(np.log(t))))
        weights = 1 / np.sqrt(np.maximum(np.abs((alpha + beta * x) / t - 1), 1e-3))
    return alpha + beta * np.asarray(requested, dtype=np.float64)


def interpolate(sizes: ArrayLike, times_s: ArrayLike, requested: ArrayLike) -> Floats:
    """Return times on the line between neighbours in log-log; beyond the last two rows that line goes on.

    Arguments and result as of `hockney`; rows of one size count as their geometric mean.
    """
    x, logs = np.log(np.asarray(sizes, dtype=np.float64)), np.log(np.asarray(times_s, dtype=np.float64))
    places, index = np.unique(x, return_inverse=True)
    means = np.bincount(index, logs) / np.bincount(index)
    where = np.log(np.asarray(requested, dtype=np.float64))
    result = np.interp(where, places, means)
    if len(places) > 1:
        for beyond, a, b in ((where < places[0], 0, 1), (where > places[-1], -1, -2)):
            slope = (means[a] - means[b]) / (places[a] - places[b])
            result[beyond] = means[a] + slope * (where[beyond] - places[a])
    return np.asarray(np.exp(result), dtype=np.float64)
