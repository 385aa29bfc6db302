"""Gradient buckets one after the other, each begun before the one before it is finished."""

from __future__ import annotations

from collections.abc import Callable

from ringside.errors import SyncError

Begin = Callable[[], Callable[[], None] | None]
"""Begins a bucket and returns what finishes it; None: it is done."""
Done = Callable[[Exception | None], None]
"""Told once how a bucket ended."""


class BucketPipeline:
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
            BaseException: What either of the two raised; both are told, of Ctrl-C as a `SyncError`.
        """
        try:
            finish = begin()
        except BaseException as error:
            told = _told(error)
            done(told)
            self._close(told)
            raise
        before, self._open = self._open, (finish or _nothing, done)
        try:
            if before is not None:
                _finish(*before)
            if last or finish is None:
                (finish, done), self._open = self._open, None
                _finish(finish, done)
        except BaseException as error:
            self._close(_told(error))
            raise

    def _close(self, error: Exception) -> None:
        if self._open is not None:
            (_, done), self._open = self._open, None
            done(error)


def _finish(finish: Callable[[], None], done: Done) -> None:
    try:
        finish()
    except BaseException as error:
        done(_told(error))
        raise
    done(None)


def _told(error: BaseException) -> Exception:
    """Return what others are told of an error that is for the thread which carried the bucket, such as Ctrl-C."""
    if isinstance(error, Exception):
        return error
    return SyncError(f"the gradients' synchronisation was interrupted on this rank ({type(error).__name__})")


def _nothing() -> None:
    """There is nothing left to do."""
