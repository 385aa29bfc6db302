"""`Communicator(group)`: Ringside's collectives among the ranks of a process group, on one host or several."""

from __future__ import annotations

import atexit
import importlib.metadata
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ringside import _core
from ringside.engine.across import Across
from ringside.engine.background import Background, Work
from ringside.engine.calls import checked_op
from ringside.engine.choice import Choice
from ringside.engine.communicator import Communicator as HostCommunicator
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.exchange import Exchange
from ringside.engine.local_lanes import LocalLanes
from ringside.engine.roster import Roster, exchange_offers, make_roster, own_offer
from ringside.engine.settings import Settings
from ringside.engine.tensors import flatten
from ringside.engine.transports.torch_native import TorchNative
from ringside.engine.transports.torch_p2p import TorchPeerToPeer
from ringside.engine.wire import Wire
from ringside.sync.group import group_store


class Communicator:
    """All-reduce and friends among the ranks of a torch.distributed process group.

    Making one is a collective: every rank of the group must make it, in the same order.

    Args:
        group: A process group with at least 2 ranks, this one among them; None: the default group.
        timeout_s: Longest wait for other ranks in one collective, seconds (default RINGSIDE_TIMEOUT_S, else 1800).
        algorithm: How all-reduces between hosts are carried out, such as `ring` or `hosts/ring`
            (`ringside.engine.choice.Choice`); None: chosen by measurement.
        wire_dtype: `bfloat16` or `float16`: how float32 elements travel between hosts.
        machine: What tells hosts apart, in place of what the kernel says (for tests): ranks with equal values share
            memory.

    Raises:
        MismatchError: Ranks run different versions or have different settings; names who differs.
        UsageError: The group has fewer than 2 ranks, or there is no such algorithm.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        algorithm: str | None = None,
        wire_dtype: str | None = None,
        machine: str = "",
    ) -> None:
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.settings = Settings.of_environment(timeout_s=timeout_s)
        self._fixed = Choice.parse(algorithm) if algorithm else None
        self._wire = Wire(wire_dtype) if wire_dtype else None  # type: ignore[arg-type]
        store = group_store(group, "communicator")
        agreed = {"algorithm": str(self._fixed), "wire_dtype": str(wire_dtype), **_agreed(self.settings)}
        objection = "" if _core.available() else "the native core is not installed"
        offers = exchange_offers(store, self.rank, self.size, own_offer(agreed, objection, machine))
        self.roster: Roster = make_roster(self.rank, offers)
        self.local = self._open_local()
        self._across = self._open_across(store) if len(self.roster.hosts) > 1 else None
        self._background: Background | None = None
        self._closed = False
        _open.add(self)

    # -------------------------------------------------------------------------------------------- collectives

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce a tensor over all ranks, in place; every rank ends with bit-identical elements."""
        if self._across is None:
            return self.local.all_reduce(x, op, async_op, scale=scale, algorithm=algorithm)
        flat = flatten(x)
        code = checked_op(flat, op, scaled=scale != 1.0)
        choice = Choice.parse(algorithm) if algorithm else self._choose(flat.numel * ITEM_BYTES[flat.dtype])

        def job() -> Any:
            assert self._across is not None
            self._across.all_reduce(flat.address, flat.numel, flat.dtype, code, choice, scale=scale, wire=self._wire)
            flat.write_back()
            return x

        if async_op:
            return self.submit(job)
        if self._background is not None and not self._background.idle:
            return self.submit(job).wait()
        return job()

    def _choose(self, size_bytes: int) -> Choice:
        return self._fixed or Choice("ring", "hosts")

    # -------------------------------------------------------------------------------------------- life

    def submit(self, job: Any) -> Work:
        """Run a callable on the communicator's thread, after the collectives submitted before it."""
        if self._across is None:
            return self.local.submit(job)
        if self._background is None:
            self._background = Background(f"ringside-{self.rank}")
        return self._background.submit(job)

    def close(self) -> None:
        """Leave; peers that still need this rank get `PeerLostError`."""
        if self._closed:
            return
        self._closed = True
        if self._background is not None:
            self._background.stop(5.0)
        if self._across is not None:
            self._across.close()
        if self.local is not None:
            self.local.close()

    def _open_local(self) -> Any:
        key = self.roster.keys[self.roster.host]
        return HostCommunicator(key, self.roster.local_rank, self.roster.local_size, self.settings)

    def _open_across(self, store: Any) -> Across:
        timeout_s = self.settings.timeout_s
        transport = TorchPeerToPeer(PrefixStore("messages", store), self.rank, self.size, timeout_s=timeout_s)
        native = TorchNative(PrefixStore("native", store), self.rank, self.size, timeout_s=timeout_s)
        lanes = LocalLanes(self.local) if self.roster.local_size > 1 else None
        return Across(self.roster, Exchange(transport), lanes, native, timeout_s=timeout_s)


def _agreed(settings: Settings) -> dict[str, str]:
    """Return what all ranks must have alike."""
    version = importlib.metadata.version("ringside")
    return {"version of ringside": version, "RINGSIDE_* sizes": str(settings.agreed())}


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for communicator in list(_open):
        communicator.close()
