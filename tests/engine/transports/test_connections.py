"""Which sockets are watched, and that a wait ends where the own host drops what it sends."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
from typing import Any

import pytest

pytest.importorskip("torch")

from ringside.engine.transports.connections import watched_connections
from ringside.lab import Lab
from ringside.lab.tools import batch


def test_a_connection_whose_descriptor_was_another_socket_before_is_watched_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as stays:
        before = socket.socket()
        number = before.fileno()
        with watched_connections(4.0):
            before.close()  # by another thread, in real life
            fresh = socket.create_connection(server.getsockname())
        with fresh:
            assert fresh.fileno() == number
            assert fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
            assert not stays.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


WAITS = """
import json, os, time
import numpy as np
import torch.distributed as dist
from ringside.engine.transports.torch_p2p import TorchPeerToPeer
from ringside.engine.transports.transport import LinkError

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
transport = TorchPeerToPeer(store, rank, 2, timeout_s=90)
place = transport.receive(1 - rank, np.zeros(4, dtype=np.uint8))
time.sleep(0.5)  # until the kernels have acknowledged all that was sent
print("ready", flush=True)
try:
    place.wait()
except LinkError as error:
    print(json.dumps([error.cause.kind, error.cause.vertex, error.detail]), flush=True)
os._exit(0)
"""


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

        result = lab.run([sys.executable, "-c", textwrap.dedent(WAITS)], timeout_s=60, sink=sink)
    assert len(ready) == 2, result.ranks[0].stderr
    for rank in result.ranks:
        assert not rank.ended, "it waits for ever"
        kind, vertex, detail = json.loads(rank.stdout.splitlines()[-1])
        assert (kind, vertex) == ("lost", 1 - rank.rank)
        assert "Timed out waiting" not in detail
