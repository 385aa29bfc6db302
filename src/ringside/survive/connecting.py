"""From what torchrun says in the environment to the job's registers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from ringside.engine.transports.torch_p2p import TorchPeerToPeer
from ringside.engine.transports.transport import Transport
from ringside.errors import RingsideError, UsageError
from ringside.survive.kept import START
from ringside.survive.registers import MemoryRegisters, Registers, StoreRegisters

CALL_S = 20.0
"""How long one call to the store may take; then it is taken for gone."""
MESSAGE_S = 600.0
"""How long one message may take, or a member to come to a link; whoever is late is found out otherwise, and sooner."""
JOINING_S = 1.5
"""How long the two ends of a link may take to exchange addresses once both are there; after five times as long without
an answer the link counts as silent."""
_COME_S = 0.01
_CONNECT_S = 60.0
_CONNECT_AGAIN_S = 10.0


@dataclass(frozen=True)
class Connection:
    """A worker's way to the job's registers.

    Args:
        rank: This rank.
        ranks: How many the job was started with.
        registers: For the training thread.
        listening: The same registers, over a connection of their own.
        store: The store; None: this process is alone.
    """

    rank: int
    ranks: int
    registers: Registers
    listening: Registers
    store: Any = None

    def open_transport(self, name: str, rank: int, ranks: int, wanted: Callable[[], bool]) -> Transport:
        """Make a group that exchanges messages between hosts; see `OpenTransport`."""
        store = PrefixStore(name, self.store.clone())
        _meet(store, rank, ranks, wanted)
        return TorchPeerToPeer(store, rank, ranks, timeout_s=MESSAGE_S, joining_s=JOINING_S)

    def close(self) -> None:
        """End the threads that wait for the store."""
        for registers in (self.registers, self.listening):
            if isinstance(registers, StoreRegisters):
                registers.close()


def _meet(store: Any, rank: int, ranks: int, wanted: Callable[[], bool]) -> None:
    """Return when all have come; raise `RuntimeError` when nobody wants them any more."""
    store.set(f"come/{rank}", "1")
    others, deadline = [f"come/{other}" for other in range(ranks) if other != rank], time.monotonic() + MESSAGE_S
    while not store.check(others):
        if not wanted() or time.monotonic() > deadline:
            raise RuntimeError("the other end of a link did not come")
        time.sleep(_COME_S)  # a store could be waited on, but not given up


def connect(environ: Mapping[str, str], number: int = 0) -> Connection:
    """Return the registers of the job that torchrun describes; those of this process alone where nobody launched it.

    Args:
        environ: The environment.
        number: How often this process has trained to the end before: each time has registers of its own.

    Raises:
        UsageError: The environment is no launcher's.
        RingsideError: The store cannot be reached.
    """
    if "RANK" not in environ:
        alone = MemoryRegisters()
        return Connection(0, 1, alone, alone)
    try:
        rank, ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{error} is missing in the environment or no number: start it by `torchrun ... -m ringside.survive`"
        ) from None
    first = _store(address, port, environ, number)
    return Connection(rank, ranks, StoreRegisters(first, CALL_S), StoreRegisters(first.clone(), CALL_S), first)


def is_again(environ: Mapping[str, str]) -> bool:
    """Tell whether a keeper has started this worker before."""
    return environ.get(START, "1") != "1"


def _store(address: str, port: int, environ: Mapping[str, str], number: int) -> Any:
    try:
        patience = timedelta(seconds=_CONNECT_AGAIN_S if is_again(environ) else _CONNECT_S)
        store = TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        raise RingsideError(
            f"no store at {address}:{port} ({str(error).partition(chr(10))[0]}): is its host alive, and is the script "
            "started by `torchrun ... -m ringside.survive`?"
        ) from None
    job = f"{environ.get('TORCHELASTIC_RUN_ID', 'job')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"ringside/survive/{job}" + (f"/{number}" if number else ""), store)
