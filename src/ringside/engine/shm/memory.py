"""Symmetric memory: pieces of memory of every rank that all the others have mapped."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringside import _core
from ringside._core.enums import Status
from ringside.engine.shm.rendezvous import Hub, Parcel
from ringside.errors import DeadlineError, PeerLostError, RingsideError


@dataclass(frozen=True)
class Storage:
    """A piece of this rank's memory that can be shared by descriptor.

    Args:
        inode: (device, inode) of the file behind it: its identity, since addresses and descriptors are used again.
        fd: Descriptor of that file; stays the owner's.
        address: Where it is mapped in this process.
        size_bytes: Its size.
        owner: What keeps it mapped as long as it is known here; None: nothing, and it may go at any time.
    """

    inode: tuple[int, int]
    fd: int
    address: int
    size_bytes: int
    owner: Any = field(default=None, compare=False)


class SymmetricMemory:
    """The regions of one communicator: made, mapped by all ranks, and dropped when their owner is done with them.

    Every method but `register` and `unregister` is a collective.
    """

    def __init__(self, core: Any, hub: Hub, timeout_s: float) -> None:
        self._core, self._hub, self.timeout_s = core, hub, timeout_s
        self._regions: dict[tuple[int, int], int] = {}
        self._owners: dict[int, Any] = {}  # of regions; a communicator that fails may be about to make them private
        self._fresh: dict[int, Storage] = {}

    def allocate(self, size_bytes: int) -> Any:
        """Make `size_bytes` of symmetric memory on every rank; return this rank's as a uint8 array (page-rounded)."""
        rows: list[tuple[int, int]] = []
        fds: list[int] = []
        raw, problem = None, ""
        try:
            # Beyond that the kernel would kill this process, when it takes the pages.
            if size_bytes * self._hub.ranks > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise OSError(
                    errno.ENOMEM,
                    f"all ranks together ask for {size_bytes * self._hub.ranks} bytes, more than this host has",
                )
            fd, region, raw = self._core.new_region(size_bytes)
            rows, fds = [(region, raw.size)], [fd]
        except OSError as error:
            problem = f"rank {self._hub.rank} has no memory for it: {error}"
        self._trade(rows, fds, problem, needed=True)
        return raw

    def register(self, storage: Storage, address: int) -> tuple[int, int, bool]:
        """Return the region of a storage, where in it an address lies, and whether the peers have yet to map it.

        The region is -1 where it cannot be shared.
        """
        region = self._regions.get(storage.inode)
        if region is None:
            region = self._core.adopt_region(storage.address, storage.size_bytes, storage.fd)
            if region < 0:
                return -1, 0, False
            self._regions[storage.inode], self._owners[region] = region, storage.owner
            self._fresh[region] = storage
        return region, address - storage.address, region in self._fresh

    def unregister(self, inode: tuple[int, int]) -> None:
        """Forget a storage that is gone; the peers unmap it at the next exchange."""
        region = self._regions.pop(inode, None)
        if region is not None:
            self._fresh.pop(region, None)
            self._core.retire_region(region)
            del self._owners[region]

    def exchange(self) -> None:
        """Send the peers this rank's new storages and map theirs."""
        fresh, self._fresh = self._fresh, {}
        rows = [(region, storage.size_bytes) for region, storage in fresh.items()]
        self._trade(rows, [storage.fd for storage in fresh.values()], "")

    def _trade(self, rows: list[tuple[int, int]], fds: list[int], problem: str, *, needed: bool = False) -> None:
        """Exchange regions; a region that any rank failed to map is dropped by all of them.

        Args:
            rows: (region, bytes) of this rank's new ones.
            fds: Of each.
            problem: Why this rank has none; "": it has.
            needed: Without any of them it is an error.
        """
        # Send what is new and what is dead.
        own = {"new": rows, "dead": self._core.take_dead_regions(), "problem": problem}
        parcels = self._exchange(own, fds)
        # Unmap the peers' dead regions and map their new ones.
        failed: list[tuple[int, int]] = []
        for rank, parcel in enumerate(parcels):
            if rank != self._hub.rank:
                for region in parcel.value["dead"]:
                    self._core.drop_region(rank, region)
                new = parcel.value["new"]
                pairs = zip(new, parcel.fds or (-1,) * len(new), strict=True)  # none: too many files open somewhere
                failed += [
                    (rank, region) for (region, size), fd in pairs if not self._core.map_region(rank, region, fd, size)
                ]
            for fd in parcel.fds:
                os.close(fd)
        problems = [parcel.value["problem"] for parcel in parcels if parcel.value["problem"]]
        # Agree on the regions that all of them have.
        replies = self._exchange(failed)
        dropped = {(rank, region) for reply in replies for rank, region in reply.value}
        for rank, region in dropped:
            self._core.drop_region(rank, region)
        if problems or (dropped and needed):
            raise RingsideError("; ".join(problems) or "a rank could not map its peers' symmetric memory")

    def _exchange(self, value: Any, fds: Sequence[int] = ()) -> list[Parcel]:
        """Exchange through the hub; where that fails the ranks are out of step, and the communicator has to end."""
        try:
            return self._hub.exchange(value, fds, timeout_s=self.timeout_s)
        except (PeerLostError, DeadlineError) as error:
            status = Status.deadline if isinstance(error, DeadlineError) else Status.peer_lost
            self._core.give_up(status, list(error.ranks))
            raise
        except BaseException:
            self._core.give_up(Status.interrupted, [])
            raise


# -------------------------------------------------------------------------------------------------
# The memory that all ranks of a communicator share, handed from rank 0 to the others.


def obstacle(ranks: int, stage_bytes: int) -> str:
    """Return why this process can share no arena of so many ranks with others; "": it can, as far as it can tell."""
    if not _core.available():
        return "the native core is not installed"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(_core.native().create_arena(ranks, stage_bytes))
    except OSError as error:  # forbidden, or limited (ulimit -f)
        return f"no shared memory ({error})"
    return ""


def share_arena(native: Any, hub: Hub, stage_bytes: int, timeout_s: float) -> tuple[int, str]:
    """Make the arena on rank 0; return a descriptor of it on every rank, and a text that only these ranks know."""
    fds: tuple[int, ...] = ()
    problem = ""
    if hub.rank == 0:
        try:
            fds = (native.create_arena(hub.ranks, stage_bytes),)
        except OSError as error:
            problem = str(error)
    parcels = hub.exchange((problem, secrets.token_hex(16)), fds, timeout_s=timeout_s)
    for fd in fds:
        os.close(fd)
    problem, secret = parcels[0].value
    if problem:
        raise RingsideError(f"rank 0 cannot make shared memory: {problem}")
    if not parcels[0].fds:
        raise RingsideError(f"rank {hub.rank} has too many files open to receive shared memory: raise `ulimit -n`")
    for parcel in parcels[1:]:
        for fd in parcel.fds:
            os.close(fd)
    return parcels[0].fds[0], secret
