"""Ctrl-C while the main thread waits inside torch, which Python by itself hears of only when the wait is over."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType


class _Ear(threading.Thread):
    """Hears of signals as soon as they come, through the descriptor that Python's own handler writes them to."""

    def __init__(self) -> None:
        super().__init__(name="ringside-interrupts", daemon=True)
        self.pid = os.getpid()
        self.listeners: tuple[interruptible, ...] = ()
        self.before = -1
        self._in, self.out = socket.socketpair()
        self.out.setblocking(False)
        self.out_fd = self.out.fileno()
        self.start()

    def run(self) -> None:
        while signals := self._in.recv(64):
            listeners, before = self.listeners, self.before
            if before >= 0:
                with contextlib.suppress(OSError):
                    os.write(before, signals)
            default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if signal.SIGINT in signals and default:
                for listener in listeners:
                    listener.heard = True
                    listener.give_up()


_ear: _Ear | None = None


class interruptible:
    """Make a wait inside the `with` statement end at Ctrl-C, where that means `KeyboardInterrupt`.

    Signals that the program handles in its own way are left to it, since it may want to go on. It may be used again and
    again, not inside itself, but inside others, and they end in any order.

    Args:
        give_up: Ends what the main thread waits for; called on another thread.

    Attributes:
        heard: Whether Ctrl-C ended the wait, also after it. Python raises `KeyboardInterrupt` wherever the main thread
            then is, and drops it where that is a destructor or the callback of a weak reference.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self.give_up = give_up
        self.heard = False
        self._heard_by: _Ear | None = None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Listen from now on, where this is the main thread."""
        global _ear
        if threading.get_ident() != threading.main_thread().ident:
            return
        if _ear is None or _ear.pid != os.getpid():
            _ear = _Ear()
        before = signal.set_wakeup_fd(_ear.out_fd, warn_on_full_buffer=False)
        if before != _ear.out_fd:  # it is still set inside another wait, and where another thread ended the last one
            _ear.before = before
        self.heard = False
        _ear.listeners += (self,)
        self._heard_by = _ear

    def end(self) -> None:
        """Listen no longer, if it did."""
        ear, self._heard_by = self._heard_by, None
        if ear is not None:
            ear.listeners = tuple(listener for listener in ear.listeners if listener is not self)
            if not ear.listeners and threading.get_ident() == threading.main_thread().ident:
                signal.set_wakeup_fd(ear.before)


class held_back:
    """Hold Ctrl-C back inside the `with` statement for some seconds, where it means `KeyboardInterrupt`.

    What other ranks count on is finished if they come in time. The second Ctrl-C is not held back.

    Args:
        limit_s: How long, seconds; then `KeyboardInterrupt` is raised inside.

    Attributes:
        came: Whether it came, and has not been raised: that is left to the caller.
    """

    def __init__(self, limit_s: float) -> None:
        self.came = False
        self._limit_s = limit_s
        self._holds = False
        self._guard = threading.Lock()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> held_back:
        is_main = threading.get_ident() == threading.main_thread().ident
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._holds = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._holds:
            return
        try:
            with self._guard:  # the timer rings before this, or not at all
                self._holds = False
        finally:  # also where the second Ctrl-C comes just now
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._holds = False
            if self._timer is not None:
                self._timer.cancel()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.came or not self._holds:
            self.came = False
            signal.default_int_handler(signum, frame)
        self.came = True
        self._timer = threading.Timer(self._limit_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        with self._guard:
            if self._holds:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it from a lock, too
