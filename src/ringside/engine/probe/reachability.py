"""Which links carry anything at all: plain TCP between all pairs of vertices, each bounded, before anything else.

A transport waits for a peer that it cannot reach, and then knows one end only; here every pair is tried by itself, all
at once, and both ends are named.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl

_SIOCGIFADDR = 0x8915
_HELLO = b"ringside"


@contextlib.contextmanager
def answering(address: str) -> Iterator[tuple[str, int]]:
    """Answer every connection inside the `with` statement; yield where it listens."""
    over = threading.Event()
    with socket.create_server((address, 0), backlog=1024) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=_serve, args=(server, over), name="ringside-listener", daemon=True)
        thread.start()
        try:
            host, port = server.getsockname()[:2]
            yield str(host), int(port)
        finally:
            over.set()
            thread.join()


def _serve(server: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError), server.accept()[0] as caller:
            caller.settimeout(1.0)
            caller.sendall(_HELLO)


def own_address(toward: str, port: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address that other hosts reach this one at.

    Args:
        toward: A host of the job, such as MASTER_ADDR: the address used to reach it is taken.
        port: Of it.
        environ: GLOO_SOCKET_IFNAME names an interface whose address is taken instead.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:  # ifr_name, and the address in a sockaddr_in behind it (netdevice(7))
            with contextlib.suppress(OSError):
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        # To connect a datagram socket sends nothing; the kernel only chooses the route.
        with contextlib.suppress(OSError):
            probe.connect((toward, port))
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def unreachable(peers: Mapping[int, tuple[str, int]], timeout_s: float) -> list[int]:
    """Return the peers that do not answer, ascending, after at most about `timeout_s`.

    Args:
        peers: Where each listens.
        timeout_s: How long each has, all of them at once, seconds.
    """
    if not peers:
        return []
    with ThreadPoolExecutor(min(len(peers), 64), "ringside-reach") as pool:
        answers = pool.map(lambda where: _answers(where, timeout_s), peers.values())
        return [peer for peer, answered in zip(peers, answers, strict=True) if not answered]


def _answers(where: tuple[str, int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection(where, timeout_s) as link:
            link.settimeout(max(deadline - time.monotonic(), 0.1))
            return link.recv(len(_HELLO)) == _HELLO
    except OSError:
        return False
