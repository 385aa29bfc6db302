"""For whom a communicator's ranks wait in NCCL's collectives, and why: its host, its GPU, or a link; pure.

All ranks leave a collective together, so whoever is in it for the shortest time came last, and repairing that one alone
saves what the second shortest was longer. No clock in common is needed for that. What its GPU had been given to do long
before it came, the GPU was late with; the rest, the host. Links are told apart by what proxies waited for, which exist
only where a network is between ranks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from ringside.monitor.nccl.calls import WAITS, Joined
from ringside.monitor.nccl.clock import fit_clock
from ringside.monitor.nccl.ring import Communicator

TOGETHER = (b"AllReduce", b"AllGather", b"ReduceScatter", b"AlltoAll")
"""Collectives that nobody leaves before the last has come."""
EFFECT = 0.05
"""Nobody is named for less than this share of the time."""
LEAST_SEEN = 0.5
"""Where a rank was seen in a smaller share of its calls, nobody is named."""
LEAST_STEPS = 100
SLOWER = 1.5
"""A link is slow that takes so many times as long for a byte as the median of the others."""
MOST_OPEN = 50_000
"""Calls of a communicator that wait for other ranks' records; the oldest are given up."""

Sums = defaultdict[str, float]

LATE_RANK, SLOW_GPU, SLOW_LINK = "late rank", "slow GPU", "slow link"


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a communicator up, and why.

    Args:
        cause: "late rank" (its host), "slow GPU" or "slow link".
        rank: The rank, in the job where that is known, else in the communicator; the sender of a link.
        peer: The receiver of a link; -1: it is about a rank.
        seconds: What repairing it alone would have saved the others; of a link, in the steps that were recorded.
        host_seconds: Of these, what its host was late with.
        gpu_seconds: What its GPU was late with; what is missing to `seconds` is not known.
        communicator: Its id.
    """

    cause: str
    rank: int
    peer: int = -1
    seconds: float
    host_seconds: float = 0.0
    gpu_seconds: float = 0.0
    communicator: str


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
    """

    rank: int
    peer: int
    sends: bool
    steps: int
    size_bytes: int
    send_gpu_seconds: float
    send_peer_seconds: float
    send_seconds: float
    recv_seconds: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one communicator.

    Args:
        id: Its id.
        name: The user's.
        ranks: How many it has.
        ranks_seen: Of how many there are records.
        calls: Collectives whose times are known of all ranks.
        captured: Calls that were captured in a graph, of all ranks.
        seen_ratio: The smallest share of its calls that a rank was seen in.
        seconds: From the first call to the last.
        late_seconds: By rank, what repairing it alone would have saved the others.
        waits: Of the proxies, per peer.
    """

    id: str
    name: str
    ranks: int
    ranks_seen: int
    calls: int
    captured: int
    seen_ratio: float
    seconds: float
    late_seconds: dict[int, float]
    waits: list[PeerWaits]


class _Known:
    """What is known of one communicator so far."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.names: dict[int, int] = {}  # of its ranks, in the job
        # By function: of each rank how many numbers were seen, and the least and the greatest of all ranks.
        self.seen: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        self.span: dict[bytes, tuple[int, int]] = {}
        self.open: dict[tuple[bytes, int], dict[int, tuple[float, float]]] = {}  # by rank: seconds in it, and queued
        self.calls = self.captured = 0
        self.first_ns, self.last_ns = math.inf, 0.0
        self.late: defaultdict[int, float] = defaultdict(float)  # by rank
        self.host: defaultdict[int, float] = defaultdict(float)
        self.gpu: defaultdict[int, float] = defaultdict(float)
        # Of a rank, a peer, and whether it sends to it.
        self.waits: defaultdict[tuple[int, int, bool], Sums] = defaultdict(lambda: defaultdict(float))

    def compare(self, stays: dict[int, tuple[float, float]]) -> None:
        """All ranks' times in one collective are known."""
        self.calls += 1
        last = min(stays, key=lambda rank: stays[rank][0])
        seconds, queued = stays[last]
        late = min(stay for rank, (stay, _) in stays.items() if rank != last) - seconds
        self.late[last] += late
        if not math.isnan(queued):
            of_gpu = min(max(queued, 0.0), late)
            self.gpu[last] += of_gpu
            self.host[last] += late - of_gpu

    def seen_ratio(self) -> float:
        """Return the smallest share of its calls that a rank was seen in."""
        calls = sum(most - least + 1 for least, most in self.span.values())
        seen = [sum(one[rank] for one in self.seen.values()) for rank in range(self.communicator.ranks)]
        return min(seen, default=0) / calls if calls else 0.0

    def name(self, rank: int) -> int:
        return self.names.get(rank, rank)


