"""Serves the live page until it is asked to stop, to this host alone or to whoever has the token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from importlib import resources
from importlib.abc import Traversable
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringside.text import counted, moment
from ringside.view.html.markup import Markup, fill
from ringside.view.server.feed import PageFeed, Runs
from ringside.view.server.guard import is_called, listen, own_names, users_of

# -------------------------------------------------------------------------------------------------
# The page over HTTP: its files, the run as JSON, and its state as it changes (Server-Sent Events).

HEARTBEAT_S = 10.0
POLL_S = 0.2
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
HIDDEN = ("runs.html",)
COOKIE = "ringside"
METHODS = ("GET", "HEAD")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class HttpGuard:
    """Lets requests through that may read, and answers all others itself: nothing can be changed over the page.

    A token comes as `Authorization: Bearer ...`, or once as `?token=...`, which sets a cookie and leads to the same
    address without it. The `Host` header must be an address, `localhost` or a name of this host: so no foreign page can
    read through a name of its own that it points here (DNS rebinding).

    Args:
        app: What to protect.
        token: What readers must send; empty: nothing.
        names: More names that this host is called, by a proxy for example.
    """

    def __init__(self, app: ASGIApp, *, token: str = "", names: Iterable[str] = ()) -> None:
        self._app, self._token = app, token.encode()
        self._names = own_names() | {name.lower() for name in names}
        self._pass = hmac.new(secrets.token_bytes(32), self._token, hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)  # what the application set itself stays
            await send(message)

        await self._choose(Request(scope))(scope, receive, send_with_headers)

    def _choose(self, request: Request) -> ASGIApp:
        """Return what answers a request."""
        if request.method not in METHODS:
            words = "this page is for reading: GET and HEAD only\n"
            return PlainTextResponse(words, 405, {"allow": ", ".join(METHODS)})
        if not is_called(request.headers.get("host", ""), self._names):
            return PlainTextResponse("this host is not called that; see --allow-host in docs/serve.md\n", 421)
        if not self._token or self._is_authorized(request):
            return self._app
        if self._equals(request.query_params.get("token", "").encode()):
            # Keep the token out of addresses that are bookmarked, logged and sent on.
            rest = urlencode([(name, value) for name, value in request.query_params.items() if name != "token"])
            where = f"./{quote(request.scope['path'].rsplit('/', 1)[-1])}" + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}={self._pass}; HttpOnly; SameSite=Strict; Path=/"
            return PlainTextResponse("", 303, {"location": where, "set-cookie": cookie})
        words = "a token is needed: open this page with ?token=..., or send Authorization: Bearer ...\n"
        return PlainTextResponse(words, 401, {"www-authenticate": "Bearer"})

    def _is_authorized(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equals(given.strip().encode("latin-1", "replace")):
            return True
        # Not `request.cookies`: that takes quadratic time for backslashes.
        cookies = (cookie.strip() for cookie in request.headers.get("cookie", "").split(";"))
        return any(hmac.compare_digest(cookie.encode(), f"{COOKIE}={self._pass}".encode()) for cookie in cookies)

    def _equals(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)


class _Handlers:
    """What answers requests, each on a thread of starlette's; it only ever reads.

    Args:
        runs: What is shown.
        stopping: Whether the server is about to stop: streams end then.
    """

    def __init__(self, runs: Runs, stopping: Callable[[], bool]) -> None:
        self._runs, self._stopping = runs, stopping

    def app(self) -> Starlette:
        """Return the application."""
        routes = []
        for prefix in ("", "/run/{key}"):
            routes += [
                Route(f"{prefix}/", self.page),
                Route(f"{prefix}/api/now", self.now),
                Route(f"{prefix}/api/steps", self.steps),
                Route(f"{prefix}/api/rank", self.rank),
                Route(f"{prefix}/events", self.events),
                Route(f"{prefix}/metrics", self.metrics),
                Route(f"{prefix}/web/{{name}}", self.file),
            ]
        routes += [Route("/runs", self.index), Route("/grafana.json", self.dashboard), Route("/favicon.ico", self.icon)]
        return Starlette(routes=routes)

    def page(self, request: Request) -> Response:
        self._feed(request)
        return _file_response("index.html")

    def now(self, request: Request) -> Response:
        """The newest state (see `state.now`), for pages and for `ringside top http://...`."""
        return Response(self._feed(request).state()[1], media_type="application/json")

    def steps(self, request: Request) -> Response:
        body = self._feed(request).rows(_number(request, "since"), request.query_params.get("epoch", ""))
        return Response(body, media_type="application/json")

    def rank(self, request: Request) -> Response:
        body = self._feed(request).rank(_number(request, "rank", -1))
        if body is None:
            return JSONResponse({"error": "there is no such rank"}, status_code=404)
        return Response(body, media_type="application/json")

    def events(self, request: Request) -> Response:
        stream = _stream(self._feed(request), request.headers.get("last-event-id", ""), self._stopping)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    def metrics(self, request: Request) -> Response:
        feed = self._feed(request)
        try:
            from ringside.view.export.prometheus import render
        except ImportError:
            message = "metrics need prometheus_client: pip install 'torch-ringside[metrics]'\n"
            return PlainTextResponse(message, status_code=501)
        figures = feed.figures()
        if figures is None:
            return PlainTextResponse("the run has not begun\n", status_code=503)
        page, kind = render(figures, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    def index(self, request: Request) -> Response:
        listed = self._runs.listed()
        lists = ""
        for live, title in ((True, "Active runs"), (False, "Ended runs")):
            rows = [
                fill(
                    '<li><a href="run/{key}/"><b>{name}</b>{state}<span>{ranks}</span><span>{began}</span></a></li>',
                    key=run.key,
                    name=run.name,
                    state=Markup('<span class="pill live">live</span>' if live else '<span class="pill">ended</span>'),
                    ranks=counted(run.ranks, "rank") if run.ranks else "not readable",
                    began=moment(run.started_unix) if run.started_unix else "",
                )
                for run in listed
                if run.live == live
            ]
            nothing = Markup('<li class="none">None on this machine.</li>')
            lists += fill('<h2>{}</h2><ul class="runs">{}</ul>', title, rows or nothing)
        page = _page_files()["runs.html"].read_text(encoding="utf-8").replace("<!--rows-->", lists)
        return Response(page, media_type="text/html")

    def file(self, request: Request) -> Response:
        return _file_response(request.path_params["name"])

    def dashboard(self, request: Request) -> Response:
        return _file_response("grafana.json")

    def icon(self, request: Request) -> Response:
        return Response(status_code=204)

    def _feed(self, request: Request) -> PageFeed:
        key = request.path_params.get("key")
        feed = self._runs.first() if key is None else self._runs.find(key)
        if feed is None:
            raise HTTPException(404, "there is no such run: see /runs for those there are\n")
        return feed


async def _stream(feed: PageFeed, last_id: str, stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The newest state whenever it changes: who reads slowly skips states, and holds up nobody.

    A reader that comes back with the id it saw last is sent nothing that it has.
    """
    seen, sent_at = last_id, time.monotonic()
    yield b"retry: 1000\n\n"
    while not stopping():
        number, state = feed.state()
        name = f"{feed.epoch}-{number}"
        if name != seen:
            yield b"id: %s\nevent: now\ndata: %s\n\n" % (name.encode(), state)
            seen, sent_at = name, time.monotonic()
        elif time.monotonic() - sent_at > HEARTBEAT_S:
            yield b": still here\n\n"
            sent_at = time.monotonic()
        await asyncio.sleep(POLL_S)


