"""What is still open when the program ends is closed in good order, before the interpreter goes away."""

from __future__ import annotations

import atexit
import itertools
import logging
import weakref

from ringside.engine.lifetime import Lifetime

_log = logging.getLogger("ringside")


class AtExit:
    """Closes what was not, the oldest first: alike on all ranks, which may wait for each other there.

    No thread may be in the core, wait in Gloo or tell a future when the interpreter goes away. Of several of these the
    one that was made last has its turn first.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[int, Lifetime] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        atexit.register(self.close_all)

    def add(self, one: Lifetime) -> None:
        """Close it at exit, if it still is there; it is not kept alive."""
        self._open[next(self._numbers)] = one

    def close_all(self) -> None:
        """Close all that are there; one that cannot be does not keep the others open."""
        for _, one in sorted(self._open.items()):
            try:
                one.close()
            except Exception:
                _log.exception("what was open at exit could not be closed")
