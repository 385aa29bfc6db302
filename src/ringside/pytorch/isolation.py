"""What breaks inside Ringside must not break training: an instrument that raises is dropped, and that is said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("ringside")


class Guard:
    """Runs the calls of one instrument until the first that raises.

    Args:
        what: The instrument, as the warning calls it.

    Attributes:
        blown: Whether one has raised; nothing runs after that.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.blown = False

    def run(self, call: Callable[..., object], *args: Any) -> None:
        """Call, unless the fuse has blown; never raises an Exception."""
        if self.blown:
            return
        try:
            call(*args)
        except Exception as error:
            self.blow(error)

    def blow(self, error: Exception) -> None:
        """Drop the instrument because of an error."""
        if not self.blown:
            self.blown = True
            _log.warning(
                "%s failed inside Ringside (%s: %s) and is dropped; training goes on",
                self.what,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def guard(self, call: Callable[..., object]) -> Callable[..., None]:
        """Return a call that does the same and never raises an Exception; its result is dropped."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.blown:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.blow(error)

        return guarded
