"""Wait until all have come to make connections: a wait of Gloo's for one that has not cannot be ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch.distributed.distributed_c10d import Store

from ringside.engine.transports.base import LinkError, LinkFailure

_POLL_S, _MOST_POLL_S = 0.005, 0.1


def await_arrivals(
    store: Store,
    rank: int,
    members: Iterable[int],
    timeout_s: float,
    attend: Callable[[int], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Tell the others that this rank has come, and return when all of them have.

    Args:
        store: A part of the job's store that only these connections use.
        rank: This rank.
        members: All that take part.
        timeout_s: Longest wait, seconds.
        attend: Called with the rank that is waited for at every look; raises where it makes no sense to wait.
        clock: Returns monotonic seconds.
        sleep: Waits so many seconds.

    Raises:
        LinkError: A rank has not come in time.
    """
    store.set(f"come/{rank}", "1")
    began, pause_s = clock(), _POLL_S
    for member in members:
        while member != rank and not store.check([f"come/{member}"]):
            attend(member)
            if clock() - began > timeout_s:
                raise LinkError(LinkFailure("late", member), "it has not come")
            sleep(pause_s)
            pause_s = min(1.3 * pause_s, _MOST_POLL_S)
