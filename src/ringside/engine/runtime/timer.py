"""A timer that one thread sleeps on and any other sets, without the sleeper being woken for it.

A timer of the kernel (timerfd, Linux): to move it is one call that takes a microsecond, while a thread that is woken to
learn of another time takes the interpreter's lock from the thread that set it.
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
    """A wake-up time for one sleeping thread; `set` is for one thread at a time, and for none after `close`."""

    def set(self, wakes_at: float) -> None:
        """Have `sleep` return at a time on the monotonic clock, seconds, in place of the one before; inf: never."""

    def sleep(self) -> None:
        """Return when it is time; it may be before."""

    def close(self) -> None:
        """Release it."""


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


_libc = ctypes.PyDLL(None)  # these calls wait for nothing, so the interpreter's lock is kept


class KernelTimer:
    """A timer of the kernel."""

    def __init__(self) -> None:
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError("the kernel gives no timer (timerfd_create)")
        self._setting = _Setting()
        self._setting_ref = ctypes.byref(self._setting)

    def set(self, wakes_at: float) -> None:
        """See `Timer`."""
        value = self._setting.value
        wakes_at_ns = 0 if wakes_at == math.inf else max(int(wakes_at * 1e9), _PAST_NS)  # 0 disarms it
        value.s, value.ns = divmod(wakes_at_ns, 1_000_000_000)
        _libc.timerfd_settime(self._fd, _ABSOLUTE, self._setting_ref, None)

    def sleep(self) -> None:
        """See `Timer`."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """See `Timer`."""
        os.close(self._fd)


class ThreadTimer:
    """A timer where the kernel gives none; the sleeper is woken whenever it is set to be earlier."""

    def __init__(self) -> None:
        self._wakes_at, self._earlier = math.inf, SimpleQueue[None]()

    def set(self, wakes_at: float) -> None:
        """See `Timer`."""
        before, self._wakes_at = self._wakes_at, wakes_at
        if wakes_at < before:
            self._earlier.put(None)

    def sleep(self) -> None:
        """See `Timer`."""
        left_s = self._wakes_at - time.monotonic()
        with contextlib.suppress(Empty):
            self._earlier.get(timeout=None if left_s == math.inf else max(left_s, 0.0))

    def close(self) -> None:
        """See `Timer`."""


def new_timer() -> Timer:
    """Return a timer that is not set."""
    try:
        return KernelTimer()
    except OSError:  # too many open files
        return ThreadTimer()
