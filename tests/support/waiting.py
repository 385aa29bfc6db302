"""What tests wait for, and time that does not pass by itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0


def until(look: Callable[[], Any], what: str = "it") -> Any:
    """Look until there is something, and return it. For what gives no event to wait for.

    Args:
        look: Asked again and again; what others (threads, processes) bring about.
        what: What is looked for, in the message if it does not come within a minute.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.005)
    return found


def free_port() -> int:
    """Return a port that nobody listens on, below those that systems give away by themselves or nearly (60,000)."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if 10_000 <= port < 60_000:
            return port


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
