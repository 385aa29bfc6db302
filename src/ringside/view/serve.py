"""Serves the live page until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringside.view.serve_app import make_app
from ringside.view.serve_guard import Guard
from ringside.view.serve_port import listen, users_of
from ringside.view.serve_runs import Runs

OPEN_AT_MOST = 512
"""Connections, of which a page takes two: beyond it, one of whoever has most of them is closed."""
ASKING_S = 20.0
"""Within which a connection has to send a whole request, from its beginning and from each answer."""


class Connection(H11Protocol):
    """A connection that cannot keep others out by being slow: uvicorn itself waits for a request for ever."""

    asking_s = ASKING_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, if need be somebody else's."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._asking = self.loop.call_later(self.asking_s, self._close_if_idle)
        if len(self.connections) >= OPEN_AT_MOST:
            leaves = self._to_leave()
            self.connections.discard(leaves)
            leaves.transport.abort()

    def _to_leave(self) -> Any:
        """Return a connection of the user who has most of them: one that asks for nothing, else the oldest."""
        known = users_of(self.transport.get_extra_info("sockname")[1])
        open_ones: list[Any] = list(self.connections)
        users = [known.get(tuple(one.transport.get_extra_info("peername", ())[:2])) for one in open_ones]
        [(most, _)] = Counter(users).most_common(1)
        others = [one for one, user in zip(open_ones, users, strict=True) if user == most and one is not self]
        return min(others, key=lambda one: (not one.is_idle, one._since))

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._asking.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Let the time for the next request begin."""
        self._asking.cancel()
        self._asking = self.loop.call_later(self.asking_s, self._close_if_idle)
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether there is no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()


class PageServer:
    """Serves the page of some runs.

    Args:
        runs: What is shown; closed with the server.
        host: A numeric address of this host.
        port: 0 for any that is free.
        token: What readers must send; empty: nothing.
        names: More names that this host is called.

    Attributes:
        url: Where the page is.

    Raises:
        UsageError: The port cannot be had.
    """

    def __init__(self, runs: Runs, host: str, port: int, *, token: str = "", names: Iterable[str] = ()) -> None:
        self._runs, self._socket = runs, listen(host, port)
        self.url = _url(self._socket, host)
        guard = Guard(make_app(runs, stopping=self.is_stopping), token=token, names=names)
        config = uvicorn.Config(
            guard, log_level="error", access_log=False, server_header=False, ws="none", http=Connection,
            proxy_headers=False, timeout_graceful_shutdown=2, timeout_keep_alive=20,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def is_stopping(self) -> bool:
        """Whether it has been told to stop."""
        return self._server.should_exit

    def stop(self) -> None:
        """Tell it to stop; from any thread."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until it is told to stop, or by SIGINT and SIGTERM on the main thread."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._runs.close()


def serve(
    runs: Runs,
    host: str,
    port: int,
    *,
    token: str = "",
    names: Iterable[str] = (),
    tell: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve the page until Ctrl-C; return 0. The arguments are those of `PageServer`.

    Args:
        tell: Called with the page's address before it is served.

    Raises:
        UsageError: The port cannot be had.
    """
    server = PageServer(runs, host, port, token=token, names=names)
    tell(server.url)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0


def _url(listening: socket.socket, host: str) -> str:
    address, port = listening.getsockname()[:2]
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(address, address)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