def _file_response(name: str) -> Response:
    """One of the page's own files; the names are those in the package, so no address leads out of it."""
    suffix = name[name.rfind(".") :]
    file = _page_files().get(name)
    if suffix not in KINDS or name in HIDDEN or file is None:
        return PlainTextResponse("there is no such file\n", status_code=404)
    return Response(file.read_text(encoding="utf-8"), media_type=KINDS[suffix])


def _page_files() -> dict[str, Traversable]:
    """The page's files by name; it shares the report's style, and how charts zoom."""
    static = resources.files("ringside.view").joinpath("static")
    shared = {name: static.joinpath(name) for name in ("report.css", "mesh.css", "brush.js")}
    return {**shared, **{file.name: file for file in static.joinpath("live").iterdir()}}


def _number(request: Request, name: str, otherwise: int = 0) -> int:
    try:
        return min(max(int(request.query_params.get(name, "")), -1), 1 << 62)
    except ValueError:
        return otherwise


OPEN_AT_MOST = 512
"""Connections, of which a page takes two: beyond it, one of whoever has most of them is closed."""
REQUEST_TIMEOUT_S = 20.0
"""Within which a connection has to send a whole request, from its beginning and from each answer."""


class PageConnection(H11Protocol):
    """A connection that cannot keep others out by being slow: uvicorn itself waits for a request for ever."""

    request_timeout_s = REQUEST_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; where all are taken, another connection is closed for it."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._request_timer = self.loop.call_later(self.request_timeout_s, self._close_if_idle)
        if len(self.connections) < OPEN_AT_MOST:
            return
        # Of the user who has most connections, one that waits for no answer has to go, else the oldest.
        known = users_of(self.transport.get_extra_info("sockname")[1])
        connections: list[Any] = list(self.connections)
        users = [known.get(tuple(each.transport.get_extra_info("peername", ())[:2])) for each in connections]
        [(most, _)] = Counter(users).most_common(1)
        others = [each for each, user in zip(connections, users, strict=True) if user == most and each is not self]
        evicted = min(others, key=lambda each: (not each.is_idle, each._since))
        self.connections.discard(evicted)
        evicted.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._request_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Let the time for the next request begin."""
        self._request_timer.cancel()
        self._request_timer = self.loop.call_later(self.request_timeout_s, self._close_if_idle)
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
        address, bound_port = self._socket.getsockname()[:2]
        # An address that stands for all of the host's is none that a browser can open.
        name = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{bound_port}/"
        handlers = _Handlers(runs, lambda: self._server.should_exit)
        guard = HttpGuard(handlers.app(), token=token, names=names)
        config = uvicorn.Config(
            guard, log_level="error", access_log=False, server_header=False, ws="none", http=PageConnection,
            proxy_headers=False, timeout_graceful_shutdown=2, timeout_keep_alive=20,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def stop(self) -> None:
        """Ask it to stop; from any thread."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until it is asked to stop, or by SIGINT and SIGTERM on the main thread."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._runs.close()
