"""How sure a run without a verdict makes us that no rank was a straggler: nothing to see, or undecided.

Where the detector named nobody, that means health only if it would have named a straggler in this very run. What it
suspects and what it would have found is its own state (`undecided.py`); here that becomes a promise, or the lack of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ringside.monitor.causes import PHASES, extra_phase_seconds
from ringside.monitor.run.table import StepTable
from ringside.monitor.undecided import TOO_LITTLE, Undecided
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import percent

PROMISED = 0.10
"""A rank slower by this ratio is what a run without a straggler must have been able to show."""

SURE_TO_FIND = 0.55
"""Who is slower by so much that this share of it would be named in the end was named from the run's middle on, when the
detector knew less: in 203 trials of 205 below this share, and in 13 of 15 right above it."""

LIKELY, UNLIKELY = 5_000, 30
"""A suspicion takes a promise back where chance gives as much once in so many steps: so seldom does a healthy run end
with one. Where nothing is promised, once in so many as the second tells who was slowest: one healthy run in 80 with 10%
to 60% of noise ended with one."""

MOST_UNCLEAR = PROMISED / 2
"""Of own times: so much in which a rank may have been waiting hides a straggler."""

NEARLY_ALL, MOSTLY = 0.85, 0.6

PHASE_NAMES = {
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "compute": "forward and backward",
    "optimizer": "the optimizer",
}


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's records say about stragglers; `assessment` in `summary.json`.

    Args:
        state: `straggler`: a verdict names one; `none`: none, and one would have been found; `undecided`: neither.
        rank: The rank that was slowest, where it was visibly slower than the others without a verdict.
        excess_ratio: By how much it was slower than the others since then; 0.36 means 36%.
        since_step: Since about which step.
        phase: Where most of its extra time was: one of `PHASES`; empty where that cannot be said.
        phase_ratio: The share of its extra time that was there.
        found_ratio: A rank slower by this would have been found in this run; None where that cannot be promised.
        compared: Whether every rank has another that does the same work; if not, it was compared with its own past.
    """

    state: Literal["straggler", "undecided", "none"]
    rank: int | None = None
    excess_ratio: float | None = None
    since_step: int | None = None
    phase: str = ""
    phase_ratio: float | None = None
    found_ratio: float | None = None
    compared: bool = True


UNKNOWN = Assessment(state="undecided")


def assess_stragglers(
    table: StepTable, verdicts: Sequence[Verdict], undecided: Undecided, peers: Sequence[Sequence[int]] = ()
) -> Assessment:
    """Return what a run says about stragglers.

    Args:
        table: Its step records.
        verdicts: What was found in it.
        undecided: What the detector had not decided in the end.
        peers: Ranks that do the same work, where not all do: only these are compared.
    """
    if any(verdict.ranks and verdict.kind in OWN_TIME_KINDS for verdict in verdicts):
        return Assessment(state="straggler")
    if table.ranks < 2:
        return Assessment(state="none")  # there is nobody to compare it with
    if len(peers) > 1 and any(len(ranks) == 1 for ranks in peers):
        return Assessment(state="undecided", compared=False)
    # What may have been waiting is in own times; where that is much, they show nothing.
    newest = slice(len(table) // 2, None)
    unclear, own = (np.nansum(table[name][newest], axis=0) for name in ("unclear_seconds", "own_seconds"))
    if (unclear > MOST_UNCLEAR * own).any():
        return UNKNOWN
    found = assess(undecided)
    if found.rank is None or found.since_step is None:
        return found
    # The phase in which most of its extra time is, beside its peers; none where no phase holds most.
    among = next((ranks for ranks in peers if found.rank in ranks), range(table.ranks))
    extra = extra_phase_seconds(among.index(found.rank), table.of_ranks(among).between(found.since_step))
    total = sum(max(value, 0.0) for value in extra.values())
    phase = max(PHASES, key=lambda name: extra[name])
    share = extra[phase] / total if total > 0 else 0.0
    return msgspec.structs.replace(found, phase=phase, phase_ratio=share) if share >= MOSTLY else found


def assess(undecided: Undecided) -> Assessment:
    """Return what the detector's state says about stragglers where no verdict names one."""
    found = PROMISED if would_be_found(undecided) else None
    for suspect in undecided.suspects:
        is_likely = not suspect.healthy_steps or suspect.healthy_steps >= (LIKELY if found else UNLIKELY)
        if is_likely and suspect.excess_ratio >= PROMISED and suspect.why != TOO_LITTLE:
            return Assessment(
                state="undecided",
                rank=suspect.rank,
                excess_ratio=suspect.excess_ratio,
                since_step=suspect.since_step,
                found_ratio=found,
            )
    return Assessment(state="undecided" if found is None else "none", found_ratio=found)


def would_be_found(undecided: Undecided, ratio: float = PROMISED) -> bool:
    """Return whether a rank slower than the others by `ratio` (0.1: 10%) would have been named by then."""
    return min(undecided.found.values(), default=ratio) < SURE_TO_FIND * ratio


def describe_assessment(found: Assessment) -> str:
    """Return an assessment without a verdict in one or two sentences."""
    if found.state == "undecided" and found.rank is not None and found.excess_ratio is not None:
        amount = "" if found.phase_ratio is None or found.phase_ratio < NEARLY_ALL else "nearly all "
        where = f", {amount or 'mostly '}in {PHASE_NAMES[found.phase]}" if found.phase in PHASE_NAMES else ""
        slower = f"+{percent(found.excess_ratio)} since about step {found.since_step}"
        return f"Rank {found.rank} was slowest: {slower}{where}, but too unsteady to be sure."
    if not found.compared:
        return "Some ranks do work that no other does: these were compared with their own past only."
    if found.state == "none" and found.found_ratio is not None:
        return f"A rank {percent(found.found_ratio)} slower would have been found."
    if found.state == "undecided":
        return f"A rank {percent(PROMISED)} slower might not have been found: too few steps, or too unsteady ones."
    return ""
