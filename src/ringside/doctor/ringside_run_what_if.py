"""What if no rank of a Ringside run had been slow: its own recorded times, replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.doctor.findings import Unjudged
from ringside.doctor.kineto_judge import LEAST_STEPS
from ringside.doctor.what_if_answer import answer
from ringside.doctor.what_if_steps import step_recording
from ringside.doctor.what_if_words import as_dict
from ringside.monitor.table import Table
from ringside.text import counted

WARM_UP_STEPS = 3
"""First steps that are left out of long runs: they build buckets, caches and autotuned kernels ..."""
LONG_STEPS = 10 * WARM_UP_STEPS
"""... in runs with so many steps."""
TIMES = ("own_seconds", "exposed_seconds", "step_seconds")
"""What a replay needs of every rank."""


def whole_steps(table: Table) -> tuple[Table, NDArray[np.bool_]]:
    """Return a run's records without the warm-up of long runs, and which of its steps all ranks recorded.

    Args:
        table: Step records, at least one.

    Returns:
        The table, and bool [steps].
    """
    table = table.between(int(table.steps[WARM_UP_STEPS])) if len(table) >= LONG_STEPS else table
    whole: NDArray[np.bool_] = np.logical_and.reduce([np.isfinite(table[name]).all(axis=1) for name in TIMES])
    return table, whole


def what_if(folder: str, table: Table) -> tuple[dict[str, Any] | None, list[Unjudged]]:
    """Return what a run would have lost nothing of, and what of it could not be replayed.

    Args:
        folder: What to call the run.
        table: Its step records.

    Returns:
        The content of `what_if` (None where there is too little to replay), and lines on what is missing.
    """
    if table.ranks < 2 or not len(table):
        return None, []
    table, whole = whole_steps(table)
    lines = []
    if not whole.all():
        why = f"{counted(int((~whole).sum()), 'step')} of {len(whole)} lack the record of some rank and are left out"
        lines.append(Unjudged(what=f"what if, for all steps of the run {folder}", why=why))
    if whole.sum() < LEAST_STEPS:
        why = f"only {counted(int(whole.sum()), 'step')} of all ranks are recorded, {LEAST_STEPS} are needed"
        return None, [Unjudged(what=f"what if, for the run {folder}", why=why)]
    own, exposed, step = (table[name][whole] for name in TIMES)
    found = answer(step_recording(own, exposed, step, range(table.ranks), stride=table.stride))
    return as_dict(found, f"{counted(len(own), 'step')} of the Ringside run {folder}"), lines
