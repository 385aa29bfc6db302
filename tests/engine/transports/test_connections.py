"""Which sockets are watched, and that a wait ends where the own host drops what it sends."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.support import zygote

pytest.importorskip("torch")

from ringside.engine.transports.gloo_internals import watched_connections
from ringside.lab import Lab
from ringside.lab.network import batch


def test_a_connection_whose_descriptor_was_another_socket_before_is_watched_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as stays:
        before = socket.socket()
        number = before.fileno()
        with watched_connections():
            before.close()  # by another thread, in real life
            fresh = socket.create_connection(server.getsockname())
        with fresh:
            assert fresh.fileno() == number
            assert fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
            after_s, every_s, times = (
                fresh.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert fresh.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert after_s + every_s * times == 3, "a peer that answers nothing is given up after as long"
            assert not stays.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_who_waits_hears_that_a_link_is_dead_though_the_own_queue_drops_all() -> None:
    """The kernel counts no keepalive that its own queue has dropped; so the connections must not be idle."""
    if reason := Lab.unavailable():
        pytest.skip(reason)
    ready: list[int] = []
    with Lab(hosts=2, wiring="mesh") as lab:

        def sink(place: Any, _stream: str, line: str) -> None:
            ready.extend([place.rank] * (line == "ready"))
            if line == "ready" and len(ready) == 2:
                for host in (0, 1):
                    full = f"qdisc replace dev to{1 - host} root tbf rate 1000000bit burst 2000 limit 1"
                    batch("tc", [full], lab.namespace(host))

        script = Path(__file__).parent / "scripts" / "waits_on_a_link.py"
        result = lab.run([zygote.python(), str(script)], timeout_s=60, sink=sink)
    assert len(ready) == 2, result.ranks[0].stderr
    for rank in result.ranks:
        assert not rank.ended, "it waits for ever"
        kind, vertex, detail = json.loads(rank.stdout.splitlines()[-1])
        assert (kind, vertex) == ("lost", 1 - rank.rank)
        assert "Timed out waiting" not in detail
