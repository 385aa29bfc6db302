"""The threads of Gloo that read and write for a group: they do not take the processor from whoever sends.

A Gloo thread that wakes on the processor of the very thread that woke it, in the middle of a send, finds the connection
locked and asks again and again until its time is over, while the one that holds the lock does not run. Linux lets a
thread of the policy for batch jobs have its share as before, but does not put it in another's place when it wakes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NAME = "gloo"  # the kernel's names of these threads begin so


@contextlib.contextmanager
def patient_io_threads() -> Iterator[None]:
    """Have the Gloo threads that begin inside the `with` statement wait for their turn, where the system lets us."""
    before = _tasks()
    yield
    for task in _tasks() - before:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_ours = Path(f"/proc/self/task/{task}/comm").read_text().startswith(_NAME)
            if is_ours and os.sched_getscheduler(int(task)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))


def _tasks() -> set[str]:
    """Return the kernel's numbers of this process's threads."""
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()
