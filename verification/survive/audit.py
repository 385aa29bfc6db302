"""What is wrong with a job's decisions, for tests and benchmarks of whole jobs."""

from __future__ import annotations

from collections import Counter

from ringside.survive.audit import every_commit
from ringside.survive.cluster.registers import Registers


def audit(registers: Registers, steps: int, *, resumed: bool = False) -> list[str]:
    """Return what is wrong with a job's decisions, in words.

    Args:
        registers: The job's.
        steps: How many steps it has finished.
        resumed: Whether steps after a checkpoint may have been done again in a later incarnation.
    """
    tags = [tag for tag, _, _ in every_commit(registers, steps)]
    twice = [what for what, times in Counter((tag.incarnation, tag.step) for tag in tags).items() if times > 1]
    wrong = [f"step {step} is committed twice in incarnation {number}" for number, step in twice]
    again = [step for step, times in Counter(tag.step for tag in tags).items() if times > 1]
    wrong += [] if resumed else [f"step {step} is committed twice" for step in again]
    return wrong + [f"step {step} is not committed" for step in sorted(set(range(steps)) - {tag.step for tag in tags})]
