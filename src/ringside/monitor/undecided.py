"""What the detector of slow ranks suspects and has not decided, and what it would have found by now."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringside.text import name_ranks, percent

NOT_LASTED, TOO_LITTLE = "it has not lasted", "it takes up too little of a step"
"""Why a rank that is slow for sure is not told of."""

SLOWEST, SUSPECTED = 1 / 2, 0.6
"""Shares of what a verdict takes. From the first on a rank is kept, for who was slowest when a run ends; from the
second on it is suspected in words while the run goes on: chance gives so much once in some hundred steps."""


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that may be slow.

    Args:
        rank: Which one.
        since_step: Since about when.
        excess_ratio: How much longer it takes than usual, at that (0.12 means 12%).
        bar_ratio: How much of what a verdict takes that is; 1 and more: it is slow, and only the rest is open.
        healthy_steps: In about how many steps of a healthy job some rank seems as slow by chance; 0: in so many that it
            is no matter of chance.
        why: Why there is no verdict.
    """

    rank: int
    since_step: int
    excess_ratio: float
    bar_ratio: float
    healthy_steps: int
    why: str = ""


class Undecided(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the detector between verdicts.

    Args:
        step: Of which step.
        suspects: Ranks that may be slow, the likeliest first.
        found: The excess ratio of any rank that would have been named within so many steps, by that number; a rank that
            is slower by less goes unnoticed for longer.
    """

    step: int
    suspects: list[Suspect] = []
    found: dict[int, float] = {}

    def describe(self) -> str:
        """Return both in a line: who may be slower by how much, and what would have been named."""
        said = []
        for suspect in [suspect for suspect in self.suspects if suspect.bar_ratio >= SUSPECTED][:1]:
            often = f"chance gives as much once in {suspect.healthy_steps:,} steps"
            why = suspect.why or (often if suspect.healthy_steps else "chance hardly ever gives as much")
            size = percent(suspect.excess_ratio)
            said.append(f"{name_ranks([suspect.rank])} may be {size} slower since step {suspect.since_step}: {why}")
        if self.found:
            soon, late = min(self.found), max(self.found)
            more = f", {percent(self.found[late])} within {late}" if self.found[late] < 0.9 * self.found[soon] else ""
            said.append(f"a rank slower by {percent(self.found[soon])} would be named within {soon} steps{more}")
        return "; ".join(said)


NOTHING = Undecided(step=-1)
"""Before the detector was looked at."""


def undecided_of_job(states: Sequence[tuple[Sequence[int], Undecided]]) -> Undecided:
    """Return the state of a job of several sets of ranks that are compared, with the job's numbers of ranks.

    Args:
        states: The ranks of each set, and its state, in which they are numbered from 0.
    """
    suspects = [
        msgspec.structs.replace(suspect, rank=ranks[suspect.rank])
        for ranks, state in states
        for suspect in state.suspects
    ]
    lengths = set.intersection(*(set(state.found) for _, state in states)) if states else set()
    return Undecided(
        step=max((state.step for _, state in states), default=0),
        suspects=sorted(suspects, key=lambda suspect: -suspect.bar_ratio),
        found={length: max(state.found[length] for _, state in states) for length in sorted(lengths)},
    )
