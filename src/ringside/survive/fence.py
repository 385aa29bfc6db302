"""Giving an incarnation up: ABORT is won wherever one of its generations could still commit a step.

All who held state are gone, or seem to be. A stopped one may wake up, find all acknowledgements there, and commit; and
all of them may wake up and go on. So before the job resumes from a checkpoint the generation register is closed (no
later generation will be), and in every generation that may still be alive the next step is aborted: from the step at
which the generation was made, past the COMMITs that stand, to the first ABORT after it. A generation begins with that
very step or with the next, so an ABORT at the first of them proves nothing yet. (It does since the decisions of a
generation share a register, where an ABORT ends it; asking once more costs one call.)
"""

from __future__ import annotations

from dataclasses import dataclass

from ringside.survive.decision import Abort, Decision, Tag
from ringside.survive.generation import Generation


@dataclass(frozen=True)
class Fence:
    """How far the fencing is.

    Args:
        closed: The record that closes the incarnation.
        left: (number, step it was made at) of the generations still to be fenced off.
        ahead: How many steps after that the next question is about.
    """

    closed: Generation
    left: tuple[tuple[int, int], ...]
    ahead: int = 0

    @classmethod
    def around(cls, closed: Generation) -> Fence:
        """Return the fence to be built once `closed` stands."""
        return cls(closed, closed.unsettled)

    @property
    def done(self) -> bool:
        """Whether nothing of the incarnation can be committed any more."""
        return not self.left

    @property
    def tag(self) -> Tag:
        """What is to be aborted next, or found committed."""
        number, made_at = self.left[0]
        return Tag(self.closed.incarnation, number, made_at + self.ahead, 0)

    def after(self, decision: Decision) -> Fence:
        """Return the fence once a decision stands for `tag`."""
        if isinstance(decision, Abort) and self.ahead > 0:
            return Fence(self.closed, self.left[1:])
        return Fence(self.closed, self.left, self.ahead + 1)


__all__ = ["Fence"]
