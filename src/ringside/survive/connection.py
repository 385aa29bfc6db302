"""From what torchrun says in the environment to the job's registers."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from ringside._version import __version__
from ringside.decoding import UNDECODABLE
from ringside.engine.transports.base import Transport
from ringside.engine.transports.gloo import GlooTransport
from ringside.errors import MismatchError, RingsideError, UsageError
from ringside.survive.cluster.registers import MemoryRegisters, Registers, StoreRegisters
from ringside.survive.data.samples import Samples
from ringside.survive.state.kept import START

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
class StoreConnection:
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

    def open_transport(self, name: str, end: int, wanted: Callable[[], bool]) -> Transport:
        """Make a group of two that exchanges messages between hosts; see `OpenTransport`."""
        store, deadline = PrefixStore(name, self.store.clone()), time.monotonic() + MESSAGE_S
        store.set(f"come/{end}", "1")
        while not store.check([f"come/{1 - end}"]):
            if not wanted() or time.monotonic() > deadline:
                raise RuntimeError("the other end of a link did not come")
            time.sleep(_COME_S)  # a store could be waited on, but that wait could not be aborted
        return GlooTransport(store, end, 2, timeout_s=MESSAGE_S, joining_s=JOINING_S)

    def close(self) -> None:
        """End the threads that wait for the store."""
        for registers in (self.registers, self.listening):
            if isinstance(registers, StoreRegisters):
                registers.close()


def connect(environ: Mapping[str, str], number: int = 0) -> StoreConnection:
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
        return StoreConnection(0, 1, alone, alone)
    try:
        rank, ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{error} is missing in the environment or no number: start it by `torchrun ... -m ringside.survive`"
        ) from None
    try:
        patience = timedelta(seconds=_CONNECT_AGAIN_S if is_again(environ) else _CONNECT_S)
        store = TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        raise RingsideError(
            f"no store at {address}:{port} ({str(error).partition(chr(10))[0]}): is its host alive, and is the script "
            "started by `torchrun ... -m ringside.survive`?"
        ) from None
    job = f"{environ.get('TORCHELASTIC_RUN_ID', 'job')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    first: Any = PrefixStore(f"ringside/survive/{job}" + (f"/{number}" if number else ""), store)
    return StoreConnection(rank, ranks, StoreRegisters(first, CALL_S), StoreRegisters(first.clone(), CALL_S), first)


def is_again(environ: Mapping[str, str]) -> bool:
    """Tell whether a keeper has started this worker before."""
    return environ.get(START, "1") != "1"


# -------------------------------------------------------------------------------------------------
# What makes a worker one of ours: the code it runs, its model, its optimizer, how its samples are cut.
#
# The first worker of a job writes it down once. Whoever comes later and differs is refused by name, before it has
# touched anything.


def fingerprint(
    model: nn.Module, optimizer: torch.optim.Optimizer, dataset: object, samples: Samples, seed: int
) -> dict[str, str]:
    """Return what this worker is, by name."""
    shapes = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in model.state_dict(keep_vars=True).items()
    ]
    script = "none"  # its name, and a digest of its text
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is not None and Path(path).is_file():
        script = f"{Path(path).name} {_hash(Path(path).read_bytes())}"
    return {
        "the version of ringside": __version__,
        "the version of torch": str(torch.__version__),
        "the script": script,
        "the model": _hash("\n".join([type(model).__name__, *shapes]).encode()),
        "the optimizer": f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
        "the data set": f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length",
        "an epoch": f"{samples.size} samples",
        "the batch": f"{samples.batch} samples",
        "the micro-batches": str(samples.micro_batches),
        "the seed": str(seed),
    }


def check_fingerprint(own: Mapping[str, str], standing: bytes, name: str) -> None:
    """Raise `MismatchError` unless this worker is what the job's first one wrote down.

    Args:
        own: This worker's.
        standing: What was written down first.
        name: Who this worker is, in words.
    """
    try:
        first = msgspec.json.decode(standing, type=dict[str, str])
    except UNDECODABLE:
        raise MismatchError(
            f"{name} is refused: another job uses this one's name in the store; give it another"
        ) from None
    different = [
        f"{what} ({own.get(what, 'nothing')} here, {first.get(what, 'nothing')} there)"
        for what in sorted({*own, *first})
        if own.get(what) != first.get(what)
    ]
    if different:
        raise MismatchError(
            f"{name} is refused, it differs from the job it wants to join in {'; '.join(different)}: start it with the "
            "same code and settings, or start a new job"
        )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
