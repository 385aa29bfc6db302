"""The probe of a job's links before training: which ranks reach each other, then link speeds. For `ringside probe`."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap, make_rank_map, own_rank_info
from ringside.engine.probe.links import MeasuredSlowLink
from ringside.engine.probe.prober import QUICK, THOROUGH, Effort, Probe, Prober
from ringside.engine.probe.reachability import answering, own_address, unreachable
from ringside.engine.transports.base import LinkError
from ringside.engine.transports.gloo import GlooTransport
from ringside.engine.transports.gloo_all_reduce import GlooAllReduce
from ringside.errors import UsageError

RING_BYTES = 4 << 20
_LOOK_S = 0.02
_ROUND_TRIPS = 60  # of the longest link: who has no link to time in a turn waits for those who have


@dataclass(frozen=True)
class ProbeOutcome:
    """What a probe of a job found, as this rank knows it.

    Args:
        rank: This rank.
        size: Number of ranks.
        names: Of the vertices (hosts, or ranks).
        ranks: Ranks of each vertex.
        broken: Pairs of vertices between which nothing comes through.
        missing: Ranks that did not come.
        probe: The links; None if some are broken.
        ring_s: What an all-reduce of `RING_BYTES` took on each ring that was timed, by its order, seconds.
        trouble: What else went wrong, in words.
    """

    rank: int
    size: int
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    broken: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, ...] = ()
    probe: Probe | None = None
    ring_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    trouble: str = ""

    @property
    def slow(self) -> list[MeasuredSlowLink]:
        """The slow links, slowest first."""
        return [] if self.probe is None else self.probe.slow

    @property
    def fine(self) -> bool:
        """Whether every link carries what the others do."""
        return self.probe is not None and not self.slow


def probe_job(
    *, every_rank: bool = False, order: Sequence[int] = (), thorough: bool = True, patience_s: float = 10.0
) -> ProbeOutcome:
    """Probe the links of the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe. All ranks call it.

    Args:
        every_rank: Time links between all ranks, not only between hosts.
        order: An order of a ring to time besides.
        thorough: Take seconds rather than a fraction of one.
        patience_s: How long to wait for ranks that do not come, and for links that do not answer a fifth of it.

    Raises:
        UsageError: The order is none, or there are fewer than two ranks.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise UsageError(f"there are no links among {size} ranks: start at least 2")
    # A part of the job's store: torchrun's agent has made one, elsewhere rank 0 does.
    part = f"ringside/probe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    makes_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = datetime.timedelta(seconds=patience_s)
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = PrefixStore(part, TCPStore(host, port, None, makes_it, patience, wait_for_workers=False))
    except (RuntimeError, OSError, ValueError):
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return ProbeOutcome(
            rank, size, trouble=f"{socket.gethostname()} (rank {rank}) does not reach rank 0 at {where}"
        )
    return _Job(store, rank, size, patience_s).probe(every_rank, tuple(order), THOROUGH if thorough else QUICK)


