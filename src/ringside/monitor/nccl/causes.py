"""For whom a communicator's ranks wait in NCCL's collectives, and why: its host, its GPU, or a link; pure.

All ranks leave a collective together, so whoever is in it for the shortest time came last, and repairing that one alone
saves what the second shortest was longer. No clock of a GPU is compared for that. What its host called the collective
later than every other host is the host's part, for ranks that are compared share a host and its monotonic clock; the
rest is the GPU's. Links are told apart by what proxies waited for, which exist only where a network is between ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import MOST_RANKS
from ringside.monitor.nccl.calls import WAITS, Joined
from ringside.monitor.nccl.ring import RecordedCommunicator, joined_rows

TOGETHER = (b"AllReduce", b"AllGather", b"ReduceScatter", b"AlltoAll")
"""Collectives that nobody leaves before the last has come."""
EFFECT = 0.05
"""Nobody is named for less than this share of the time."""
LEAST_SEEN = 0.5
"""Where a rank was seen in a smaller share of its calls, nobody is named."""
LEAST_CALLS = 20
"""Of fewer that were compared nobody is named."""
LEAST_STEPS = 100
SLOWER = 1.5
"""A link is slow that takes so many times as long for a byte as the median of the communicator's links."""
MOST_OPEN, FEW_OPEN = 50_000, 1_000
"""Calls of a communicator and function that wait for other ranks' records; of more the oldest are given up. The few are
of a communicator some of whose ranks were never seen here."""

MOST_KNOWN = 4096
"""Communicators; of more those whose last call is longest ago are forgotten: a job may make and close them for ever."""

Sums = defaultdict[str, float]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, lt=1e12)]
"""In a file of the run directory, which anybody may have written, other numbers are damage."""

LATE_RANK, SLOW_GPU, SLOW_LINK, NOT_KNOWN = "late rank", "slow GPU", "slow link", "not known"
_MOST_PARTS = 64


def cause_of_lateness(seconds: float, host_seconds: float, gpu_seconds: float) -> str:
    """Return whether a rank that came late is a late rank or has a slow GPU, as far as that is known.

    Args:
        seconds: What it was late with.
        host_seconds: Of these, its host.
        gpu_seconds: Its GPU.
    """
    if host_seconds + gpu_seconds < seconds / 2:
        return NOT_KNOWN
    return SLOW_GPU if gpu_seconds > host_seconds else LATE_RANK


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a communicator up, and why.

    Args:
        cause: "late rank" (its host), "slow GPU", "slow link", or "not known": a late rank's host or GPU.
        rank: The rank, in the job where that is known, else in the communicator; the sender of a link.
        peer: The receiver of a link; -1: it is about a rank.
        seconds: What repairing it alone would have saved the others; of a link, what the network took longer than on
            the usual link, in the steps that were recorded.
        host_seconds: Of these, what its host was late with.
        gpu_seconds: What its GPU was late with; what is missing to `seconds` is not known.
        communicator: Its id.
        in_communicator: The ranks are the communicator's, for not all of them are known in the job.
    """

    cause: str
    rank: int
    peer: int = -1
    seconds: Seconds
    host_seconds: Seconds = 0.0
    gpu_seconds: Seconds = 0.0
    communicator: str
    in_communicator: bool = False


class PeerWaits(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's proxies waited for in recorded steps with one peer, in seconds.

    Args:
        rank: In the job where that is known, else in the communicator.
        peer: Likewise.
        sends: Whether it sends to it; else it receives.
        steps: How many steps.
        size_bytes: Their bytes.
        send_gpu_seconds: For its own GPU's data.
        send_peer_seconds: For the receiver to be ready.
        send_seconds: For the network to take them.
        recv_seconds: For data from the network.
        network_seconds: How long at least one step waited for the network to take it; the others are sums over steps,
            of which several are under way at a time.
    """

    rank: int
    peer: int
    sends: bool
    steps: Count
    size_bytes: Count
    send_gpu_seconds: Seconds
    send_peer_seconds: Seconds
    send_seconds: Seconds
    recv_seconds: Seconds
    network_seconds: Seconds = 0.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one communicator.

    Args:
        id: Its id.
        name: The user's.
        ranks: How many it has.
        ranks_seen: Of how many there are records.
        calls: Collectives whose times are known of all ranks.
        captured: Calls that were captured in a graph, of all ranks.
        seen_ratio: The smallest share of the calls that can be compared whose times are known of a rank.
        seconds: From the first call to the last.
        late_seconds: By rank, what repairing it alone would have saved the others.
        late_host_seconds: Of these, what its host was late with.
        late_gpu_seconds: What its GPU was late with; what is missing is not known.
        in_communicator: Its ranks are the communicator's, for not all of them are known in the job.
        waits: Of the proxies, per peer.
    """

    id: str
    name: str
    ranks: Ranks
    ranks_seen: Ranks
    calls: Count
    captured: Count
    seen_ratio: float
    seconds: Seconds
    late_seconds: dict[int, Seconds]
    late_host_seconds: dict[int, Seconds] = {}
    late_gpu_seconds: dict[int, Seconds] = {}
    in_communicator: bool = False
    waits: list[PeerWaits]


STAY = np.dtype([("number", "u8"), ("rank", "i8"), ("seconds", "f8"), ("enqueued_ns", "i8")])
"""One rank's part in a collective: how long it was in it, and when its host called it; -1: not known."""