class Causes:
    """Compares the calls of a job's ranks."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add(self, communicators: Sequence[Communicator], global_rank: int, joined: Joined) -> None:
        """Take in what is over on one rank.

        Args:
            communicators: Of its process.
            global_rank: In the job; -1: not known.
            joined: What is over.
        """
        calls = joined.calls[~joined.calls["is_message"] & (joined.calls["communicator"] < len(communicators))]
        ahead, _ = fit_clock(calls)
        # in two steps: as float64 the clocks themselves are known to 256 ns only
        queued = ((calls["arrived_gpu_ns"].astype(np.int64) - calls["enqueued_ns"].astype(np.int64)) - ahead) / 1e9
        queued[~calls["is_called"]] = np.nan
        stays = (calls["ended_gpu_ns"].astype(np.int64) - calls["arrived_gpu_ns"].astype(np.int64)) / 1e9
        is_compared = (calls["ended_gpu_ns"] > 0) & (stays >= 0) & np.isin(calls["func"], TOGETHER)
        told = zip(
            *(calls[name].tolist() for name in ("communicator", "func", "number", "is_captured", "enqueued_ns")),
            is_compared.tolist(),
            stays.tolist(),
            queued.tolist(),
            strict=True,
        )
        for index, func, number, is_captured, enqueued_ns, compared, stay, wait in told:
            communicator = communicators[index]
            known = self._of(communicator, global_rank)
            known.captured += is_captured
            known.first_ns, known.last_ns = min(known.first_ns, enqueued_ns), max(known.last_ns, enqueued_ns)
            low, high = known.span.get(func, (number, number))
            known.span[func] = min(low, number), max(high, number)
            known.seen[func][communicator.rank] += 1
            if not compared:
                continue
            entry = known.open.setdefault((func, number), {})
            entry[communicator.rank] = stay, wait
            if len(entry) == communicator.ranks > 1:
                known.compare(known.open.pop((func, number)))
            elif len(known.open) > MOST_OPEN:
                del known.open[next(iter(known.open))]
        # what proxies do for other processes has no communicator of this one
        for row in joined.waits[joined.waits["communicator"] < len(communicators)]:
            communicator = communicators[int(row["communicator"])]
            sums = self._of(communicator, global_rank).waits[communicator.rank, int(row["peer"]), bool(row["sends"])]
            for name in ("steps", "size_bytes", *WAITS.values()):
                sums[name] += row[name].item()

    def _of(self, communicator: Communicator, global_rank: int) -> _Known:
        known = self._known.get(communicator.id)
        if known is None:
            known = self._known[communicator.id] = _Known(communicator)
        if global_rank >= 0:
            known.names[communicator.rank] = global_rank
        return known

    def blames(self) -> list[Blame]:
        """Return who holds the job up, the costliest first."""
        found = []
        for known in self._known.values():
            if known.seen_ratio() < LEAST_SEEN:
                continue
            name = f"{known.communicator.id:#018x}"
            whole, span = sum(known.late.values()), (known.last_ns - known.first_ns) / 1e9
            for rank, seconds in known.late.items():
                if seconds >= EFFECT * span and seconds >= whole / 2 and span > 0:
                    host, gpu = known.host[rank], known.gpu[rank]
                    cause = SLOW_GPU if gpu > host else LATE_RANK
                    found.append(
                        Blame(
                            cause=cause,
                            rank=known.name(rank),
                            seconds=seconds,
                            host_seconds=host,
                            gpu_seconds=gpu,
                            communicator=name,
                        )
                    )
            found += self._slow_links(known, name)
        return sorted(found, key=lambda blame: -blame.seconds)

    @staticmethod
    def _slow_links(known: _Known, name: str) -> list[Blame]:
        found = []
        links = {
            (rank, peer): sums
            for (rank, peer, sends), sums in known.waits.items()
            if sends and sums["steps"] >= LEAST_STEPS and sums["size_bytes"] > 0
        }
        for link, sums in links.items():
            others = [other["send"] / other["size_bytes"] for key, other in links.items() if key != link]
            if len(others) < 2:
                continue  # of two nobody can say which is slow and which fast
            usual = float(np.median(others)) * sums["size_bytes"]
            busy = sums["send_gpu"] + sums["send_peer"] + sums["send"]
            if sums["send"] > SLOWER * usual and sums["send"] - usual > EFFECT * busy:
                rank, peer = map(known.name, link)
                found.append(
                    Blame(cause=SLOW_LINK, rank=rank, peer=peer, seconds=sums["send"] - usual, communicator=name)
                )
        return found

    def seen(self) -> list[Seen]:
        """Return what is known of each communicator."""
        return [
            Seen(
                id=f"{known.communicator.id:#018x}",
                name=known.communicator.name,
                ranks=known.communicator.ranks,
                ranks_seen=len({rank for seen in known.seen.values() for rank in seen}),
                calls=known.calls,
                captured=known.captured,
                seen_ratio=known.seen_ratio(),
                seconds=max((known.last_ns - known.first_ns) / 1e9, 0.0),
                late_seconds={known.name(rank): late for rank, late in sorted(known.late.items())},
                waits=[
                    PeerWaits(
                        rank=known.name(rank),
                        peer=known.name(peer),
                        sends=sends,
                        steps=int(sums["steps"]),
                        size_bytes=int(sums["size_bytes"]),
                        send_gpu_seconds=sums["send_gpu"],
                        send_peer_seconds=sums["send_peer"],
                        send_seconds=sums["send"],
                        recv_seconds=sums["recv"],
                    )
                    for (rank, peer, sends), sums in sorted(known.waits.items())
                ],
            )
            for known in self._known.values()
        ]
