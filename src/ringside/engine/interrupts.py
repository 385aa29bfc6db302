"""Ctrl-C while the main thread waits inside torch, which Python by itself hears of only when the wait is over."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


class _Ear(threading.Thread):
    """Hears of signals as soon as they come, through the descriptor that Python's own handler writes them to."""

    def __init__(self) -> None:
        super().__init__(name="ringside-interrupts", daemon=True)
        self.pid = os.getpid()
        self.give_up: Callable[[], object] | None = None
        self.before = -1
        self._in, self.out = socket.socketpair()
        self.out.setblocking(False)
        self.start()

    def run(self) -> None:
        while signals := self._in.recv(64):
            give_up, before = self.give_up, self.before
            if before >= 0:
                with contextlib.suppress(OSError):
                    os.write(before, signals)
            if signal.SIGINT in signals and give_up is not None:
                give_up()


_ear: _Ear | None = None


@contextlib.contextmanager
def interruptible(give_up: Callable[[], object]) -> Iterator[None]:
    """Make a wait inside the `with` statement end at Ctrl-C, where that means `KeyboardInterrupt`.

    Signals that the program handles in its own way are left to it, since it may want to go on.

    Args:
        give_up: Ends what the main thread waits for; called on another thread.
    """
    global _ear
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    if _ear is None or _ear.pid != os.getpid():
        _ear = _Ear()
    ear = _ear
    ear.give_up, ear.before = give_up, signal.set_wakeup_fd(ear.out.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(ear.before)
        ear.give_up = None
