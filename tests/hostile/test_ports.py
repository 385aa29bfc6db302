"""Whoever can reach a port of ours: it stays open for others, and says nothing to those who may not read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ringside.monitor.alerts.live import Endpoint
from ringside.view.export.prometheus import PLACES, MetricsServer

from .growth import growth

LIMIT_S = 30.0
PAGE = b"ringside_steps_total 1\n"


@contextlib.contextmanager
def metrics(page: bytes = PAGE, token: str = "", reader_s: float = LIMIT_S) -> Iterator[str]:
    server = MetricsServer(Endpoint("127.0.0.1", 0, token), lambda accept: (page, "text/plain"), reader_s=reader_s)
    try:
        yield server.url
    finally:
        server.close()


def get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, bytes]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def dribbling(url: str, count: int) -> Iterator[list[socket.socket]]:
    """So many clients in the middle of a request."""
    place = urlsplit(url)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((str(place.hostname), place.port), LIMIT_S))
            for _ in range(count)
        ]
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        yield clients


def dribble(clients: list[socket.socket]) -> None:
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(b"a")


def ends(client: socket.socket) -> bool:
    """Send byte after byte until the other side has hung up."""
    client.settimeout(0.02)
    for _ in range(round(LIMIT_S / 0.02)):
        try:
            client.sendall(b"a")
            if client.recv(1000) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("count", [8, PLACES, 3 * PLACES])
def test_slow_clients_do_not_shut_prometheus_out(count: int) -> None:
    """Hole B13: eight of them did, without a token."""
    with metrics(token="sesame") as url, dribbling(url, count) as clients:
        for _ in range(10):
            dribble(clients)
            assert get(url, Authorization="Bearer sesame") == (200, PAGE)


def test_clients_that_do_not_read_do_not_shut_prometheus_out() -> None:
    page = PAGE * 100_000
    with metrics(page) as url, contextlib.ExitStack() as stack:
        for _ in range(PLACES + 1):
            place = urlsplit(url)
            client = stack.enter_context(socket.create_connection((str(place.hostname), place.port), LIMIT_S))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert get(url) == (200, page)


def test_a_metrics_reader_has_so_long_in_all() -> None:
    """It had so long for each byte."""
    with metrics(reader_s=0.2) as url, dribbling(url, 1) as (client,):
        assert ends(client)
    page = PAGE * 500_000
    with metrics(page, reader_s=0.2) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place = urlsplit(url)
        client.connect((str(place.hostname), place.port))
        client.settimeout(LIMIT_S)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while block := client.recv(1 << 16):
                got += len(block)
                if got < 100_000:
                    time.sleep(0.02)  # a slow reader, at first
    assert 0 < got < len(page)


def test_a_web_page_cannot_read_metrics_under_a_name_of_its_own() -> None:
    with metrics() as url:
        port = urlsplit(url).port
        for own in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", socket.gethostname().upper()):
            assert get(url, Host=own) == (200, PAGE)
        for foreign in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1]evil", ""):
            assert get(url, Host=foreign)[0] == 421
    with metrics(token="sesame") as url:  # no page knows that, and proxies and clusters have names of their own
        assert get(url, Host="metrics.cluster", Authorization="Bearer sesame") == (200, PAGE)
        assert get(url, Host="metrics.cluster")[0] == 401


@pytest.mark.parametrize("line", [b"\0" * 50, b"GET", b"POST /metrics HTTP/1.1", b"GET /metrics HTTP/9.9"])
def test_what_is_no_request_is_refused(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with metrics() as url:
        place = urlsplit(url)
        with socket.create_connection((str(place.hostname), place.port), LIMIT_S) as client:
            client.sendall(line + b"\r\n\r\n" + b"x" * 20_000)
            with contextlib.suppress(ConnectionResetError):
                assert PAGE not in client.recv(10_000)
        assert get(url) == (200, PAGE)
    assert not caplog.records


# ------------------------------------------------------------------------------------------------ the live page


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A page server of few places."""
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("ringside.view.server.app.OPEN_AT_MOST", 32)
    from tests.view.served import serving

    unknown = {"name": "a", "command": [], "hosts": [], "pids": [], "engine": "", "algorithm": "", "versions": {}}
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "started_unix": 1, "world_size": 1, **unknown}))
    with serving(tmp_path, token="sesame") as url:
        yield url


