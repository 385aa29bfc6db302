"""Two runs side by side: what changed, and whether by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from ringside.errors import UsageError
from ringside.monitor.assessment import Assessment, would_be_found
from ringside.monitor.run.table import job_exposed_seconds
from ringside.monitor.stats import Floats, known_median, row_medians
from ringside.monitor.undecided import Undecided
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import size
from ringside.view.run.recorded import Run

WARM_UP_STEPS = 5
RESAMPLES = 1_000
BLOCKS = 16
"""Steps follow each other: blocks of neighbours are drawn, so that slow drifts widen the interval (Künsch 1989)."""

FEWEST_STEPS = 10


class RunChange(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs.

    Args:
        name: What it is.
        before: Median over the steps of the first run, seconds (or per second, for throughput).
        after: The same of the second.
        ratio: after / before − 1: 0.05 means 5% more.
        low: Lower end of a 95% interval of `ratio`.
        high: Upper end.
    """

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether chance alone does not explain it."""
        return self.low > 0 or self.high < 0


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `ringside compare` found.

    Args:
        step: The time of a step, which `--fail-over` is about.
        changes: All figures, that one first.
        new_verdicts: Kinds and ranks found in the second run and not in the first.
        gone_verdicts: Found in the first and not in the second.
        uncertain_verdicts: Of both, the stragglers that the other run may have had as well: it could not show them.
        remarks: What makes the two runs hard to compare.
        unlike: What makes them different jobs, of another size or model: then no figure says that code became slower.
        assessment: How sure each run makes us that it had no straggler, by `before` and `after`.
    """

    step: RunChange
    changes: list[RunChange]
    new_verdicts: list[Verdict]
    gone_verdicts: list[Verdict]
    uncertain_verdicts: list[Verdict]
    remarks: list[str]
    unlike: list[str]
    assessment: dict[str, Assessment]

    def is_slower_than(self, limit: float) -> bool:
        """Whether a step takes longer by more than `limit` (0.05 is 5%), and longer beyond chance."""
        return self.step.ratio > limit and self.step.low > 0


FIGURES: dict[str, Callable[[Run], Floats]] = {
    "step time": lambda run: run.step_seconds,
    "own time, slowest rank": lambda run: np.fmax.reduce(run.own_seconds, axis=1),
    "own time, median rank": lambda run: row_medians(run.own_seconds),
    "exposed sync": lambda run: job_exposed_seconds(run.table),
    "data": lambda run: row_medians(run["data_seconds"]),
    "forward": lambda run: row_medians(run["forward_seconds"]),
    "backward": lambda run: row_medians(run["backward_seconds"]),
    "optimizer": lambda run: row_medians(run["optimizer_seconds"]),
    "forward and backward": lambda run: row_medians(run["compute_seconds"]),
}
"""Each figure of a run by step, seconds, float64 [steps]; of exposed sync what even the last rank could not hide."""


def compare(before: Run, after: Run, *, warm_up_steps: int = WARM_UP_STEPS) -> RunComparison:
    """Hold two runs side by side.

    Args:
        before: The run to compare with.
        after: The run in question.
        warm_up_steps: First steps of each that count for nothing.

    Raises:
        UsageError: One of them has too few steps.
    """
    for run in (before, after):
        if len(run.steps) < warm_up_steps + FEWEST_STEPS:
            raise UsageError(
                f"{run.path} has {len(run.steps)} steps; comparing needs {FEWEST_STEPS} after "
                f"{warm_up_steps} of warm-up"
            )
    rng = np.random.default_rng(0)
    changes = [
        _change(name, figure(before)[warm_up_steps:], figure(after)[warm_up_steps:], rng)
        for name, figure in FIGURES.items()
    ]
    # What explains a difference before any figure does: another job, or the same one on other software.
    payloads = [size(run.summary["sync"]["payload_bytes_per_step"]) for run in (before, after)]
    jobs = (
        ("numbers of ranks", before.ranks, after.ranks),
        ("numbers of hosts", len(set(before.info.hosts)), len(set(after.info.hosts))),
        ("gradients per step", *payloads),
    )
    versions = [
        (f"versions of {name}", *(str(run.info.versions.get(name)).partition("+")[0] for run in (before, after)))
        for name in ("torch", "ringside")
    ]
    software = (("engines", before.info.engine, after.info.engine), *versions)
    unlike, remarks = (
        [f"{name}: {first} and {second}" for name, first, second in settings if first != second]
        for settings in (jobs, software)
    )
    new, gone = _without(after.verdicts, before.verdicts), _without(before.verdicts, after.verdicts)
    assessment = {
        name: msgspec.convert(run.summary["assessment"], Assessment)
        for name, run in (("before", before), ("after", after))
    }
    uncertain = [
        verdict
        for verdicts, other, undecided in (
            (new, assessment["before"], _undecided(before)),
            (gone, assessment["after"], _undecided(after)),
        )
        for verdict in verdicts
        if verdict.kind in OWN_TIME_KINDS
        and other.state == "undecided"
        and (other.rank in verdict.ranks or not would_be_found(undecided, verdict.excess_ratio))
    ]
    return RunComparison(
        step=changes[0],
        changes=[change for change in changes if change.before > 0 or change.after > 0],
        new_verdicts=new,
        gone_verdicts=gone,
        uncertain_verdicts=uncertain,
        remarks=[f"different {difference}" for difference in (*unlike, *remarks)],
        unlike=unlike,
        assessment=assessment,
    )


def _undecided(run: Run) -> Undecided:
    return msgspec.convert(run.summary["undecided"], Undecided, strict=False)  # JSON's keys are strings


def _change(name: str, before: Floats, after: Floats, rng: np.random.Generator) -> RunChange:
    medians = [known_median(values) for values in (before, after)]
    drawn = [_resample_medians(values[np.isfinite(values)], rng) for values in (before, after)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = drawn[1] / drawn[0] - 1.0
    ratios = ratios[np.isfinite(ratios)]
    low, high = np.quantile(ratios, [0.025, 0.975]) if ratios.size else (math.nan, math.nan)
    ratio = medians[1] / medians[0] - 1.0 if medians[0] > 0 else math.nan
    return RunChange(name=name, before=medians[0], after=medians[1], ratio=ratio, low=float(low), high=float(high))


def _resample_medians(values: Floats, rng: np.random.Generator) -> Floats:
    """Medians of series drawn from blocks of neighbouring steps, float64 [RESAMPLES]."""
    if not values.size:
        return np.full(RESAMPLES, np.nan)
    # Neighbouring steps are alike, so blocks are drawn (moving block bootstrap, Künsch 1989), not steps.
    length = max(len(values) // BLOCKS, 1)
    count = -(-len(values) // length)
    begins = rng.integers(0, len(values) - length + 1, (RESAMPLES, count))
    rows = (begins[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, : len(values)]
    medians: Floats = np.median(values[rows], axis=1)
    return medians


def _without(some: list[Verdict], others: list[Verdict]) -> list[Verdict]:
    # Whether it is the same verdict: its kind and ranks; since when differs from run to run.
    known = {(verdict.kind, tuple(verdict.ranks)) for verdict in others}
    return [verdict for verdict in some if (verdict.kind, tuple(verdict.ranks)) not in known]
