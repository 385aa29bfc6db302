"""Reading a job's decisions afterwards: what was committed, by whom, and whether every step was, once."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from ringside.survive.decision import Commit, Tag, decision_key, decode_decision
from ringside.survive.generation import decode_generation, generation_key


class Readable(Protocol):
    """Registers that are only read."""

    def read(self, key: str) -> bytes | None:
        """Return what stands; None: nothing."""


def committed(registers: Readable, steps: int) -> list[tuple[Tag, Commit]]:
    """Return the COMMITs that count for the steps before `steps`, by step.

    What an incarnation did after the checkpoint that the next one began with was done again: the last COMMIT counts.
    """
    every = every_commit(registers, steps)
    latest = {tag.step: tag.incarnation for tag, _ in every}
    return sorted(((tag, decision) for tag, decision in every if tag.incarnation == latest[tag.step]), key=_by_step)


def every_commit(registers: Readable, steps: int) -> list[tuple[Tag, Commit]]:
    """Return every COMMIT that stands for the steps before `steps`: by incarnation, step and generation."""
    found: list[tuple[Tag, Commit]] = []
    incarnation = 1
    while (record := registers.read(generation_key(incarnation))) is not None:
        newest = decode_generation(record).number
        for step in range(steps):
            tags = (Tag(incarnation, number, step, 0) for number in range(1, newest + 1))
            found += [(tag, decision) for tag in tags if (decision := _commit(registers, tag)) is not None]
        incarnation += 1
    return found


def audit(registers: Readable, steps: int, *, resumed: bool = False) -> list[str]:
    """Return what is wrong with a job's decisions, in words.

    Args:
        registers: The job's.
        steps: How many steps it has finished.
        resumed: Whether steps after a checkpoint may have been done again in a later incarnation.
    """
    tags = [tag for tag, _ in every_commit(registers, steps)]
    twice = [what for what, times in Counter((tag.incarnation, tag.step) for tag in tags).items() if times > 1]
    wrong = [f"step {step} is committed twice in incarnation {number}" for number, step in twice]
    again = [step for step, times in Counter(tag.step for tag in tags).items() if times > 1]
    wrong += [] if resumed else [f"step {step} is committed twice" for step in again]
    return wrong + [f"step {step} is not committed" for step in sorted(set(range(steps)) - {tag.step for tag in tags})]


def _by_step(found: tuple[Tag, Commit]) -> int:
    return found[0].step


def _commit(registers: Readable, tag: Tag) -> Commit | None:
    data = registers.read(decision_key(tag))
    decision = None if data is None else decode_decision(data)
    return decision if isinstance(decision, Commit) else None
