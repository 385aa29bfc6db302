"""Small all-reduces of the process group inside a host, which are begun at the call.

The payload is told to the other ranks at the call, which waits for nobody, and whoever waits for the result takes it
himself. Ranks that never meet in a wait still go on, since what they need of this one is there.
"""

from __future__ import annotations

from typing import Any

from ringside.engine import Communicator as HostCommunicator

MOST_RANKS = 8
MOST_READ_BYTES = 256 << 10  # every rank reads all payloads; with more of them that is the larger part


def is_small(comm: Any, size_bytes: int) -> bool:
    """Tell whether an all-reduce of that size is carried out in one shot; all ranks tell the same."""
    if not isinstance(comm, HostCommunicator) or comm.size > MOST_RANKS:
        return False
    return size_bytes <= comm.inline_bytes and size_bytes * comm.size <= MOST_READ_BYTES
