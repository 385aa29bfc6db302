"""How the ranks of a job and the reducer at their switch meet: over a part of the job's store with a fixed name."""

from __future__ import annotations

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.net.rank_map import Roster
from ringside.errors import UsageError

_PREFIX = "ringside/switch"


class SwitchPlan(msgspec.Struct):
    """What rank 0 tells the reducer.

    Args:
        ranks: Number of ranks; the reducer is the vertex of this number.
        leaders: The first rank of each host.
        message_bytes: Largest payload of one message.
    """

    ranks: int
    leaders: list[int]
    message_bytes: int


def join_switch(store: Store, roster: Roster, message_bytes: int) -> Store:
    """Return the part of the store over which ranks and the reducer meet; rank 0 tells the reducer who there is.

    Raises:
        UsageError: On all ranks: this store's reducer has met a communicator already.
    """
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    shared = PrefixStore(_PREFIX, root)
    if shared.add(f"joined/{roster.rank}", 1) > 1:  # a communicator is made by all ranks, so all see the same
        raise UsageError("the reducer at the switch serves one communicator, and this job has one with switch=True")
    if roster.rank == 0:
        plan = SwitchPlan(roster.size, list(roster.lane(0)), message_bytes)
        shared.set("plan", msgspec.json.encode(plan).decode())
    return PrefixStore("messages", shared)


def meet_ranks(store: Store) -> tuple[SwitchPlan, Store]:
    """Wait for rank 0 and return, at the reducer, what it told and the part of the store to meet over."""
    shared = PrefixStore(_PREFIX, store)
    return msgspec.json.decode(shared.get("plan"), type=SwitchPlan), PrefixStore("messages", shared)
