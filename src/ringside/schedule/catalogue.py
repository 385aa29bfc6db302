"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from ringside.errors import UsageError
from ringside.schedule.direct import direct
from ringside.schedule.ring import ring
from ringside.schedule.schedule import Schedule

ALGORITHMS: dict[str, Callable[[int], Schedule]] = {"ring": ring, "direct": direct}


def algorithm(name: str) -> Callable[[int], Schedule]:
    """Return the function that makes the schedule called `name`; raise `UsageError` listing what exists."""
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}; there are {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]


def by_name(name: str, ranks: int) -> Schedule:
    """Return the schedule called `name` for `ranks` ranks.

    Raises:
        UsageError: There is no such algorithm (the message lists those that exist), or `ranks` is below 1.
    """
    make = algorithm(name)
    if ranks < 1:
        raise UsageError(f"{name} needs at least 1 rank, not {ranks}")
    return make(ranks)
