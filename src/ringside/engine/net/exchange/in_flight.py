"""How many messages a long link has on their way, and over how many connections.

A link holds rate x round trip: so much is on its way, or has arrived and is not acknowledged, if it is never to stand
still. Two things bound what may be: messages have a place at their receiver, and the word of a new place takes half of
the round trip; and the kernel keeps what a connection has sent until it is acknowledged, in a buffer that grows by
itself, but not beyond a limit of the system. So a long link has more places, and where a buffer is too small, more
connections, whose messages take turns (`ringside.engine.transports.striping`).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path
from typing import NamedTuple

LONG_S = 2e-3
"""A link is long from this latency on, one way: busy machines make others look longer than they are, but not that."""
_MARGIN = 2  # x rate x round trip: a place is free once all has come, and the kernel's limits count more than bytes
_MORE_PLACES = 2  # the message that is received, and the one that is sent
PLACES_EACH = 2  # of a connection, at least: with one it stands still until the word of a new place is there
_MOST_PLACES, _MOST_CONNECTIONS = 64, 8
_LIMITS = Path("/proc/sys/net/ipv4")
_USUAL_BYTES = 4 << 20  # Linux's own limit, where it says nothing
_SHARE_OF_FILES = 0.25  # of what a process may still open, for connections
MOST_BYTES = 256 << 20  # places of all peers: every link has as many, and a rank of a large job may hear from all


class InFlight(NamedTuple):
    """What a link may have on its way.

    Args:
        places: Messages whose buffers are posted ahead.
        connections: Over which they travel in turn.
    """

    places: int
    connections: int


def in_flight(round_trip_bytes: float, segment_bytes: int, connection_bytes: float, most: float) -> InFlight:
    """Return what a link has on its way that is never to stand still.

    Args:
        round_trip_bytes: Rate x round trip.
        segment_bytes: Payload of a message.
        connection_bytes: What one connection can have on its way.
        most: Connections to a peer for which there is room.
    """
    needed = _MARGIN * round_trip_bytes
    connections = max(math.ceil(min(needed / connection_bytes, most, _MOST_CONNECTIONS)), 1)
    places = min(math.ceil(needed / segment_bytes) + _MORE_PLACES, _MOST_PLACES)
    return InFlight(max(places, PLACES_EACH * connections), connections)


def connection_bytes(limits: Path = _LIMITS) -> int:
    """Return what a TCP connection of this host can have on its way: the largest send buffer, half of a receive buffer.

    Args:
        limits: The kernel's, which a network namespace has its own of.
    """
    found = []
    for name, share in (("tcp_wmem", 1), ("tcp_rmem", 2)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(int((limits / name).read_text().split()[2]) // share)
    return min(found, default=_USUAL_BYTES)


def connections_allowed(peers: int) -> int:
    """Return how many connections to each of so many peers take no more than a share of what may still be opened."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    with contextlib.suppress(OSError):
        files -= len(os.listdir("/proc/self/fd"))
    return max(int(_SHARE_OF_FILES * files) // peers, 1)


def places_allowed(peers: int, place_bytes: int) -> int:
    """Return how many places of that size for each of so many peers take no more memory than they may."""
    return MOST_BYTES // (peers * place_bytes)