class _Known:
    """What is known of one communicator so far."""

    def __init__(self, communicator: RecordedCommunicator) -> None:
        self.communicator = communicator
        self.names: dict[int, int] = {}  # of its ranks, in the job
        self.ranks: set[int] = set()  # of which there are records
        # By function: of each rank how many calls have times, and the least and the greatest number of all ranks.
        self.seen: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        self.span: dict[bytes, tuple[int, int]] = {}
        # By function, of dtype `STAY`: calls of which some rank's times are not known yet, and what is new.
        self.open: dict[bytes, NDArray[np.void]] = {}
        self.new: defaultdict[bytes, list[NDArray[np.void]]] = defaultdict(list)
        self.calls = self.captured = self.used = 0  # used: in which turn of `Causes` last
        self.first_ns, self.last_ns = math.inf, 0.0
        self.late, self.host, self.gpu = (np.zeros(0) for _ in range(3))  # by rank; empty: no call was compared
        self.held = np.zeros((0, 0))  # what each rank waited in calls into which another came last: [last, rank]
        # `late` in so many calls each, in order; where there are too many, two become one.
        self.parts: list[NDArray[np.float64]] = []
        self.part_calls = 1
        # Of a rank, a peer, and whether it sends to it.
        self.waits: defaultdict[tuple[int, int, bool], Sums] = defaultdict(lambda: defaultdict(float))

    def compare_new(self) -> None:
        """Compare the calls of which all ranks' times are known by now."""
        for function, new in self.new.items():
            stays = joined_rows([self.open.get(function, np.zeros(0, STAY)), *new])
            # By number and rank; of a call that is told twice the later one counts.
            stays = stays[np.lexsort((stays["rank"], stays["number"]))]
            is_last = np.ones(len(stays), bool)
            is_last[:-1] = (stays["number"][1:] != stays["number"][:-1]) | (stays["rank"][1:] != stays["rank"][:-1])
            stays = stays[is_last]
            _, call, ranks = np.unique(stays["number"], return_inverse=True, return_counts=True)
            is_whole = ranks == self.communicator.ranks
            if self.communicator.ranks > 1 and is_whole.any():
                self._compare(stays[is_whole[call]].reshape(-1, self.communicator.ranks))
            most = MOST_OPEN if len(self.ranks) == self.communicator.ranks else FEW_OPEN
            self.open[function] = stays[~is_whole[call] & (call >= len(ranks) - most)]
        self.new.clear()

    def _compare(self, stays: NDArray[np.void]) -> None:
        """Compare calls; `stays` is [calls, ranks]."""
        ranks = self.communicator.ranks
        if not len(self.late):
            self.late, self.host, self.gpu = np.zeros((3, ranks))
            self.held = np.zeros((ranks, ranks))
        row = np.arange(len(stays))
        last = stays["seconds"].argmin(axis=1)
        shortest = np.partition(stays["seconds"], 1, axis=1)
        late = shortest[:, 1] - shortest[:, 0]
        self.late += np.bincount(last, late, ranks)
        for one in np.unique(last):
            self.held[one] += (stays["seconds"] - shortest[:, :1])[last == one].sum(axis=0)
        others = stays["enqueued_ns"].copy()
        is_called = (others >= 0).all(axis=1)
        own = others[row, last]
        others[row, last] = -1
        of_host = np.clip((own - others.max(axis=1)) / 1e9, 0.0, late)
        self.host += np.bincount(last, np.where(is_called, of_host, 0.0), ranks)
        self.gpu += np.bincount(last, np.where(is_called, late - of_host, 0.0), ranks)
        at = 0
        while at < len(stays):
            if self.calls % self.part_calls == 0:
                self.parts.append(np.zeros(ranks))
            end = min(at + self.part_calls - self.calls % self.part_calls, len(stays))
            self.parts[-1] += np.bincount(last[at:end], late[at:end], ranks)
            self.calls += end - at
            at = end
            if len(self.parts) == _MOST_PARTS and self.calls % self.part_calls == 0:
                self.parts = [one + other for one, other in zip(self.parts[::2], self.parts[1::2], strict=True)]
                self.part_calls *= 2

    def is_late_throughout(self, rank: int, span: float) -> bool:
        """Whether a rank holds the others up in both halves of the calls: a warm-up alone names nobody."""
        middle = len(self.parts) // 2
        for half in (self.parts[:middle], self.parts[middle:]):
            late = sum(part[rank] for part in half)
            if late < EFFECT * span / 2 or late < sum(part.sum() for part in half) / 2:
                return False
        return self.calls >= LEAST_CALLS

    def seen_ratio(self) -> float:
        """Return the smallest share of the calls that can be compared whose times are known of a rank."""
        calls = sum(most - least + 1 for least, most in self.span.values())
        seen: Counter[int] = sum(self.seen.values(), Counter())
        least = min(seen.values(), default=0) if len(seen) == self.communicator.ranks else 0
        return least / calls if calls else 1.0

    def has_held(self, name: int, last: int, seconds: float) -> bool:
        """Whether the rank of that name in the job waited so long in calls into which `last` came last."""
        return any(self.names.get(rank) == name for rank in np.flatnonzero(self.held[last] >= seconds).tolist())

    def name(self, rank: int) -> int:
        return self.names.get(rank, rank)

    def by_name(self, seconds: NDArray[np.float64]) -> dict[int, float]:
        return {self.name(rank): each for rank, each in enumerate(seconds.tolist()) if each > 0}


