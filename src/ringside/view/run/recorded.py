"""A recorded run as a value: for notebooks, for comparisons, for exports. Only read, never changed."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ringside.errors import UsageError
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.records import RunInfo
from ringside.monitor.run.table import FIELDS, fill_waits, job_step_seconds
from ringside.monitor.stats import Floats
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import Verdict
from ringside.view.html.markup import NOTHING, fill
from ringside.view.tui.console import without_controls
from ringside.view.verdict_text import describe_calm, rank_texts, slowest_first, verdict_text

if TYPE_CHECKING:
    import pandas

SHOWN_RANKS = 16


class Run:
    """A run directory, read once; works on a run that is still going or was cut off.

    >>> run = Run("runs/demo-1")  # doctest: +SKIP
    >>> run.own_seconds.mean(axis=0)  # doctest: +SKIP

    Args:
        path: The run directory.

    Attributes:
        path: The run directory.
        info: What was known at its start.
        summary: The content of `summary.json`, judged anew from the records.
        table: All records by field, step and rank.

    Raises:
        UsageError: `path` is no run directory.
        RingsideError: It is one and cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        reader = RunReader(path)
        self.path = Path(path)
        self.info: RunInfo = reader.info
        self.summary, self.table = assess_run(reader)

    @property
    def steps(self) -> np.ndarray:
        """Training step of each row of the arrays, int64 [steps]."""
        return self.table.steps

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.table.ranks

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What was found, in order."""
        return [verdict_text(content, self.summary).verdict for content in self.summary["verdicts"]]

    @cached_property
    def step_seconds(self) -> Floats:
        """Duration of each step of the job, float64 [steps]: the median over ranks."""
        return job_step_seconds(self.table)

    @property
    def own_seconds(self) -> Floats:
        """Own time, float64 [steps, ranks]; NaN where missing."""
        return self.table["own_seconds"]

    @cached_property
    def wait_seconds(self) -> Floats:
        """Wait for the last rank, float64 [steps, ranks]; NaN where missing."""
        return fill_waits(self.table)

    def __getitem__(self, field: str) -> Floats:
        """Return one field of the records, float64 [steps, ranks]; NaN where missing.

        Raises:
            UsageError: There is no such field; the message lists those there are.
        """
        if field not in FIELDS:
            raise UsageError(f"records have no field {field!r}; they have {', '.join(FIELDS)}")
        return self.table[field]

    def rank_table(self) -> list[dict[str, Any]]:
        """Return one row per rank: host, medians of own time and wait in seconds, excess as a ratio."""
        return list(self.summary["ranks"])

    def to_pandas(self) -> pandas.DataFrame:
        """Return every record as a row: step, rank and all fields.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UsageError("a DataFrame needs pandas: pip install pandas") from error
        steps, ranks = np.meshgrid(self.steps, np.arange(self.ranks), indexing="ij")
        columns = {"step": steps.ravel(), "rank": ranks.ravel()}
        frame = pandas.DataFrame({**columns, **{name: self.table[name].ravel() for name in FIELDS}})
        # Steps that a rank did not record are no rows.
        return frame[~frame["own_seconds"].isna()].reset_index(drop=True)

    def __repr__(self) -> str:
        found = "; ".join(verdict_text(content, self.summary).headline for content in self.summary["verdicts"])
        found = found or describe_calm(self.summary).headline
        return f"<Run {self.info.name!r}: {self.summary['steps']} steps of {self.ranks} ranks. {found}>"

    def _repr_html_(self) -> str:
        """The verdict, and a table of the ranks, the slowest first: for notebooks, light or dark."""
        texts = [verdict_text(content, self.summary) for content in self.summary["verdicts"]]
        found = [
            fill("<p><b>{}</b> {}<br>{}<br>Cost: {}</p>", text.headline, text.when, text.why, text.price)
            for text in texts
        ]
        if not found:
            calm = describe_calm(self.summary)
            found = [fill("<p><b>{}</b> {}</p>", calm.headline, calm.text)]
        row = "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>"
        rest = NOTHING
        if self.ranks > SHOWN_RANKS:
            rest = fill("<caption>the slowest {} of {} ranks</caption>", SHOWN_RANKS, self.ranks)
        page = fill(
            "<div>{found}<table>{rest}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>",
            found=found,
            rest=rest,
            heads=[fill("<th>{}</th>", name) for name in ("rank", "host", "own", "wait", "excess")],
            rows=[fill(row, *rank_texts(rank)) for rank in slowest_first(self.summary)[:SHOWN_RANKS]],
        )
        return without_controls(page)

    def _repr_json_(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self.summary)
        return content
