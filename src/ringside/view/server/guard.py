"""Who may read the page: this host alone, or whoever has the token. Nothing can be changed over it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from ringside.errors import UsageError
from ringside.monitor.run.registry import running_runs

TOKEN = "RINGSIDE_SERVE_TOKEN"
COOKIE = "ringside"
METHODS = ("GET", "HEAD")
_PORT = frozenset(":0123456789")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_address(host: str, token: str) -> str:
    """Return the address to listen on.

    Args:
        host: An address of this host, or a name of it.
        token: What readers must send; empty: nothing.

    Raises:
        UsageError: It is none, or others could read and there is no token.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError):
        raise UsageError(f"--host {host!r} is no address of this host; give for example 127.0.0.1") from None
    if not address.is_loopback and not token:
        raise UsageError(
            f"at {address} others could read the page: give --token (or set {TOKEN}), or leave --host away and "
            "reach 127.0.0.1 through ssh -L"
        )
    return str(address)


def own_names() -> frozenset[str]:
    """Return the names that this host is called, in lower case."""
    return frozenset(("localhost", socket.gethostname().lower()))


def is_called(host: str, names: Container[str]) -> bool:
    """Return whether a `Host` header names an address or one of `names`: no foreign page's name that leads here."""
    name, _, port = host[1:].partition("]") if host.startswith("[") else host.partition(":")
    if not set(port) <= _PORT:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in names
    return True


class HttpGuard:
    """Lets requests through that may read, and answers all others itself.

    A token comes as `Authorization: Bearer ...`, or once as `?token=...`, which sets a cookie and leads to the same
    address without it. The `Host` header must be an address, `localhost` or a name of this host: so no foreign page can
    read through a name of its own that it points here (DNS rebinding).

    Args:
        app: What to protect.
        token: What readers must send; empty: nothing.
        names: More names that this host is called, by a proxy for example.
    """

    def __init__(self, app: App, *, token: str = "", names: Iterable[str] = ()) -> None:
        self._app, self._token = app, token.encode()
        self._names = own_names() | {name.lower() for name in names}
        self._pass = hmac.new(secrets.token_bytes(32), self._token, hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        send = _with_headers(send)
        if scope["method"] not in METHODS:
            await _answer(send, 405, "this page is for reading: GET and HEAD only\n", ("allow", ", ".join(METHODS)))
        elif not is_called(headers.get("host", ""), self._names):
            await _answer(send, 421, "this host is not called that; see --allow-host in docs/serve.md\n")
        elif not self._token or self._is_authorized(headers):
            await self._app(scope, receive, send)
        elif self._equals(_query_fields(scope).get("token", "").encode()):
            # Keep the token out of addresses that are bookmarked, logged and sent on.
            rest = urlencode([(name, value) for name, value in _query_fields(scope).items() if name != "token"])
            path = scope["path"].rsplit("/", 1)[-1]
            where = f"./{quote(path)}" + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}={self._pass}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, "", ("location", where), ("set-cookie", cookie))
        else:
            words = "a token is needed: open this page with ?token=..., or send Authorization: Bearer ...\n"
            await _answer(send, 401, words, ("www-authenticate", "Bearer"))

    def _is_authorized(self, headers: dict[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equals(given.strip().encode("latin-1", "replace")):
            return True
        cookies = (cookie.strip() for cookie in headers.get("cookie", "").split(";"))
        return any(hmac.compare_digest(cookie.encode(), f"{COOKIE}={self._pass}".encode()) for cookie in cookies)

    def _equals(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)


def _query_fields(scope: Scope) -> dict[str, str]:
    """The fields of the query; none where there are more than any page sends."""
    try:
        return dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=64))
    except ValueError:
        return {}


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            # What the application set itself stays.
            given = {name.lower() for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, words: str, *headers: tuple[str, str]) -> None:
    body = words.encode()
    plain = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body))), *headers]
    listed = [(name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in plain]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


# -------------------------------------------------------------------------------------------------
# A port to listen on, and who holds it if somebody does.

LISTENING = "0A"
BACKLOG = 128
COMMAND_CHARACTERS = 80


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: A numeric address of this host.
        port: 0 for any that is free.

    Raises:
        UsageError: It is not available; the message says which process holds it.
    """
    try:
        return bind(host, port, BACKLOG)
    except OverflowError:
        raise UsageError(f"there is no port {port}: --port takes 0 (any that is free) to 65535") from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"port {port} at {host} is not available ({error.strerror or error}): give another --host or --port"
            ) from None
        raise UsageError(
            f"port {port} at {host} is used by {holder(port)}: give another --port, or 0 for any that is free"
        ) from None


def bind(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at a numeric address; raise OSError or OverflowError where it is not available."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(backlog)
    except (OSError, OverflowError):
        listening.close()
        raise
    return listening


def holder(port: int) -> str:
    """Return in words which process of this host listens on a port, and which job it belongs to."""
    # The inodes of the sockets that listen on the port, at any of this host's addresses.
    inodes = set()
    for fields in _tcp_sockets():
        if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        open_files = set()
        with contextlib.suppress(OSError):  # another user's, or gone by now
            for file in (process / "fd").iterdir() if process.name.isdigit() else ():
                with contextlib.suppress(OSError):
                    open_files.add(os.readlink(file))
        if inodes & open_files:
            pid = int(process.name)
            job = next((f" of the job {entry.directory}" for entry in running_runs() if entry.pid == pid), "")
            return f"process {pid}{job} ({_command(process)})"
    return "a process of another user" if inodes else "another process"


def users_of(port: int) -> dict[tuple[str, int], int]:
    """Return which user of this host is at the other end of the connections to a port, by address and port there."""
    found = {}
    for fields in _tcp_sockets():
        (own, own_port), (_, other_port) = (end.split(":") for end in fields[1:3])
        if int(other_port, 16) == port:
            # Words in this machine's order.
            words = [bytes.fromhex(own[begin : begin + 8]) for begin in range(0, len(own), 8)]
            data = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
            address = socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)
            found[address, int(own_port, 16)] = int(fields[7])
    return found


def _tcp_sockets() -> Iterator[list[str]]:
    """Yield the fields of every TCP socket of this host, as the kernel lists them."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        yield from (line.split() for line in lines)


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone by now"
    # What follows an option that is called token is a secret.
    text = " ".join(word if "token" not in before else "..." for before, word in zip(["", *words], words, strict=False))
    text = "".join(character if character.isprintable() else "?" for character in text).strip()
    return text if len(text) <= COMMAND_CHARACTERS else text[: COMMAND_CHARACTERS - 1] + "…"
