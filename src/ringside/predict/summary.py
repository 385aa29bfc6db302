"""Scores of many tables together: medians over tables, coverage over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringside.predict.score import Errors, Score, measured


@dataclass(frozen=True)
class Summary:
    """Scores pooled: medians over tables, coverage over rows.

    Args:
        tables: How many were scored.
        mape: Median over tables.
        mape_large: Median over tables of the error from 1 MB up.
        bias: Median over tables.
        band_coverage: Over all rows.
        rows: How many rows were scored.
        baselines: Median error over the tables to which each applies.
    """

    tables: int
    mape: float | None
    mape_large: float | None
    bias: float | None
    band_coverage: float | None
    rows: int
    baselines: Mapping[str, float | None]


def summary(scores: Sequence[Score]) -> Summary:
    """Return what scores come to together; figures are None where there is nothing to pool."""
    done = [(one, one.errors, one.prediction) for one in scores if one.errors is not None]
    hits = [prediction.covers(measured(one.scored)) for one, _, prediction in done if prediction is not None]
    names = ("hockney", "interpolation", "nccl_constants")
    return Summary(
        len(done),
        _median([errors.mape for _, errors, _ in done if errors]),
        _median([errors.mape_large for _, errors, _ in done if errors]),
        _median([errors.bias for _, errors, _ in done if errors]),
        float(np.mean(np.concatenate(hits))) if hits else None,
        sum(len(hit) for hit in hits),
        {name: _median([_mape(one.baselines.get(name)) for one, _, _ in done]) for name in names},
    )


def _mape(errors: Errors | None) -> float | None:
    return errors.mape if errors is not None else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
