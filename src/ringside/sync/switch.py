"""How the ranks of a job and the reducer at their switch meet: over a part of the job's store with a fixed name."""

from __future__ import annotations

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.roster import Roster

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
    """Return the part of the store over which ranks and the reducer meet; rank 0 tells the reducer who there is."""
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    shared = PrefixStore(_PREFIX, root)
    if roster.rank == 0:
        plan = SwitchPlan(roster.size, list(roster.lane(0)), message_bytes)
        shared.set("plan", msgspec.json.encode(plan).decode())
    return PrefixStore("messages", shared)


def meet_ranks(store: Store) -> tuple[SwitchPlan, Store]:
    """Wait for rank 0 and return, at the reducer, what it told and the part of the store to meet over."""
    shared = PrefixStore(_PREFIX, store)
    return msgspec.json.decode(shared.get("plan"), type=SwitchPlan), PrefixStore("messages", shared)
