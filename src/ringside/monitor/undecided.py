"""What the detector of slow ranks suspects and has not decided, and what it would have found by now."""

from __future__ import annotations

import msgspec

from ringside.text import name_ranks, percent

SUSPECTED = 0.6
"""A rank is suspected from this share of the bar on: chance gives so much once in some hundred steps."""


NO_CHANCE = 1e-9
"""A chance per step below this is none."""


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
        for suspect in self.suspects[:1]:
            often = f"chance gives as much once in {suspect.healthy_steps:,} steps"
            why = suspect.why or (often if suspect.healthy_steps else "chance hardly ever gives as much")
            size = percent(suspect.excess_ratio)
            said.append(f"{name_ranks([suspect.rank])} may be {size} slower since step {suspect.since_step}: {why}")
        if self.found:
            soon, late = min(self.found), max(self.found)
            more = f", {percent(self.found[late])} within {late}" if self.found[late] < 0.9 * self.found[soon] else ""
            said.append(f"a rank slower by {percent(self.found[soon])} would be named within {soon} steps{more}")
        return "; ".join(said)
