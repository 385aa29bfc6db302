"""`/metrics` over HTTP: one page for whoever may read it, on a few threads that give up on slow readers."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ringside.monitor.alerts_settings import Endpoint

READERS = 8
READER_TIMEOUT_S = 5.0

Render = Callable[[str], tuple[bytes, str]]
"""From the value of the header `Accept` to a page and its content type."""

_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `/metrics` until it is closed.

    Args:
        endpoint: Where, and what to ask of readers.
        render: Makes the page.

    Attributes:
        url: Where the page is.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, endpoint: Endpoint, render: Render) -> None:
        self._server = _Server(endpoint, render)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="ringside-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, endpoint: Endpoint, render: Render) -> None:
        self.render, self.token = render, endpoint.token
        self._places = threading.BoundedSemaphore(READERS)
        self.address_family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        super().__init__((endpoint.host, endpoint.port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking the name server who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "ringside", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own; too many readers at a time are hung up on."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no news."""
        _log.debug("a reader of metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READER_TIMEOUT_S
    server_version, sys_version = "ringside", ""

    def do_GET(self) -> None:
        """Serve the page."""
        if self.path.split("?")[0] != "/metrics":
            self._answer(404, b"there is only /metrics here\n")
        elif not self._may_read():
            self._answer(401, b"send the token: Authorization: Bearer ...\n", ("WWW-Authenticate", "Bearer"))
        else:
            self._page()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Readers are not logged: stderr is the job's."""

    def _page(self) -> None:
        try:
            page, kind = self.server.render(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("metrics cannot be made; training goes on")
            self._answer(500, b"metrics cannot be made; the job's log says why\n")
            return
        self._answer(200, page, ("Content-Type", kind))

    def _may_read(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return not self.server.token or hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers or (("Content-Type", "text/plain; charset=utf-8"),):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
