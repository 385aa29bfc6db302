"""Hardware that is held to tables measured on it, and how well such a fit meets rows that had no part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band, fit
from ringside.predict.laws.fabric import BASE, RATE
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.plan.options import has_library
from ringside.predict.plan.plan import CERTAIN
from ringside.predict.score import Score, hold_out, measured, other_scale
from ringside.predict.tables.table import Table
from ringside.predict.topology.topology import MeasuredTimes, Topology


@dataclass(frozen=True)
class TableFit:
    """What a table showed of its hardware.

    Args:
        table: As it was checked.
        latency_s: What the smallest tensors take, fitted.
        algbw: Bytes per second that large tensors tend to, fitted.
        expected: (latency, algbw) of the hardware's law, before anything was measured.
        held_out: Every second row by the others; refused where there are too few.
        other_scales: The table by those of other scales alone; None where there are none.
    """

    table: Table
    latency_s: Band
    algbw: Band
    expected: tuple[float, float]
    held_out: Score
    other_scales: Score | None


def fit_tables(tables: Sequence[Table], known: Knowledge) -> list[TableFit]:
    """Return what each of checked tables shows; all have usable rows."""
    found = []
    for table in tables:
        law = known.law_or_vague(table)
        fitted = fit([row.size_bytes for row in table.rows], measured(table.rows), law)
        # What the rows moved the law's figures by, in the linear model, and how sure they are then.
        moved = law.mean + np.diag(law.spread**2) @ fitted.slopes.T @ fitted.pull
        spread = CERTAIN * np.sqrt(np.diag(fitted.posterior))
        latency, rate = (
            Band(*(float(np.exp(moved[figure] + sign * spread[figure])) for sign in (0, -1, 1)))
            for figure in (BASE, RATE)
        )
        expected = float(np.exp(law.mean[BASE])), float(np.exp(law.mean[RATE]))
        others = [other for other in tables if (other.ranks, other.hosts) != (table.ranks, table.hosts)]
        beside = other_scale(others, table, known) if others else None
        found.append(TableFit(table, latency, rate, expected, hold_out(table, known), beside))
    return found


def measured_topology(tables: Sequence[Table], known: Knowledge) -> Topology:
    """Return the hardware of checked tables with their rows in it.

    Raises:
        UsageError: A table's hardware is not known, no GPU library's laws apply to it, tables are of different
            hardware, or one has no usable row.
    """
    scales: list[Topology] = []
    for table in tables:
        scale = known.topology(table)
        if scale is None:
            raise UsageError(f"{table.name}: its text names no known hardware; give --preset NAME")
        if not has_library(scale):
            raise UsageError(
                f"{table.name}: {scale.name} is no hardware of a GPU library, and a fit moves only such a library's "
                "laws; measure the links of CPU hosts with `ringside probe -o FILE`"
            )
        if not table.rows:
            raise UsageError(f"{table.name}: no usable row")
        scales.append(scale)
    largest = max(scales, key=lambda scale: scale.ranks)
    alike = replace(largest, name="", ranks_per_host=(1,), nics=1)
    for table, scale in zip(tables, scales, strict=True):
        if replace(scale, name="", ranks_per_host=(1,), nics=1) != alike:
            raise UsageError(
                f"{table.name} is of {scale.name}, {tables[scales.index(largest)].name} of {largest.name} or another "
                "network: fit each hardware on its own, or give with --preset what all of them are"
            )
    measured = list(largest.measured)
    for table, scale in zip(tables, scales, strict=True):
        sizes = tuple(row.size_bytes for row in table.rows)
        times = tuple(float(f"{row.time_s:.9g}") for row in table.rows)
        words = table.collective, table.algorithm or "auto", Path(table.path).name
        measured.append(MeasuredTimes(scale.ranks_per_host, scale.nics, sizes, times, *words))
    return replace(largest, measured=tuple(measured))
