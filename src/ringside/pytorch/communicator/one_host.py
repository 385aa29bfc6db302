"""All-reduces of a communicator whose ranks all share memory: the host's own, by the requested algorithm."""

from __future__ import annotations

from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine import HostCommunicator
from ringside.engine.algorithm import NATIVE, AlgorithmSpec, refuse_other_orders
from ringside.engine.buffers import flatten
from ringside.engine.dtypes import Op
from ringside.engine.net.attribution import explain
from ringside.engine.net.context import HostSlices
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap
from ringside.engine.settings import Settings
from ringside.engine.transports.base import LinkError
from ringside.engine.transports.gloo import GlooTransport
from ringside.engine.transports.gloo_all_reduce import GlooAllReduce
from ringside.errors import UnsupportedError
from ringside.pytorch.communicator.gpu import OnDevice, on_device
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.in_network_reducer import join_switch
from ringside.schedule import Schedule

_PATHS = ("one_shot", "direct")  # inside a host these are paths of the core, not programs


class OneHost:
    """Gives all-reduces to the host's communicator; there is nothing between hosts that a choice could be about.

    Args:
        local: The host's communicator.
        options: The communicator's.
        device: Reduces tensors on GPUs; None: nothing does.
    """

    def __init__(self, local: HostCommunicator, options: Options, device: OnDevice | None) -> None:
        self._local, self._options, self._device = local, options, device

    def all_reduce(
        self, x: Any, op: Op = "sum", async_op: bool = False, *, algorithm: str | Schedule | None = None, **how: Any
    ) -> Any:
        """All-reduce as `GroupCommunicator.all_reduce`; a schedule of one's own may be given, too."""
        try:
            if isinstance(algorithm, Schedule):
                return self._local.all_reduce(x, op, async_op, algorithm=algorithm, **how)
            # What is about hosts, or about torch's own collective, means nothing inside one.
            local: str | Schedule | None = None
            choice = AlgorithmSpec.parse(algorithm) if algorithm else self._options.choice
            if choice is not None and choice.over == "ranks" and choice.algorithm != NATIVE:
                if self._options.reproducible:
                    refuse_other_orders(choice, self._local.size, flatten(x).dtype)
                local = choice.algorithm if choice.algorithm in _PATHS else choice.schedule(self._local.size)
            return self._local.all_reduce(x, op, async_op, algorithm=local, **how)
        except UnsupportedError:
            if self._device is None or not on_device(x):
                raise
            return self._device.all_reduce(x, op, async_op, algorithm=algorithm, **how)


# -------------------------------------------------------------------------------------------------
# What a communicator is made of: the memory of each host, and the engine between hosts.


def open_local(roster: RankMap, settings: Settings) -> HostCommunicator | None:
    """Return the communicator of this host's ranks, who all make it; None where there is one rank."""
    if roster.local_size == 1:
        return None
    return HostCommunicator(roster.keys[roster.host], roster.local_rank, roster.local_size, settings)


def open_across(
    store: Store, roster: RankMap, settings: Settings, local: HostCommunicator | None, *, switch: bool
) -> HierarchicalEngine:
    """Return the engine between hosts. A collective of all ranks.

    Args:
        store: The communicator's part of the job's store.
        roster: Which ranks are on which host.
        settings: Tuning.
        local: The communicator of this host's ranks; None: there is one rank.
        switch: A reducer takes part as an additional vertex.

    Raises:
        PeerLostError: A rank died or cannot be reached while all connect to each other.
    """
    messages: Store = PrefixStore("messages", store)
    if switch:
        messages = join_switch(store, roster, settings.message_bytes)
    try:
        transport = GlooTransport(messages, roster.rank, roster.size + switch, timeout_s=settings.timeout_s)
    except LinkError as error:
        raise explain("connecting", error.cause, error, roster, settings.timeout_s) from error
    native = GlooAllReduce(
        PrefixStore("native", store),
        roster.rank,
        roster.size,
        timeout_s=settings.timeout_s,
        has_lost=transport.has_lost,
    )
    lanes = HostSlices(local) if local is not None else None
    exchange = Exchange(transport, segment_bytes=settings.message_bytes)
    across = HierarchicalEngine(
        roster, exchange, lanes, native, timeout_s=settings.timeout_s, block_bytes=settings.block_bytes
    )
    across.on_timeout = (transport.set_timeout, native.set_timeout)
    return across
