"""Every error Ringside raises, in one small tree.

::

    RingsideError
    ├── UsageError            what was asked for cannot be: exit status 2
    │   ├── UnsupportedError  a dtype, device or platform Ringside does not handle (also a TypeError)
    │   └── ArgumentError     a process group's call does not fit together (also a RuntimeError, as torch's own are)
    ├── StoreGoneError        the job's store cannot be reached any more: exit status 75
    ├── FinalStateError       the job is over, and this rank cannot have its final state: exit status 76
    └── SyncError             a collective could not finish on this rank (also a RuntimeError, as torch's own are)
        ├── PeerLostError     a rank died or left; `.ranks` says who
        ├── MismatchError     ranks called different collectives; `.ranks` says who differs
        ├── DeadlineError     a rank did not arrive in time; `.ranks` says who (also a TimeoutError)
        └── ClosedError       the communicator was closed on this rank
"""

from __future__ import annotations

from collections.abc import Iterable


class RingsideError(Exception):
    """The base of all of Ringside's errors; the command line prints its message on one line."""

    exit_status = 1


class UsageError(RingsideError, ValueError):
    """Something was asked for that cannot be; the message says what exists instead."""

    exit_status = 2


class UnsupportedError(UsageError, TypeError):
    """A dtype, device or platform that Ringside does not handle; the message says what to use."""


class ArgumentError(UsageError, RuntimeError):
    """A process group's call does not fit together; the message has torch's words, for code that looks for them."""


class StoreGoneError(RingsideError):
    """The job's store cannot be reached any more; the message says what to look at."""

    exit_status = 75


class FinalStateError(RingsideError):
    """The job is over, and this rank cannot have its final state; the message says where that lies."""

    exit_status = 76


class SyncError(RingsideError, RuntimeError):
    """A collective could not finish on this rank.

    Args:
        message: What happened, in which collective, and what to do.
        ranks: The ranks it is about, ascending.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


class PeerLostError(SyncError):
    """One or more ranks died or left while others still needed them."""


class MismatchError(SyncError):
    """Ranks called collectives that do not fit together (operation, dtype, size, order)."""


class DeadlineError(SyncError, TimeoutError):
    """One or more ranks did not arrive before the deadline, though they are alive."""


class ClosedError(SyncError):
    """The communicator was already closed on this rank."""
