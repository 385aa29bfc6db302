"""An alarm that one thread sleeps on and any other sets, without the sleeper being woken for it.

A timer of the kernel (timerfd, Linux): to move it is one call that takes a microsecond, while a thread that is woken to
hear of another time takes the interpreter's lock from whoever set it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from queue import Empty, SimpleQueue
from typing import Protocol

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_PAST_NS = 1  # 0 would be no time at all


class Timer(Protocol):
    """What one thread sleeps on; `set` is for one thread at a time, and for none after `close`."""

    def set(self, at: float) -> None:
        """Have `sleep` return at a time on the monotonic clock, seconds, in place of the one before; inf: never."""

    def sleep(self) -> None:
        """Return when it is time; it may be before."""

    def close(self) -> None:
        """Let go of it."""


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


_libc = ctypes.PyDLL(None)  # these calls wait for nothing, so the interpreter's lock is kept


class KernelTimer:
    """An alarm by a timer of the kernel."""

    def __init__(self) -> None:
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError("the kernel gives no timer (timerfd_create)")
        self._setting = _Setting()
        self._at = ctypes.byref(self._setting)

    def set(self, at: float) -> None:
        """See `Timer`."""
        value = self._setting.value
        at_ns = 0 if at == math.inf else max(int(at * 1e9), _PAST_NS)
        value.s, value.ns = divmod(at_ns, 1_000_000_000)
        _libc.timerfd_settime(self._fd, _ABSOLUTE, self._at, None)

    def sleep(self) -> None:
        """See `Timer`."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """See `Timer`."""
        os.close(self._fd)


class ThreadTimer:
    """An alarm where the kernel gives no timer; the sleeper is woken whenever it is set to be earlier."""

    def __init__(self) -> None:
        self._at, self._bell = math.inf, SimpleQueue[None]()

    def set(self, at: float) -> None:
        """See `Timer`."""
        before, self._at = self._at, at
        if at < before:
            self._bell.put(None)

    def sleep(self) -> None:
        """See `Timer`."""
        left_s = self._at - time.monotonic()
        with contextlib.suppress(Empty):
            self._bell.get(timeout=None if left_s == math.inf else max(left_s, 0.0))

    def close(self) -> None:
        """See `Timer`."""


def new_alarm() -> Timer:
    """Return an alarm that is not set."""
    try:
        return KernelTimer()
    except (AttributeError, OSError):  # another system, or too many open files
        return ThreadTimer()
