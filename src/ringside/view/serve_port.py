"""A port to listen on, and who holds it if somebody does."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

from ringside.errors import UsageError
from ringside.monitor.registry import running

LISTENING = "0A"
BACKLOG = 128
COMMAND_CHARACTERS = 80


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: A numeric address of this host.
        port: 0 for any that is free.

    Raises:
        UsageError: It cannot be had; the message says which process holds it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        if isinstance(error, OverflowError):
            raise UsageError(f"there is no port {port}: --port takes 0 (any that is free) to 65535") from None
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"port {port} at {host} cannot be had ({error.strerror or error}): give another --host or --port"
            ) from None
        raise UsageError(
            f"port {port} at {host} is held by {holder(port)}: give another --port, or 0 for any that is free"
        ) from None
    return listening


def holder(port: int) -> str:
    """Return in words which process of this host listens on a port, and which job it belongs to."""
    inodes = _listeners(port)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and inodes & _sockets(process):
            pid = int(process.name)
            job = next((f" of the job {entry.directory}" for entry in running() if entry.pid == pid), "")
            return f"process {pid}{job} ({_command(process)})"
    return "a process of another user" if inodes else "another process"


def users_of(port: int) -> dict[tuple[str, int], int]:
    """Return which user of this host is at the other end of the connections to a port, by address and port there."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            (own, own_port), (_, other_port) = (end.split(":") for end in fields[1:3])
            if int(other_port, 16) == port:
                found[_numeric(own), int(own_port, 16)] = int(fields[7])
    return found


def _numeric(address: str) -> str:
    """Return an address as the kernel's tables have it, words in this machine's order, as people write it."""
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    data = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _listeners(port: int) -> set[str]:
    """The inodes of the sockets that listen on a port, in any of this host's addresses."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _sockets(process: Path) -> set[str]:
    found = set()
    try:
        for file in (process / "fd").iterdir():
            try:
                found.add(os.readlink(file))
            except OSError:
                continue
    except OSError:
        return set()
    return found


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone by now"
    text = " ".join(word if "token" not in before else "..." for before, word in zip(["", *words], words, strict=False))
    text = "".join(character if character.isprintable() else "?" for character in text).strip()
    return text if len(text) <= COMMAND_CHARACTERS else text[: COMMAND_CHARACTERS - 1] + "…"
