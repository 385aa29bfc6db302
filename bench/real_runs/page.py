"""docs/real-runs.md, and the table on the terminal, from the results of `bench/real_runs/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from bench.common import markdown_table

Results = Sequence[Mapping[str, Any]]
HEAD = """# Real runs: one thing wrong, one verdict

Written by `python -m bench.real_runs --write`; do not edit. Each line is a separate training job on one machine with
two cores, started by torchrun (the slow link: on hosts of the network lab). The fault begins at step 60. The columns:

- *Model*: it computes (`gpt`), waits as a host does for an accelerator (`waiting`), or has hundreds of tiny parameters
  (`tiny`).
- *Runs right*: the verdict was on these ranks, and no other.
- *Delay*: training steps from the first that differed to the one at whose end the verdict was reached. Of several runs:
  the median, and the range. A hang is detected by the clock.
- *Longer*: the rank's own time compared with the others', by the verdict.
- *Others' cores*: how many of the two cores were busy with something else. The more, the less a wrong line means.

"""
COLUMNS = (
    "what is wrong",
    "engine",
    "model",
    "step",
    "right verdict",
    "runs right",
    "delay",
    "longer",
    "instead",
    "others' cores",
)


def page(results: Results, titles: Mapping[str, str]) -> str:
    """Return the page; `titles`: what is wrong in each case, by its name."""
    rows = [cells(name, engine, runs, titles) for name, engine, runs in grouped(results)]
    return HEAD + markdown_table(COLUMNS, rows) + "\n"


def table(results: Results) -> str:
    """Return the same for a terminal."""
    rows = [list(COLUMNS), *(cells(name, engine, runs, {}) for name, engine, runs in grouped(results))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def grouped(results: Results) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """Return the runs of each case and engine, in order of first appearance."""
    order = list(dict.fromkeys((result["case"], result["engine"]) for result in results))
    return [(*key, [r for r in results if (r["case"], r["engine"]) == key]) for key in order]


def cells(name: str, engine: str, runs: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """Return one line's cells."""
    expected = runs[0]["expected"] or "none"
    steps = [run["step_seconds"] for run in runs if "step_seconds" in run]
    delays = [run["delay"] for run in runs if run.get("delay") is not None]
    excess = [run["excess"] for run in runs if run.get("excess") is not None]
    return [
        titles.get(name, name),
        engine,
        runs[0]["model"],
        f"{1e3 * median(steps):.0f} ms" if steps else "–",
        expected,
        f"{sum(run['right'] for run in runs)} of {len(runs)}",
        middle(delays),
        f"{100 * median(excess):.0f}%" if excess else "–",
        "; ".join(others(runs)) or "–",
        f"{median(run['others_cores'] for run in runs):.1f}",
    ]


def others(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in words what runs that were judged wrongly gave."""
    wrong = [run for run in runs if not run["right"]]
    instead = sorted(", ".join(f"{v['kind']} {v['ranks']}" for v in run["found"]) or "no verdict" for run in wrong)
    return [f"{len(list(same))} × {words}" for words, same in groupby(instead)]


def middle(delays: Sequence[int]) -> str:
    """Return the median of some delays and, where they differ, the shortest and the longest."""
    if not delays:
        return "–"
    spread = f" ({min(delays)} to {max(delays)})" if min(delays) < max(delays) else ""
    return f"{median(delays):g}{spread}"
