"""Ctrl-C while the main thread waits inside torch; Python by itself runs its handler only when the wait is over."""

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

_log = logging.getLogger(__name__)

SAID_S = 3.0
"""How long Ctrl-C is held back without a message, seconds."""


class _SignalListener(threading.Thread):
    """Receives signals as soon as they come, through the descriptor that Python's own handler writes them to."""

    def __init__(self) -> None:
        super().__init__(name="ringside-interrupts", daemon=True)
        self.pid = os.getpid()
        self.waits: tuple[interruptible, ...] = ()
        self.previous_fd = -1  # where the program itself had set one; what we receive is passed on to it
        self._in, self.out = socket.socketpair()
        self.out.setblocking(False)
        self.out_fd = self.out.fileno()
        self.start()

    def run(self) -> None:
        while signals := self._in.recv(64):  # a byte for each signal: its number
            waits, previous_fd = self.waits, self.previous_fd
            if previous_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(previous_fd, signals)
            presses = signals.count(signal.SIGINT)
            if presses and ctrl_c.is_raised():
                for wait in waits:
                    wait.spares -= presses
                    if wait.spares < 0:
                        wait.interrupted = True
                        wait.abort()


_listener: _SignalListener | None = None


class interruptible:
    """Make a wait inside the `with` statement end at Ctrl-C, where that means `KeyboardInterrupt`.

    Signals that the program handles in its own way are left to it, since it may want to go on. It may be used again and
    again, not inside itself, but inside others, and they end in any order.

    Args:
        abort: Ends what the main thread waits for; called on another thread.

    Attributes:
        interrupted: Whether Ctrl-C ended the wait, also after it. Python raises `KeyboardInterrupt` wherever the main
            thread then is, and drops it where that is a destructor or the callback of a weak reference.
        spares: How many presses do not end it: in backward the first one (`ctrl_c`).
    """

    def __init__(self, abort: Callable[[], object]) -> None:
        self.abort = abort
        self.interrupted = False
        self.spares = 0
        self._listener: _SignalListener | None = None

    def start(self) -> None:
        """Listen from now on, where this is the main thread."""
        global _listener
        if threading.get_ident() != threading.main_thread().ident:
            return
        if _listener is None or _listener.pid != os.getpid():  # the first one, or a forked child
            _listener = _SignalListener()
        before = signal.set_wakeup_fd(_listener.out_fd, warn_on_full_buffer=False)
        if before != _listener.out_fd:  # ours is set inside another wait, and where another thread ended the last one
            _listener.previous_fd = before
        self.interrupted = False
        self.spares = int(ctrl_c.is_in_backward and not ctrl_c.came)
        _listener.waits += (self,)
        self._listener = _listener

    def stop(self, *_: object) -> None:
        """Listen no longer, if it did."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.waits = tuple(wait for wait in listener.waits if wait is not self)
            if not listener.waits and threading.get_ident() == threading.main_thread().ident:
                signal.set_wakeup_fd(listener.previous_fd)

    __enter__, __exit__ = start, stop


class _CtrlC:
    """What becomes of Ctrl-C during backward, where it means `KeyboardInterrupt`.

    With DDP alone it is raised when backward is over, because no Python runs before. Code of ours that backward calls
    would be broken off by it, and all ranks with it: so Ctrl-C that comes there is noted, and raised when DDP is done.
    Anywhere else it is raised as ever. While the other ranks are waited for, the second press ends the wait.

    Attributes:
        came: Whether it came, and was not raised.
        ends_wait: Whether the main thread is where the second one may be raised.
    """

    def __init__(self) -> None:
        self.came = self.ends_wait = False
        self._backwards = self._expected = 0
        self._codes: set[CodeType] = set()
        self._timer: threading.Timer | None = None
        self._handler: Callable[[int, FrameType | None], None] = self._on_sigint  # one object, compared by identity

    def is_raised(self) -> bool:
        """Return whether SIGINT means `KeyboardInterrupt`, now or when backward is over."""
        handler = _signal.getsignal(signal.SIGINT)
        return handler is signal.default_int_handler or handler is self._handler

    def spares(self, *functions: Callable[..., object]) -> None:
        """Name functions that backward calls, and that are not to be broken off."""
        self._codes.update(function.__code__ for function in functions)

    def expect(self) -> None:
        """A model's backward is to come, or comes: hold Ctrl-C back from now on."""
        self._expected += 1
        if _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not on the main thread, which alone handles signals
                _signal.signal(signal.SIGINT, self._handler)

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
        if self._expected == 0 and _signal.getsignal(signal.SIGINT) is self._handler:
            with contextlib.suppress(ValueError):
                _signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._backwards == 0 and self.pop()

    def pop(self) -> bool:
        """Return whether it came, and has now to be raised; it counts as raised then."""
        came, self.came = self.came, False
        return came

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        # Raise at once outside of the code that backward must not be broken off in, or at the second press.
        inside = frame
        while inside is not None and inside.f_code not in self._codes:
            inside = inside.f_back
        if inside is None or (self.came and self.ends_wait):
            self.came = self.ends_wait = False
            signal.default_int_handler(signum, frame)
        if not self.came:
            self.came = True
            self._timer = threading.Timer(SAID_S, self._warn)
            self._timer.daemon = True
            self._timer.start()

    def _warn(self) -> None:
        if self.came and self.is_in_backward:
            _log.warning(
                "Ctrl-C ends this rank when backward is over: the other ranks need its gradients, and it waits for "
                "them; press it again to end it now"
            )


ctrl_c = _CtrlC()
