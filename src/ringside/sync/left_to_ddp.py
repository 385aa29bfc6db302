"""What went wrong with gradient buckets, which backward is to tell of in its own words.

Of a bucket's future that fails `backward` tells in a `RuntimeError`, whatever went wrong; and where an error is raised
before DDP has waited for its buckets, DDP is of no more use. So no future fails, and the error comes afterwards.
"""

from __future__ import annotations


class LeftToDdp:
    """What went wrong with the buckets of one backward.

    Errors come on whichever thread carried a bucket, the rest is called where backward runs.

    Attributes:
        is_heard: `end` is going to be called; else only a bucket's future can tell what went wrong with it.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self._problems: list[Exception] = []

    @property
    def is_fine(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self._problems

    def takes(self, error: Exception) -> bool:
        """Take a bucket's error, to be raised by `end`; False: the bucket's future is to tell it."""
        self._problems.append(error)
        return self.is_heard

    def begin(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._problems = []

    def end(self) -> None:
        """DDP does not wait any longer; raise what went wrong first."""
        error = self._problems[0] if self._problems else None
        self._problems = []
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep this frame, and the frame it


__all__ = ["LeftToDdp"]