class _Job:
    """One rank's part in the probe of a job."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        self.store, self.rank, self.size, self.patience_s = store, rank, size, patience_s
        self.turn = itertools.count()
        self.longest_s = 0.0  # round trip, of all links

    def probe(self, every_rank: bool, order: tuple[int, ...], effort: Effort) -> ProbeOutcome:
        """Find who is where and who reaches whom, then time the links."""
        toward = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with answering(own_address(*toward)) as listens:
            offer = {"machine": own_rank_info({}).machine, "host": socket.gethostname(), "listens": listens}
            offers = self._exchange(offer)
            missing = tuple(r for r in range(self.size) if r not in offers)
            if missing:
                return ProbeOutcome(self.rank, self.size, missing=missing)
            roster, ranks = self._roster(offers, every_rank)
            if order and sorted(order) != list(range(len(roster.hosts))):
                raise UsageError(f"--order names each of 0 to {len(roster.hosts) - 1} once, not {list(order)}")
            known = ProbeOutcome(self.rank, self.size, roster.names, ranks)
            addresses = {r: tuple(offers[r]["listens"]) for r in offers}
            if broken := self._broken(roster, addresses):
                return replace(known, broken=broken)
            return self._time_links(known, roster, addresses, order, effort)

    def _roster(self, offers: dict[int, Any], every_rank: bool) -> tuple[RankMap, tuple[int, ...]]:
        """Return the vertices as hosts of a roster, and the ranks of each."""
        # Under a host name of the probe's: it is what people read.
        ordered = [offers[r] for r in range(self.size)]
        infos = [structs.replace(own_rank_info({}, machine=own["machine"]), host=own["host"]) for own in ordered]
        hosts = make_rank_map(self.rank, infos)
        if not every_rank and len(hosts.hosts) > 1:
            return hosts, tuple(map(len, hosts.hosts))
        names = tuple(f"{hosts.names[hosts.host_of(r)]}/rank{r}" for r in range(self.size))
        alone = tuple((r,) for r in range(self.size))
        return RankMap(self.rank, alone, names, names), (1,) * self.size

    def _time_links(
        self,
        known: ProbeOutcome,
        roster: RankMap,
        addresses: dict[int, tuple[str, int]],
        order: tuple[int, ...],
        effort: Effort,
    ) -> ProbeOutcome:
        across = None
        try:
            # All ranks connect to each other; shared memory plays no part.
            # For one message, and for all connections.
            limit_s = max(self.patience_s / 2, 4.0) + _ROUND_TRIPS * self.longest_s
            transport = GlooTransport(PrefixStore("messages", self.store), self.rank, self.size, timeout_s=limit_s)
            native = GlooAllReduce(
                PrefixStore("native", self.store), self.rank, self.size, timeout_s=limit_s, has_lost=transport.has_lost
            )
            across = HierarchicalEngine(roster, Exchange(transport), None, native, timeout_s=limit_s)
            prober = Prober(across, effort=effort)
            probe = prober.probe()
            rings = dict.fromkeys([tuple(range(len(roster.hosts))), order, probe.better_order])
            ring_s = {}
            for ring in filter(None, rings):  # over the first rank of every host; the median of 5
                choice = AlgorithmSpec("ring", "leaders", order=ring)
                ring_s[ring] = sorted(prober.time_choice(choice, RING_BYTES, 5))[2]
            return replace(known, probe=probe, ring_s=ring_s)
        except (LinkError, RuntimeError) as error:
            broken = self._broken(roster, addresses)
            return replace(known, broken=broken, trouble=str(error).partition("\n")[0])
        finally:
            if across is not None:
                across.close()

    def _broken(self, roster: RankMap, addresses: dict[int, tuple[str, int]]) -> tuple[tuple[int, int], ...]:
        """Return the pairs of vertices of which one does not reach the other; every rank tries its own."""
        limit_s = max(self.patience_s / 5, 0.5)
        leaders = [ranks[0] for ranks in roster.hosts]
        silent: list[int] = []
        began = time.monotonic()
        if self.rank in leaders:
            others = {v: addresses[r] for v, r in enumerate(leaders) if r != self.rank}
            silent = unreachable(others, limit_s)
        round_trip_s = (time.monotonic() - began) / 2  # one to connect, one for the answer
        found = self._exchange([silent, round_trip_s])
        self.longest_s = max(took_s for _, took_s in found.values())
        pairs = {(min(v, w), max(v, w)) for r, (peers, _) in found.items() for v in [roster.host_of(r)] for w in peers}
        return tuple(sorted(pairs))

    def _exchange(self, value: Any) -> dict[int, Any]:
        """Give every rank's value to all; return those that come in time, by rank."""
        turn = next(self.turn)
        found: dict[int, Any] = {self.rank: json.loads(json.dumps(value))}
        try:
            self.store.set(f"{turn}/{self.rank}", json.dumps(value))
            deadline = time.monotonic() + self.patience_s / (1 if turn == 0 else 2)
            keys = [f"{turn}/{r}" for r in range(self.size)]
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)  # to wait in the store would end with a stack trace of torch's on stderr
            keys = [key for key in keys if self.store.check([key])]
            for key in keys:
                found[int(key.partition("/")[2])] = json.loads(self.store.get(key))
        except (RuntimeError, ValueError, OSError):
            pass  # the store itself is out of reach now: what this rank knows is all it has
        return found
