"""`/metrics` over HTTP: one page for whoever may read it, on one thread; slow readers make place for others."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from ringside.monitor.alerts_settings import Endpoint
from ringside.view.serve_guard import is_called, own_names

PLACES = 128
"""Connections of which the request is not there yet, and as many to which a page is on its way."""
AT_ONCE = 32
"""Connections taken in at a time: too few for those that come together with Prometheus to take its place."""
QUEUE = 1024
"""Connections that wait to be taken in."""
READER_S = 10.0
"""From the connection to the last byte of the answer: as long as Prometheus waits by default."""
MOST_HEAD_BYTES = 16 << 10

Render = Callable[[str], tuple[bytes, str]]
"""From the value of the header `Accept` to a page and its content type."""

_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `/metrics` until it is closed.

    A reader has `reader_s` for all of it. Where there is no place left, the one that has held its place longest is hung
    up on: a request that comes whole is answered, whoever else holds connections open.

    Args:
        endpoint: Where, and what to ask of readers.
        render: Makes the page.
        reader_s: What one reader may take in all, in seconds.

    Attributes:
        url: Where the page is.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, endpoint: Endpoint, render: Render, *, reader_s: float = READER_S) -> None:
        listening = _listen(endpoint)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self.url = f"http://{host}:{listening.getsockname()[1]}/metrics"
        self._site = _Site(render, endpoint.token)
        self._reader_s = reader_s
        self._asking, self._reading = _Places(), _Places()
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="ringside-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        with contextlib.closing(self._loop), listening:
            self._loop.run_until_complete(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listening, limit=MOST_HEAD_BYTES, backlog=AT_ONCE)
        listening.listen(QUEUE)
        await self._closed.wait()
        server.close()
        readers = asyncio.all_tasks() - {asyncio.current_task()}
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._exchange(reader, writer), self._reader_s)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            _log.debug("a reader of metrics was too slow or went away", exc_info=True)
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._asking.taken():
            head = await reader.readuntil(b"\r\n\r\n")
        with self._reading.taken():
            writer.transport.set_write_buffer_limits(0)  # drained: all of it is with the kernel
            writer.write(_Handler(head, self._site).answer)
            await writer.drain()


def _listen(endpoint: Endpoint) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((endpoint.host, endpoint.port))
        listening.listen(QUEUE)
    except OSError:
        listening.close()
        raise
    return listening


class _Places:
    """So many readers at a time; who has been here longest makes place for the next."""

    def __init__(self) -> None:
        self._here: dict[asyncio.Task[Any], None] = {}

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        if len(self._here) >= PLACES:
            longest = next(iter(self._here))
            del self._here[longest]
            longest.cancel()
        self._here[task] = None
        try:
            yield
        finally:
            self._here.pop(task, None)


@dataclass(frozen=True)
class _Site:
    render: Render
    token: str
    names: frozenset[str] = field(default_factory=own_names)


class _Handler(BaseHTTPRequestHandler):
    """The answer to one request, all of which is there."""

    server_version, sys_version = "ringside", ""

    def __init__(self, head: bytes, site: _Site) -> None:
        self._site = site
        self.client_address = ("", 0)
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.wfile = self._written = io.BytesIO()
        self.handle()

    @property
    def answer(self) -> bytes:
        """All of it."""
        return self._written.getvalue()

    def do_GET(self) -> None:
        """Serve the page."""
        if self.path.split("?")[0] != "/metrics":
            self._answer(404, b"there is only /metrics here\n")
        elif not self._may_read():
            self._answer(401, b"send the token: Authorization: Bearer ...\n", ("WWW-Authenticate", "Bearer"))
        elif not self._is_asked_for_us():
            self._answer(421, b"this host is not called that; give its address, localhost, or set a token\n")
        else:
            self._page()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Readers are not logged: stderr is the job's."""

    def _page(self) -> None:
        try:
            page, kind = self._site.render(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("metrics cannot be made; training goes on")
            self._answer(500, b"metrics cannot be made; the job's log says why\n")
            return
        self._answer(200, page, ("Content-Type", kind))

    def _may_read(self) -> bool:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return not self._site.token or hmac.compare_digest(given, f"Bearer {self._site.token}".encode())

    def _is_asked_for_us(self) -> bool:
        """Whether no web page can be behind it that points a name of its own here; it would not know the token."""
        return bool(self._site.token) or all(
            is_called(host, self._site.names) for host in self.headers.get_all("Host", [])
        )

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers or (("Content-Type", "text/plain; charset=utf-8"),):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
