"""Gradient buckets one after the other, each begun before the one before it is finished."""

from __future__ import annotations

from collections.abc import Callable

Begin = Callable[[], Callable[[], None] | None]
"""Begins a bucket and returns what finishes it; None: it is done."""
Done = Callable[[Exception | None], None]
"""Told once how a bucket ended."""


class Pipeline:
    """Finishes a bucket when the next one is begun, or when it is the last of its backward.

    Which one is begun or finished when depends on nothing but the order of the buckets, so all ranks do the same. A
    backward that was broken off leaves one open; the next backward's first bucket finishes it.
    """

    def __init__(self) -> None:
        self._open: tuple[Callable[[], None], Done] | None = None

    def add(self, begin: Begin, done: Done, *, last: bool) -> None:
        """Begin a bucket, then finish the one before it.

        Args:
            begin: Begins it.
            done: Told how it ended.
            last: Finish it at once.

        Raises:
            Exception: What either of the two raised; both are told.
        """
        try:
            finish = begin()
        except Exception as error:
            done(error)
            self._close(error)
            raise
        before, self._open = self._open, (finish or _nothing, done)
        try:
            if before is not None:
                _finish(*before)
            if last or finish is None:
                (finish, done), self._open = self._open, None
                _finish(finish, done)
        except Exception as error:
            self._close(error)
            raise

    def _close(self, error: Exception) -> None:
        if self._open is not None:
            (_, done), self._open = self._open, None
            done(error)


def _finish(finish: Callable[[], None], done: Done) -> None:
    try:
        finish()
    except Exception as error:
        done(error)
        raise
    done(None)


def _nothing() -> None:
    """There is nothing left to do."""
