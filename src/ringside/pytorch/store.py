"""What the ranks of a process group agree on before their gradients are reduced: by which engine."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside import _core
from ringside.processes import machine_id


@dataclass(frozen=True)
class EngineDecision:
    """What reduces gradients, and why.

    Args:
        engine: `ringside` or `native`.
        key: Names the communicator, where the engine is ringside.
        why: Why the engine is not ringside, in words.
        hosts: On how many hosts the ranks are, where the engine is ringside.
    """

    engine: str
    key: str = ""
    why: str = ""
    hosts: int = 1


class _Offer(msgspec.Struct):
    """What one rank can do: the machine it is on, and why it cannot use the engine (empty: it can)."""

    host: str
    objection: str


def host_name() -> str:
    """Return this host's name; RINGSIDE_HOST overrides it (a lab's hosts all have the machine's)."""
    return os.environ.get("RINGSIDE_HOST") or socket.gethostname()


def group_store(group: dist.ProcessGroup, purpose: str, *, own_connection: bool = False) -> Store:
    """Return a part of the job's store for one purpose of one group; every call gives a new, empty one.

    Args:
        group: The process group.
        purpose: Names the part.
        own_connection: Whether another thread will use it: a connection of its own does not wait for ours. (Making one
            can take seconds where reverse DNS is slow.)
    """
    name = f"ringside/{purpose}/{group.group_name}"
    store = dist.distributed_c10d._get_default_store()
    if own_connection:
        # A client of its own has a lock of its own. Not every store can be cloned (torch's can since 2.5).
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()  # type: ignore[attr-defined]
    # Counted in the store and not in this process, which may have been in another job's group of the same name before.
    number = store.add(f"{name}/calls/{dist.get_rank(group)}", 1)
    return PrefixStore(f"{name}/{number}", store)


class OwnTimeout:
    """The timeout that the script gave a group for its collectives on the host; it may give another one at any time.

    Args:
        group: The process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        backend: Any = group._get_backend(torch.device("cpu"))
        backend = getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
        self._options: Any = getattr(backend, "options", None)
        self._last: timedelta | None = getattr(self._options, "_timeout", None)

    def has_changed(self) -> bool:
        """Tell whether it is another one than at the last call."""
        if self._last is None:  # this backend of torch's keeps none
            return False
        last, self._last = self._last, self._options._timeout
        return bool(last != self._last)

    def seconds(self) -> float | None:
        """Return it; None: torch's default, and the script gave none (or that)."""
        last = self._last
        return None if last is None or last == dist.distributed_c10d.default_pg_timeout else last.total_seconds()


def agree_on_engine(group: dist.ProcessGroup, requested: str, objection: str) -> EngineDecision:
    """Agree with all ranks of the group on the engine. A collective.

    Args:
        group: The model's process group.
        requested: `auto`, `ringside` or `native`; rank 0's counts.
        objection: Why this rank cannot use the engine; empty if it can.
    """
    store, rank, size = group_store(group, "engine"), dist.get_rank(group), dist.get_world_size(group)
    if not _core.available():
        objection = objection or "the native core is not installed"
    store.set(f"offer/{rank}", msgspec.json.encode(_Offer(machine_id(), objection)).decode())
    if rank == 0:
        offers = [msgspec.json.decode(store.get(f"offer/{r}"), type=_Offer) for r in range(size)]
        objections = [f"rank {r}: {offer.objection}" for r, offer in enumerate(offers) if offer.objection]
        if requested == "native":
            decision = EngineDecision("native", why="asked for")
        elif objections:  # the lowest rank's is the reason
            decision = EngineDecision("native", why=objections[0])
        else:
            hosts = {offer.host for offer in offers}
            decision = EngineDecision("ringside", key=str(uuid.uuid4()), hosts=len(hosts))
        store.set("decision", msgspec.json.encode(decision).decode())
    return msgspec.json.decode(store.get("decision"), type=EngineDecision)


def first_error(group: dist.ProcessGroup, problem: str) -> str:
    """Return the problem of the lowest rank of the group that has one; empty if nobody has. A collective."""
    store, rank, size = group_store(group, "problem"), dist.get_rank(group), dist.get_world_size(group)
    store.set(str(rank), msgspec.json.encode(problem).decode())
    problems = [msgspec.json.decode(store.get(str(r)), type=str) for r in range(size)]
    return next((f"rank {r}: {text}" for r, text in enumerate(problems) if text), "")
