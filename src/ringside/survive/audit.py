"""Reading a job's decisions afterwards: what was committed, by whom, and whether every step was, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ringside.survive.decision import Commit, Tag, decisions_key, decode_decided
from ringside.survive.generation import decode_generation, generation_key

Stretch = Callable[[int], tuple[int, int]]
"""Of a step, the position of its first sample and how many there are (`Settings.samples`)."""


class Readable(Protocol):
    """Registers that are only read."""

    def read(self, key: str) -> bytes | None:
        """Return what stands; None: nothing."""


def committed(registers: Readable, steps: int, samples: Stretch) -> list[tuple[Tag, Commit]]:
    """Return the COMMITs that count for the steps before `steps`, by step.

    What an incarnation did after the checkpoint that the next one began with was done again: the last COMMIT counts.
    Of each generation only the newest is kept as it was written; those before it are the same but for their samples,
    which a step's number tells, and have no digest.
    """
    every = every_commit(registers, steps, samples)
    latest = {tag.step: tag.incarnation for tag, _ in every}
    return sorted(((tag, decision) for tag, decision in every if tag.incarnation == latest[tag.step]), key=_by_step)


def every_commit(registers: Readable, steps: int, samples: Stretch) -> list[tuple[Tag, Commit]]:
    """Return every COMMIT that stands for the steps before `steps`: by incarnation, generation and step."""
    found: list[tuple[Tag, Commit]] = []
    incarnation = 1
    while (record := registers.read(generation_key(incarnation))) is not None:
        for number in range(1, decode_generation(record).number + 1):
            stands = registers.read(decisions_key(incarnation, number))
            decided = None if stands is None else decode_decided(stands)
            if decided is None or decided.commit is None:
                continue
            newest = decided.commit
            for step in range(decided.first, min(decided.last, steps)):
                first, count = samples(step)
                divisor = count if newest.divisor == newest.samples else newest.divisor
                found.append((Tag(incarnation, number, step, 0), Commit(newest.members, first, count, divisor, "")))
            if decided.last < steps:
                found.append((Tag(incarnation, number, decided.last, 0), newest))
        incarnation += 1
    return found


def audit(registers: Readable, steps: int, *, resumed: bool = False) -> list[str]:
    """Return what is wrong with a job's decisions, in words.

    Args:
        registers: The job's.
        steps: How many steps it has finished.
        resumed: Whether steps after a checkpoint may have been done again in a later incarnation.
    """
    tags = [tag for tag, _ in every_commit(registers, steps, lambda step: (0, 0))]
    twice = [what for what, times in Counter((tag.incarnation, tag.step) for tag in tags).items() if times > 1]
    wrong = [f"step {step} is committed twice in incarnation {number}" for number, step in twice]
    again = [step for step, times in Counter(tag.step for tag in tags).items() if times > 1]
    wrong += [] if resumed else [f"step {step} is committed twice" for step in again]
    return wrong + [f"step {step} is not committed" for step in sorted(set(range(steps)) - {tag.step for tag in tags})]


def _by_step(found: tuple[Tag, Commit]) -> int:
    return found[0].step