@pytest.mark.parametrize(
    "path", ["/?" + "&".join(f"a{n}=1" for n in range(100)), "/?" + "&" * 5000 + "token", "/?%ff=%"]
)
def test_a_question_that_cannot_be_read_is_answered_before_anything_is_known(
    page: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Hole C4: it gave 500 and a traceback."""
    assert get(page, path)[0] == 401
    assert not caplog.records


def test_slow_clients_do_not_shut_the_page(page: str) -> None:
    with dribbling(page, 80) as clients:
        for _ in range(5):
            dribble(clients)
            assert get(page, "/api/now", Authorization="Bearer sesame")[0] == 200


def test_a_reader_keeps_its_place_from_those_who_only_connect(page: str) -> None:
    place = urlsplit(page)
    with socket.create_connection((str(place.hostname), place.port), LIMIT_S) as reader:
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n\r\n")
        stream = reader.makefile("rb")
        assert b" 200 " in stream.readline()
        with dribbling(page, 80):
            assert get(page, "/api/now", Authorization="Bearer sesame")[0] == 200
            while b"event-stream" not in stream.readline():
                pass
            while not stream.readline().strip():
                pass
        stream.close()


READERS = """
import encodings.idna, os, socket, sys
os.setgid(65534); os.setuid(65534)
clients = []
for _ in range(80):
    clients.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30))
    clients[-1].sendall(b"GET /events HTTP/1.1\\r\\nHost: localhost\\r\\nAuthorization: Bearer sesame\\r\\n\\r\\n")
    clients[-1].recv(1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_takes_no_place_of_a_reader_however_much_it_reads(page: str) -> None:
    place = urlsplit(page)
    with socket.create_connection((str(place.hostname), place.port), LIMIT_S) as reader:
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n\r\n")
        stream = reader.makefile("rb")
        assert b" 200 " in stream.readline()
        command = [sys.executable, "-c", READERS, str(place.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as others:
            assert others.stdout is not None
            assert others.stdout.readline() == "ready\n"
            assert get(page, "/api/now", Authorization="Bearer sesame")[0] == 200
            reader.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                while block := reader.recv(1 << 16):
                    pass
                pytest.fail(f"the reader was sent away: {block!r}")
            others.communicate()
        stream.close()


def test_users_are_found_by_either_kind_of_address() -> None:
    pytest.importorskip("uvicorn")
    from ringside.view.server.guard import listen, users_of

    for host in ("127.0.0.1", "::1"):
        with listen(host, 0) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection((host, port), LIMIT_S) as client:
                # Somebody else may have the same port at the other kind of address.
                assert users_of(port)[client.getsockname()[:2]] == os.geteuid()


def test_a_connection_that_asks_for_nothing_is_closed(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringside.view.server.app.PageConnection.request_timeout_s", 0.2)
    with dribbling(page, 1) as (client,):
        assert ends(client)


def test_a_cookie_of_any_length_is_read_in_one_pass() -> None:
    """`http.cookies` takes quadratic time for backslashes."""
    pytest.importorskip("starlette")
    from ringside.view.server.app import HttpGuard

    answered: list[int] = []

    async def send(message: Any) -> None:
        answered.extend([message["status"]] if message["type"] == "http.response.start" else [])

    guard = HttpGuard(None, token="sesame")  # type: ignore[arg-type]

    def asked(size: int) -> None:
        cookie = b'a="' + b"\\0" * size + b'"'
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"cookie", cookie)],
        }
        asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]

    assert growth(asked, 16_000) < 8
    assert set(answered) == {401}
