"""What breaks inside Ringside must not break training: an instrument or a listener that raises is dropped, and told of.

Exceptions only: Ctrl-C and exits pass. Synchronisation itself is no instrument: its errors must reach `backward()`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Guard:
    """Runs the calls of one instrument until the first that raises; or as a context manager, what is inside.

    Args:
        instrument: What it is, as the warning calls it.
        warning: What is not done any more, in place of a sentence about the instrument.

    Attributes:
        tripped: Whether one has raised; nothing runs after that.
    """

    def __init__(self, instrument: str = "", *, warning: str = "") -> None:
        self.tripped = False
        self._warning = warning or f"{instrument} failed inside Ringside and is dropped"

    def run(self, call: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """Call, unless it has tripped, and return the result; `default` where it raised or had tripped."""
        if self.tripped:
            return default
        try:
            return call(*args)
        except Exception as error:
            self.trip(error)
            return default

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self.trip(error)
        return isinstance(error, Exception)

    def trip(self, error: Exception) -> None:
        """Drop the instrument because of an error."""
        if not self.tripped:
            self.tripped = True
            # With the traceback: it is a bug of ours, or a system that we do not know.
            _log.warning("%s (%s: %s); training goes on", self._warning, type(error).__name__, error, exc_info=error)

    def guard(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return a call that does the same and never raises an Exception."""
        return functools.partial(self.run, call)


class Listeners(Generic[_T]):
    """Whom something is told; one that raises is told no more.

    Args:
        subject: What they are told, as the warning calls it.
        listeners: The first ones.
    """

    def __init__(self, subject: str, listeners: Iterable[Callable[[_T], object]] = ()) -> None:
        self._subject, self._listeners = subject, list(listeners)

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[_T], object]) -> None:
        """Tell this one, too, from now on."""
        self._listeners.append(listener)

    def notify(self, value: _T) -> None:
        """Tell all of them, in the order in which they came."""
        for listener in list(self._listeners):  # one may add another
            try:
                listener(value)
            except Exception:
                self._listeners.remove(listener)
                _log.exception("a listener for %s raised and will not be called again", self._subject)
