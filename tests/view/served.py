"""A page server in this process for tests, and what speaks to it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringside.view.server.app import PageServer
from ringside.view.server.feed import PageFeed, Runs

LIMIT_S = 60.0


@contextmanager
def serving(
    path: Path, under: Path | None = None, make: Callable[[Path], PageFeed] | None = None, port: int = 0, **how: Any
) -> Iterator[str]:
    """Serve a run directory; the page's address."""
    runs = Runs(path, under or path.parent / "none", make or (lambda path: PageFeed(path, poll_s=0.05, quiet_s=0.3)))
    server = PageServer(runs, "127.0.0.1", port, **how)
    thread = threading.Thread(target=server.run, name="page-server")
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (lower case) and body of one request."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def told(url: str, path: str = "/api/now") -> dict[str, Any]:
    """Return a JSON answer."""
    status, _, body = ask(url, path)
    assert status == 200, body
    content: dict[str, Any] = json.loads(body)
    return content
