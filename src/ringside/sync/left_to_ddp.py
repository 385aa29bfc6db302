"""Gradient buckets that DDP itself waits for, one after the other.

DDP copies what a bucket brought into the gradients as soon as that is there, while later ones are under way; whoever
waits for all of them before DDP does has it copy everything at the end. But of a bucket's future that fails meanwhile
`backward` tells in a `RuntimeError`, whatever went wrong. So the future does not fail, and the error comes afterwards.
"""

from __future__ import annotations


class LeftToDdp:
    """Whether DDP waits for this backward's buckets, and what went wrong with them.

    Errors come on whichever thread carried a bucket, the rest is called where backward runs.
    """

    def __init__(self) -> None:
        self._is_left = False
        self._problems: list[Exception] = []

    def takes(self, error: Exception) -> bool:
        """Take a bucket's error, to be raised by `end`; False: the bucket's future is to tell it."""
        self._problems.append(error)  # before the look: either this sees that DDP waits, or `begin` sees the error
        return self._is_left

    def forget(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._is_left, self._problems = False, []

    def begin(self) -> bool:
        """Let DDP wait from now on; False: something has gone wrong already, and `end` raises it or a future does."""
        self._is_left = True
        if self._problems:
            self._is_left = False
        return self._is_left

    def end(self) -> None:
        """DDP does not wait any longer; raise what went wrong."""
        error = self._problems[0] if self._problems else None
        self.forget()
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep this frame, and the frame it


__all__ = ["LeftToDdp"]
