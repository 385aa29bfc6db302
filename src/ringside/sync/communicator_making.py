"""What a communicator is made of: the memory of each host, and what carries messages between hosts."""

from __future__ import annotations

from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine import Communicator as HostCommunicator
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.hierarchical import Across
from ringside.engine.net.host_slices import LocalLanes
from ringside.engine.net.rank_map import Roster
from ringside.engine.settings import Settings
from ringside.engine.transports.gloo import TorchPeerToPeer
from ringside.engine.transports.gloo_all_reduce import TorchNative
from ringside.sync.switch import join_switch


def open_local(roster: Roster, settings: Settings) -> HostCommunicator | None:
    """Return the communicator of this host's ranks, who all make it; None where there is one rank."""
    if roster.local_size == 1:
        return None
    return HostCommunicator(roster.keys[roster.host], roster.local_rank, roster.local_size, settings)


def open_across(
    store: Store, roster: Roster, settings: Settings, local: HostCommunicator | None, *, switch: bool
) -> Across:
    """Return what carries all-reduces out between hosts. A collective of all ranks.

    Args:
        store: The communicator's part of the job's store.
        roster: Which ranks are on which host.
        settings: Tuning.
        local: The communicator of this host's ranks; None: there is one rank.
        switch: A reducer takes part as an additional vertex.
    """
    messages: Store = PrefixStore("messages", store)
    if switch:
        messages = join_switch(store, roster, settings.message_bytes)
    transport = TorchPeerToPeer(messages, roster.rank, roster.size + switch, timeout_s=settings.timeout_s)
    native = TorchNative(
        PrefixStore("native", store),
        roster.rank,
        roster.size,
        timeout_s=settings.timeout_s,
        has_lost=transport.has_lost,
    )
    lanes = LocalLanes(local) if local is not None else None
    exchange = Exchange(transport, segment_bytes=settings.message_bytes)
    across = Across(roster, exchange, lanes, native, timeout_s=settings.timeout_s, block_bytes=settings.block_bytes)
    across.on_timeout = (transport.set_timeout, native.set_timeout)
    return across
