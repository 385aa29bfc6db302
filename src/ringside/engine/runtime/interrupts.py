"""Ctrl-C while the main thread waits inside torch, which Python by itself hears of only when the wait is over."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # that of `signal` wraps what it returns in enums, which takes long
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import CodeType, FrameType

_log = logging.getLogger("ringside")

SAID_S = 3.0
"""How long Ctrl-C is held back without a word, seconds."""


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
            presses = signals.count(signal.SIGINT)
            if presses and ctrl_c.is_raised():
                for listener in listeners:
                    listener.spares -= presses
                    if listener.spares < 0:
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
        spares: How many do not: in backward the first one (`ctrl_c`).
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self.give_up = give_up
        self.heard = False
        self.spares = 0
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
        self.spares = int(ctrl_c.is_in_backward and not ctrl_c.came)
        _ear.listeners += (self,)
        self._heard_by = _ear

    def end(self) -> None:
        """Listen no longer, if it did."""
        ear, self._heard_by = self._heard_by, None
        if ear is not None:
            ear.listeners = tuple(listener for listener in ear.listeners if listener is not self)
            if not ear.listeners and threading.get_ident() == threading.main_thread().ident:
                signal.set_wakeup_fd(ear.before)


class _CtrlC:
    """What becomes of Ctrl-C during backward, where it means `KeyboardInterrupt`.

    DDP by itself hears of it when backward is over, because no Python runs before. Code of ours that backward calls
    would be broken off by it, and all ranks with it: so Ctrl-C that comes there is noted, and raised when DDP is done.
    Anywhere else it is raised as ever. While the other ranks are waited for, the second one ends the wait.

    Attributes:
        came: Whether it came, and was not raised.
        ends_wait: Whether the main thread is where the second one may be raised.
    """

    def __init__(self) -> None:
        self.came = self.ends_wait = False
        self._backwards = self._expected = 0
        self._codes: set[CodeType] = set()
        self._timer: threading.Timer | None = None
        self._noted: Callable[[int, FrameType | None], None] = self._note  # one object, to be known again

    def is_raised(self) -> bool:
        """Tell whether SIGINT means `KeyboardInterrupt`, now or when backward is over."""
        handler = _signal.getsignal(signal.SIGINT)
        return handler is signal.default_int_handler or handler is self._noted

    def spares(self, *functions: Callable[..., object]) -> None:
        """Name what backward calls, and what is not to be broken off."""
        self._codes.update(function.__code__ for function in functions)

    def expect(self) -> None:
        """A model's backward is to come, or comes: hold Ctrl-C back from now on."""
        self._expected += 1
        if _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not on the main thread, which alone hears of signals
                _signal.signal(signal.SIGINT, self._noted)

    def begin(self) -> None:
        """A model's backward that was expected has begun."""
        self._backwards += 1

    @property
    def is_in_backward(self) -> bool:
        """Whether any model's backward is under way."""
        return self._backwards > 0

    def end(self, *, begun: bool = True) -> bool:
        """A model's backward is over, or will not come; return whether the caller is to raise `KeyboardInterrupt`."""
        self._expected -= 1
        self._backwards -= begun
        if self._expected == 0 and _signal.getsignal(signal.SIGINT) is self._noted:
            with contextlib.suppress(ValueError):
                _signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._backwards == 0 and self.take()

    def take(self) -> bool:
        """Return whether it came, and has now to be raised."""
        came, self.came = self.came, False
        return came

    def _note(self, signum: int, frame: FrameType | None) -> None:
        inside = frame
        while inside is not None and inside.f_code not in self._codes:
            inside = inside.f_back
        if inside is None or (self.came and self.ends_wait):
            self.came = self.ends_wait = False
            signal.default_int_handler(signum, frame)
        if not self.came:
            self.came = True
            self._timer = threading.Timer(SAID_S, self._say)
            self._timer.daemon = True
            self._timer.start()

    def _say(self) -> None:
        if self.came and self.is_in_backward:
            _log.warning(
                "Ctrl-C ends this rank when backward is over: the other ranks need its gradients, and it waits for "
                "them; press it again to end it now"
            )


ctrl_c = _CtrlC()
