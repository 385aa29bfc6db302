"""What the ranks of a process group agree on before their gradients are reduced: by which engine."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside import _core
from ringside.processes import machine_id

_Offered = TypeVar("_Offered")
_Decided = TypeVar("_Decided")


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
    if not _core.available():
        objection = objection or "the native core is not installed"

    def choose(offers: list[_Offer]) -> EngineDecision:
        objections = [f"rank {r}: {offer.objection}" for r, offer in enumerate(offers) if offer.objection]
        if requested == "native":
            return EngineDecision("native", why="asked for")
        if objections:  # the lowest rank's is the reason
            return EngineDecision("native", why=objections[0])
        return EngineDecision("ringside", key=str(uuid.uuid4()), hosts=len({offer.host for offer in offers}))

    return decide(group, "engine", _Offer(machine_id(), objection), choose, EngineDecision)


def first_error(group: dist.ProcessGroup, problem: str) -> str:
    """Return the problem of the lowest rank of the group that has one; empty if nobody has. A collective."""

    def first(problems: list[str]) -> str:
        return next((f"rank {r}: {text}" for r, text in enumerate(problems) if text), "")

    return decide(group, "problem", problem, first, str)


def decide(
    group: dist.ProcessGroup,
    purpose: str,
    own: _Offered,
    choose: Callable[[list[_Offered]], _Decided],
    kind: type[_Decided],
) -> _Decided:
    """Have rank 0 decide by what all ranks of a group say, and return its decision on all of them. A collective.

    Only rank 0 reads what everybody has written: n reads of the store, not n².

    Args:
        group: The process group.
        purpose: Names what is decided.
        own: What this rank says.
        choose: Called on rank 0, with what all ranks say, by rank.
        kind: The type of a decision.
    """
    store, rank, size = group_store(group, purpose), dist.get_rank(group), dist.get_world_size(group)
    store.set(f"offer/{rank}", msgspec.json.encode(own).decode())
    if rank == 0:
        offers = [msgspec.json.decode(store.get(f"offer/{r}"), type=type(own)) for r in range(size)]
        store.set("decision", msgspec.json.encode(choose(offers)).decode())
    return msgspec.json.decode(store.get("decision"), type=kind)
