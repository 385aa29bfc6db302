"""Giving an incarnation up: ABORT is won wherever one of its generations could still commit a step.

All who held state are gone, or seem to be. A stopped one may wake up, find all acknowledgements there, and commit; and
all of them may wake up and go on. So before the job resumes from a checkpoint the generation register is closed (no
later generation will be), and every generation that may still be alive is ended: its decisions share a register, in
which an ABORT behind what is committed lets nothing follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringside.survive.generation import Generation


@dataclass(frozen=True)
class Fence:
    """How far the fencing is.

    Args:
        closed: The record that closes the incarnation.
        left: Numbers of the generations still to be fenced off.
    """

    closed: Generation
    left: tuple[int, ...]

    @classmethod
    def around(cls, closed: Generation) -> Fence:
        """Return the fence to be built once `closed` stands."""
        return cls(closed, tuple(number for number, _ in closed.unsettled))

    @property
    def done(self) -> bool:
        """Whether nothing of the incarnation can be committed any more."""
        return not self.left

    def after(self, number: int) -> Fence:
        """Return the fence once a generation has ended."""
        return Fence(self.closed, tuple(each for each in self.left if each != number))


__all__ = ["Fence"]
