"""A web server for tests of webhooks: remembers what it was sent and answers as it is told."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIMIT_S = 60.0


class HookServer:
    """Listens on this host alone.

    Attributes:
        url: What to give to a webhook.
        answers: Statuses to answer with, in turn; 204 when there are none left.
        silent: While set, nothing is answered at all until `close`.
    """

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.silent = threading.Event()
        self.closing = threading.Event()
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.heard.put({"type": self.headers["Content-Type"], "path": self.path, "json": json.loads(body)})
                if outer.silent.is_set():
                    outer.closing.wait(LIMIT_S)
                    return
                self.send_response(outer.answers.pop(0) if outer.answers else 204)
                self.send_header("Location", outer.url)
                self.send_header("Content-Length", "0")
                with contextlib.suppress(ConnectionError):  # the sender's time was up, and it has gone
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="hook-server")
        self._thread.start()

    def hear(self) -> dict[str, Any]:
        """Wait for the next message and return it: `type`, `path` and `json`."""
        return self.heard.get(timeout=LIMIT_S)

    def rest(self) -> list[dict[str, Any]]:
        """Return the JSON of all messages that are there and were not heard."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.heard.get_nowait()["json"])
        return found

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def hook_server() -> Iterator[HookServer]:
    """Give a server that is closed afterwards."""
    server = HookServer()
    try:
        yield server
    finally:
        server.close()
