"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

WAIT_S = 20.0


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every rank's job, each on a thread; return what each returned or raised."""
    found: list[Any] = [None] * len(jobs)

    def run(rank: int) -> None:
        try:
            found[rank] = jobs[rank]()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return found
