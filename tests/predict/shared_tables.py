"""The published tables, and tables made from a known law."""

from pathlib import Path

import numpy as np

from ringside.predict.laws.fabric import PIPELINE
from ringside.predict.tables.table import Figure, Table, TableRow

BANDWIDTH = Path(__file__).parents[1] / "data" / "bandwidth"


def published(name=""):
    """Return the folder of published tables, or one of its files."""
    return BANDWIDTH / name


def made(theta, sizes, noise=0.0, seed=0, ranks=8, name="made"):
    """Return a table of the curve's law with log-normal noise, bandwidths as nccl-tests prints them."""
    times = np.exp(
        PIPELINE.log_slopes(np.asarray(theta), sizes)[0]
        + noise * np.random.default_rng(seed).standard_normal(len(sizes))
    )
    factor = 2 * (ranks - 1) / ranks
    rows = []
    for line, (size, time) in enumerate(zip(sizes, times, strict=True), 2):
        algbw = round(size / time / 1e9, 2) * 1e9
        busbw = round(size / time * factor / 1e9, 2) * 1e9
        rows.append(TableRow(line, float(size), float(time), Figure(algbw, 5e6), Figure(busbw, 5e6)))
    return Table(name, tuple(rows), ranks=ranks, hosts=1)
