"""Serves the live page until it is told to stop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable

import uvicorn

from ringside.view.serve_app import make_app
from ringside.view.serve_guard import Guard
from ringside.view.serve_port import listen
from ringside.view.serve_runs import Runs

OPEN_AT_MOST = 512
"""Connections beyond it are answered 503: a page takes two."""


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
            guard, log_level="warning", access_log=False, server_header=False, ws="none", http="h11",
            proxy_headers=False, limit_concurrency=OPEN_AT_MOST, timeout_graceful_shutdown=2, timeout_keep_alive=20,
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
