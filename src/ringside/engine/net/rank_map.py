"""Which ranks are on which host, and that they fit together."""

from __future__ import annotations

import itertools
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import msgspec

from ringside.errors import DeadlineError, MismatchError, UsageError
from ringside.processes import machine_id
from ringside.text import timed_out


class Store(Protocol):
    """The part of a torch.distributed store that is needed here."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait for values; raise RuntimeError where one does not come in time."""


class RankInfo(msgspec.Struct, frozen=True):
    """What one rank publishes when a communicator is made.

    Args:
        machine: What ranks that can share memory have in common.
        host: The host's name.
        settings: Everything that all ranks must have set alike, by name.
        objection: Why this rank cannot share memory with others; empty if it can.
        nonce: Random; the first rank's of a host names what is shared there.
        problem: Why this rank cannot take part at all; empty if it can.
    """

    machine: str
    host: str
    settings: dict[str, str]
    objection: str = ""
    nonce: str = ""
    problem: str = ""


@dataclass(frozen=True)
class RankMap:
    """The ranks of a group by host.

    Args:
        rank: This rank.
        hosts: Ranks of each host, ascending; hosts by their lowest rank.
        names: The hosts' names.
        keys: Names what the ranks of each host share.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """This rank's host."""
        return self.host_of(self.rank)

    @cached_property
    def local_rank(self) -> int:
        """This rank's place among those of its host."""
        return self.hosts[self.host].index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return len(self.hosts[self.host])

    @property
    def lanes(self) -> int:
        """How many ranks of every host can carry a slice between hosts: as many as the smallest host has."""
        return min(map(len, self.hosts))

    @cached_property
    def in_rows(self) -> bool:
        """Whether all hosts have equally many ranks, more than one, and each host's follow each other."""
        size = self.local_size
        return size > 1 and self.hosts == tuple(tuple(range(h * size, (h + 1) * size)) for h in range(len(self.hosts)))

    def lane(self, index: int) -> tuple[int, ...]:
        """Return the ranks, one per host, that carry slice `index`."""
        return tuple(ranks[index] for ranks in self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return next(h for h, ranks in enumerate(self.hosts) if rank in ranks)

    def describe(self, rank: int) -> str:
        """Return `rank 5 on host node-2`."""
        return f"rank {rank} on host {self.names[self.host_of(rank)]}"


def own_rank_info(settings: dict[str, str], objection: str = "", machine: str = "", problem: str = "") -> RankInfo:
    """Return this process's; `machine` overrides what hosts are distinguished by (for tests)."""
    return RankInfo(machine or machine_id(), socket.gethostname(), settings, objection, uuid.uuid4().hex, problem)


def exchange_rank_infos(
    store: Store, rank: int, size: int, info: RankInfo, *, timeout_s: float = 1800.0
) -> list[RankInfo]:
    """Publish this rank's and return all ranks', by rank. A collective.

    Raises:
        UsageError: Another process claims to be this rank.
        DeadlineError: A rank did not come within `timeout_s` seconds.
    """
    # The nonce in it finds out whether another process published under the same rank.
    store.set(f"offer/{rank}", msgspec.json.encode(info).decode())
    deadline = time.monotonic() + timeout_s
    for r in range(size):
        try:
            store.wait([f"offer/{r}"], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        except RuntimeError as error:
            raise DeadlineError(
                f"{timed_out(timeout_s)}: rank {r} did not make the communicator; every rank of the group has to, or "
                f"raise RINGSIDE_TIMEOUT_S ({str(error).partition(chr(10))[0]})",
                [r],
            ) from None
    infos = [msgspec.json.decode(store.get(f"offer/{r}"), type=RankInfo) for r in range(size)]
    if infos[rank].nonce != info.nonce:
        raise UsageError(f"two processes claim to be rank {rank}, one of them on host {infos[rank].host}")
    return infos


def make_rank_map(rank: int, infos: Sequence[RankInfo]) -> RankMap:
    """Group the ranks into hosts; ranks that object to sharing memory are hosts of their own.

    Args:
        rank: This rank.
        infos: Of all ranks, by rank.

    Raises:
        MismatchError: Settings or versions differ; names the rank that differs and in what.
        UsageError: Fewer than 2 ranks.
    """
    for r, info in enumerate(infos):
        if info.problem:
            raise UsageError(info.problem if r == rank else f"rank {r} on host {info.host}: {info.problem}")
    if len(infos) < 2:
        raise UsageError(f"a group needs at least 2 ranks, not {len(infos)}")
    first = infos[0].settings
    for r, info in enumerate(infos):
        different = [
            f"{name} = {info.settings.get(name, 'nothing')} (rank 0: {first.get(name, 'nothing')})"
            for name in sorted({*first, *info.settings})
            if info.settings.get(name) != first.get(name)
        ]
        if different:
            raise MismatchError(
                f"rank {r} on host {info.host} differs from rank 0 on host {infos[0].host} in "
                f"{', '.join(different)}: give all ranks the same version of ringside and the same RINGSIDE_* settings",
                [r],
            )
    alone = itertools.count()
    groups: dict[str, list[int]] = defaultdict(list)
    for r, info in enumerate(infos):
        groups[info.machine if not info.objection else f"alone/{next(alone)}"].append(r)
    hosts = sorted(groups.values())
    # Several hosts may have one name (network namespaces of one machine): number them.
    names = [infos[ranks[0]].host for ranks in hosts]
    return RankMap(
        rank=rank,
        hosts=tuple(map(tuple, hosts)),
        names=tuple(name if names.count(name) == 1 else f"{name}#{host}" for host, name in enumerate(names)),
        keys=tuple(infos[ranks[0]].nonce for ranks in hosts),
    )
