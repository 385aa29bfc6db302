"""What breaks inside Ringside must not break training: an instrument that raises is dropped, with one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("ringside")


class Guard:
    """Runs the calls of one instrument until the first that raises.

    Args:
        instrument: What it is, as the warning calls it.

    Attributes:
        tripped: Whether one has raised; nothing runs after that.
    """

    def __init__(self, instrument: str) -> None:
        self.instrument = instrument
        self.tripped = False

    def run(self, call: Callable[..., object], *args: Any) -> None:
        """Call, unless it has tripped; never raises an Exception (Ctrl-C and exits pass)."""
        if self.tripped:
            return
        try:
            call(*args)
        except Exception as error:
            self.trip(error)

    def trip(self, error: Exception) -> None:
        """Drop the instrument because of an error."""
        if not self.tripped:
            self.tripped = True
            _log.warning(
                "%s failed inside Ringside (%s: %s) and is dropped; training goes on",
                self.instrument,
                type(error).__name__,
                error,
                exc_info=error,  # with the traceback: it is a bug of ours
            )

    def guard(self, call: Callable[..., object]) -> Callable[..., None]:
        """Return a call that does the same and never raises an Exception; its result is dropped."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.tripped:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.trip(error)

        return guarded
