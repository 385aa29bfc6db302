"""The memory that all ranks of a communicator share, handed from rank 0 to the others."""

from __future__ import annotations

import os
import secrets
from typing import Any

from ringside.engine.rendezvous import Hub
from ringside.errors import RingsideError


def share_arena(native: Any, hub: Hub, stage_bytes: int, timeout_s: float) -> tuple[int, str]:
    """Make the arena on rank 0; return a descriptor of it on every rank, and a text that only these ranks know."""
    fds: tuple[int, ...] = ()
    problem = ""
    if hub.rank == 0:
        try:
            fds = (native.create_arena(hub.ranks, stage_bytes),)
        except OSError as error:
            problem = str(error)
    parcels = hub.exchange((problem, secrets.token_hex(16)), fds, timeout_s=timeout_s)
    for fd in fds:
        os.close(fd)
    problem, secret = parcels[0].value
    if problem:
        raise RingsideError(f"rank 0 cannot make shared memory: {problem}")
    if not parcels[0].fds:
        raise RingsideError(f"rank {hub.rank} has too many files open to receive shared memory: raise `ulimit -n`")
    for parcel in parcels[1:]:
        for fd in parcel.fds:
            os.close(fd)
    return parcels[0].fds[0], secret
