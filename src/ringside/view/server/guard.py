"""Where the page listens, by which names it may be called, and who is at the other end of its connections."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Container, Iterator
from pathlib import Path

from ringside.errors import UsageError
from ringside.monitor.run.registry import running_runs

TOKEN = "RINGSIDE_SERVE_TOKEN"
_PORT = frozenset(":0123456789")


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