class Causes:
    """Compares the calls of a job's ranks."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._turn = 0  # of those that take in and compare

    def add(self, named: Callable[[int], RecordedCommunicator | None], global_rank: int, joined: Joined) -> None:
        """Take in what is over on one rank.

        Args:
            named: Tells which communicator of its process a number is; None: none.
            global_rank: In the job; -1: not known.
            joined: What is over.
        """
        calls = joined.calls
        numbers = set(calls["communicator"].tolist())
        for number in numbers:
            if (communicator := named(number)) is not None:
                own = calls if len(numbers) == 1 else calls[calls["communicator"] == number]
                self._add_calls(self._of(communicator, global_rank), communicator.rank, own)
        # what proxies do for other processes has no communicator of this one
        for row in joined.waits:
            if (communicator := named(int(row["communicator"]))) is not None:
                sums = self._of(communicator, global_rank).waits[
                    communicator.rank, int(row["peer"]), bool(row["sends"])
                ]
                for name in ("steps", "size_bytes", *WAITS.values(), "network"):
                    sums[name] += row[name].item()

    @staticmethod
    def _add_calls(known: _Known, rank: int, calls: NDArray[np.void]) -> None:
        known.ranks.add(rank)
        known.captured += int(calls["is_captured"].sum())
        known.first_ns = min(known.first_ns, int(calls["enqueued_ns"].min()))
        known.last_ns = max(known.last_ns, int(calls["enqueued_ns"].max()))
        stays = np.zeros(len(calls), STAY)
        stays["number"], stays["rank"] = calls["number"], rank
        stays["seconds"] = (calls["ended_gpu_ns"].astype(np.int64) - calls["arrived_gpu_ns"].astype(np.int64)) / 1e9
        stays["enqueued_ns"] = np.where(calls["is_called"], calls["enqueued_ns"].astype(np.int64), -1)
        # NCCL reads what a kernel writes while it writes it: a start may be of no time, or of a call long ago.
        has_times = (calls["arrived_gpu_ns"] > 0) & (calls["ended_gpu_ns"] > 0) & (stays["seconds"] >= 0)
        for function in set(calls["func"].tolist()).intersection(TOGETHER):
            is_of = calls["func"] == function
            numbers = calls["number"][is_of]
            low, high = int(numbers.min()), int(numbers.max())
            least, most = known.span.get(function, (low, high))
            known.span[function] = min(least, low), max(most, high)
            timed = stays[is_of & has_times]
            if len(timed):
                known.seen[function][rank] += len(timed)
                known.new[function].append(timed)

    def compare(self) -> None:
        """Compare what was taken in: of all ranks of a host, one after the other, before."""
        for known in self._known.values():
            known.compare_new()
        if len(self._known) > MOST_KNOWN:
            by_use = sorted(self._known.items(), key=lambda item: (item[1].used, item[1].last_ns))
            self._known = dict(by_use[-MOST_KNOWN:])
        self._turn += 1

    def _of(self, communicator: RecordedCommunicator, global_rank: int) -> _Known:
        known = self._known.get(communicator.id)
        if known is None:
            known = self._known[communicator.id] = _Known(communicator)
        known.used = self._turn
        if global_rank >= 0:
            known.names[communicator.rank] = global_rank
        return known

    def blames(self) -> list[Blame]:
        """Return who holds the job up, the costliest first."""
        self.compare()
        found, late = [], []
        for known in self._known.values():
            found += self._slow_links(known, f"{known.communicator.id:#018x}")
            if known.seen_ratio() < LEAST_SEEN:
                continue
            whole, span = float(known.late.sum()), (known.last_ns - known.first_ns) / 1e9
            for rank, seconds in enumerate(known.late.tolist()):
                if seconds >= EFFECT * span > 0 and seconds >= whole / 2 and known.is_late_throughout(rank, span):
                    late.append((known, rank))
        for known, rank in late:
            if self._is_victim(known, rank, late):
                continue
            seconds, host, gpu = (float(of[rank]) for of in (known.late, known.host, known.gpu))
            found.append(
                Blame(
                    cause=cause_of_lateness(seconds, host, gpu),
                    rank=known.name(rank),
                    seconds=seconds,
                    host_seconds=host,
                    gpu_seconds=gpu,
                    communicator=f"{known.communicator.id:#018x}",
                    in_communicator=rank not in known.names,
                )
            )
        return sorted(found, key=lambda blame: -blame.seconds)

    @staticmethod
    def _is_victim(known: _Known, rank: int, late: list[tuple[_Known, int]]) -> bool:
        """Whether a rank is late because another one held it up in another communicator, for half as long or longer."""
        name, half = known.names.get(rank), float(known.late[rank]) / 2
        return name is not None and any(
            other is not known
            and other.names.get(last) != name
            and other.late[last] > half
            and other.has_held(name, last, half)
            for other, last in late
        )

    @staticmethod
    def _slow_links(known: _Known, name: str) -> list[Blame]:
        found = []
        links = {
            (rank, peer): sums
            for (rank, peer, sends), sums in known.waits.items()
            if sends and sums["steps"] >= LEAST_STEPS and sums["size_bytes"] > 0
        }
        if len(links) < 3:
            return []  # of two nobody can say which is slow and which fast
        median = float(np.median([sums["network"] / sums["size_bytes"] for sums in links.values()]))
        for (rank, peer), sums in links.items():
            usual = median * sums["size_bytes"]
            network, steps = sums["network"], sums["send_gpu"] + sums["send_peer"] + sums["send"]
            if network > SLOWER * usual and sums["send"] * (1 - usual / network) > EFFECT * steps:
                # a peer on another host has no name in the job here: then both are the communicator's
                is_named = rank in known.names and peer in known.names
                found.append(
                    Blame(
                        cause=SLOW_LINK,
                        rank=known.name(rank) if is_named else rank,
                        peer=known.name(peer) if is_named else peer,
                        seconds=network - usual,
                        communicator=name,
                        in_communicator=not is_named,
                    )
                )
        return found

    def seen(self) -> list[Seen]:
        """Return what is known of each communicator."""
        self.compare()
        return [
            Seen(
                id=f"{known.communicator.id:#018x}",
                name=known.communicator.name,
                ranks=known.communicator.ranks,
                ranks_seen=len(known.ranks),
                calls=known.calls,
                captured=known.captured,
                seen_ratio=known.seen_ratio(),
                seconds=max((known.last_ns - known.first_ns) / 1e9, 0.0),
                late_seconds=known.by_name(known.late),
                late_host_seconds=known.by_name(known.host),
                late_gpu_seconds=known.by_name(known.gpu),
                in_communicator=len(known.names) < known.communicator.ranks,
                waits=[
                    PeerWaits(
                        rank=known.name(rank),
                        peer=known.name(peer),
                        sends=sends,
                        steps=int(sums["steps"]),
                        size_bytes=int(sums["size_bytes"]),
                        **{f"{name}_seconds": sums[name] for name in (*WAITS.values(), "network")},
                    )
                    for (rank, peer, sends), sums in sorted(known.waits.items())
                ],
            )
            for known in self._known.values()
        ]
