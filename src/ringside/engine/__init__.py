"""Runs schedules: the communicator and what it stands on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from datetime import timedelta

from ringside.engine.communicator import Communicator
from ringside.engine.runtime.worker import Work
from ringside.engine.settings import Settings
from ringside.engine.shm.communicator import HostCommunicator
from ringside.errors import UnsupportedError, UsageError

__all__ = ["Communicator", "HostCommunicator", "Settings", "Work", "init"]

_counter = itertools.count()


def init(*, timeout: float | timedelta | None = None, environ: Mapping[str, str] | None = None) -> HostCommunicator:
    """Return a communicator over the ranks that torchrun (or anything that sets its variables) started.

    Reads RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Without RANK and WORLD_SIZE it is a world of
    one. Every rank must call it equally often.

    Args:
        timeout: Longest wait for other ranks in one collective, a `timedelta` or seconds (default
            RINGSIDE_TIMEOUT_S, else 1800).
        environ: Where to read the variables; None: this process's environment.

    Raises:
        UsageError: The variables do not fit together.
        UnsupportedError: The ranks are on several hosts, or the native core is not installed.
    """
    environ = os.environ if environ is None else environ  # as a default, `help` would print all of it
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(given) == 1:
        raise UsageError(f"{given[0]} is set but not both of RANK and WORLD_SIZE: start the ranks with torchrun")
    rank, size = _integer(environ, "RANK", 0), _integer(environ, "WORLD_SIZE", 1)
    local = _integer(environ, "LOCAL_WORLD_SIZE", size)
    if local != size:
        raise UnsupportedError(
            f"{size} ranks with {local} on this host: ringside.init() works on one host; between hosts call "
            "torch.distributed.init_process_group('gloo') and take ringside.communicator()"
        )
    # The key under which the ranks of one job, and of one restart of it, meet; the n-th call of each.
    parts = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    key = "/".join([*(environ.get(part, "") for part in parts), str(next(_counter))])
    return HostCommunicator(key, rank, size, Settings.of_environment(environ, timeout=timeout))


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={environ[name]!r} is not a number") from None
