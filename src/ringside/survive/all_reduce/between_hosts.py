"""A generation's exchange between hosts: the engine's interpreter over messages, on links that only this one uses.

A process that was left out still holds connections of the old ones, and nobody listens there any more. Messages are
carried on a thread, so that the member can be told of other things meanwhile; when it has moved on, the thread's
connections are closed, which ends all waits.

Sums over ranks travel around a ring, which is laid so that no broken link is in it, or along a line (`RingOrder`).
Per micro-batch everybody is given all gradients instead and adds them up in order: that moves as many bytes as there
are micro-batches, for sums whose bits do not depend on who computed what.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest, Fold
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import SignatureMismatch
from ringside.engine.net.reduction import Reduction, make_fold, signature_of
from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import Bytes, LinkError, LinkFailure
from ringside.schedule import Schedule, chain, relabel, ring
from ringside.schedule.algorithms.ring import ring_all_gather
from ringside.survive.all_reduce.gradients import AttemptRun, add_up
from ringside.survive.all_reduce.one_host import AttemptExchange
from ringside.survive.cluster.links import OpenTransport, PairwiseTransport
from ringside.survive.cluster.peers import GaveUp, Superseded
from ringside.survive.protocol.decision import MemberId, Tag, decode, encode
from ringside.survive.protocol.events import Acknowledgement
from ringside.survive.protocol.generation import Generation, Link


@dataclass(frozen=True)
class RingOrder:
    """The members of a generation, by number, in the order in which sums pass by.

    Args:
        order: All of them.
        closed: The last one is joined to the first: a ring.
    """

    order: tuple[int, ...]
    closed: bool

    def links_of(self, vertex: int) -> list[tuple[int, int]]:
        """Return a member's links as (lower, higher), ascending, so that opening them one by one cannot deadlock."""
        joined = itertools.pairwise([*self.order, self.order[0]] if self.closed else self.order)
        return sorted({(min(pair), max(pair)) for pair in joined if vertex in pair and len(set(pair)) == 2})

    def joins(self, ranks: Sequence[int]) -> list[Link]:
        """Return all links that are used, by rank as (lower, higher)."""
        links = {link for vertex in self.order for link in self.links_of(vertex)}
        return [(ranks[low], ranks[high]) for low, high in sorted(links)]

    def all_reduce(self) -> Schedule:
        """Return the all-reduce: in as many parts as there are members around a ring, whole along a line."""
        size = len(self.order)
        return relabel(ring(size) if self.closed else chain(size), self.order)

    def all_gather(self) -> Schedule | None:
        """Return the all-gather; None: along a line there is none, and zeros are added up instead."""
        return relabel(ring_all_gather(len(self.order)), self.order) if self.closed else None


def way_around(generation: Generation) -> RingOrder:
    """Return a way over all members without a broken link; where there is none, the ring in ascending order.

    Depth first, which is quick while few links are broken.
    """
    size, broken = len(generation.members), set(generation.broken)
    ranks = generation.ranks

    def joined(a: int, b: int) -> bool:
        low, high = sorted((ranks[a], ranks[b]))
        return (low, high) not in broken

    def extended(path: Sequence[int], closed: bool) -> RingOrder | None:
        if len(path) == size:
            return RingOrder(tuple(path), closed) if not closed or joined(path[-1], path[0]) else None
        steps = (at for at in range(size) if at not in path and joined(path[-1], at))
        return next((whole for at in steps if (whole := extended([*path, at], closed))), None)

    lines = (line for first in range(size) if (line := extended([first], closed=False)))
    return extended([0], closed=True) or next(lines, None) or RingOrder(tuple(range(size)), closed=True)


def cut_off(generation: Generation) -> tuple[MemberId, ...]:
    """Return who has to go because of broken links; nobody, where there is a way over all members.

    Those go whom the first member that brought state cannot reach over any other members: what a leader has to fetch
    may lie beyond the broken link. If it can reach all, though not on one way that passes by everybody once, then the
    highest rank that misses a link, one without state if there is any.
    """
    broken, ranks = set(generation.broken), generation.ranks
    if broken.isdisjoint(way_around(generation).joins(ranks)):
        return ()
    root = (*generation.holders, *generation.members)[0].rank
    reached, fresh = {root}, [root]
    while fresh:
        at = fresh.pop()
        near = [rank for rank in ranks if rank not in reached and (min(at, rank), max(at, rank)) not in broken]
        reached.update(near)
        fresh += near
    away = tuple(seat for seat in generation.members if seat.rank not in reached)
    missing = {rank for link in broken for rank in link}
    last = max(missing, key=lambda rank: (rank in generation.joining, rank))
    return away or tuple(seat for seat in generation.members if seat.rank == last)


def blamed(generation: Generation, own: MemberId, peer: MemberId) -> tuple[tuple[MemberId, ...], Link]:
    """Return whom to go on without, and the link to go around, where the link to a live peer carries nothing.

    Args:
        generation: Whose sums passed by that link.
        own: Who found out; if it is cut off itself, it leaves it to the others to say so.
        peer: Who is at the other end.
    """
    low, high = sorted((own.rank, peer.rank))
    broken = tuple(sorted({*generation.broken, (low, high)}))
    gone = cut_off(msgspec.structs.replace(generation, broken=broken))
    return () if own in gone else gone, (low, high)


_SUM, _BYTE = OP_CODES["sum"], DTYPES.index("uint8")
_JUDGE_S = 2.5
_LOOK_S = 0.01


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """What a member shows the others.

    Args:
        ack: Its latest acknowledgement.
        own_s: What a micro-batch took it, seconds; 0: it computed none.
    """

    ack: Acknowledgement
    own_s: float


@dataclass(eq=False)
class NetExchange(AttemptExchange):
    """The end between hosts.

    Args:
        open_transport: Makes groups of two, one for each link that is used; the others as of `AttemptExchange`.
    """

    open_transport: OpenTransport

    def __post_init__(self) -> None:
        generation, open_transport = self.generation, self.open_transport
        self._me = generation.members.index(self.seat)
        self.slots = [np.zeros(self.layout.size_bytes, dtype=np.uint8) for _ in self.layout.slots[self.seat.rank]]
        self._way = way_around(generation)
        self._exchange: Exchange | None = None
        self._own: dict[int, float] = {}
        self._thread = Worker("ringside-survive-exchange")
        name = f"{generation.incarnation}/group/{generation.number}"
        self._gone = cut_off(generation)
        links, size = [] if self._gone else self._way.links_of(self._me), len(generation.members)
        self._wanted = True
        self._opening = self._thread.submit(
            lambda: PairwiseTransport(open_transport, name, self._me, size, links, lambda: self._wanted)
        )

    def run(self, step: int, into: Bytes) -> None:
        """All-reduce what the slots hold into private memory, uint8 [size_bytes].

        Raises:
            GaveUp, Superseded: It cannot be finished.
        """
        if len(self.generation.members) == 1:
            add_up(self.layout.runs, self.slots, into, 0, self.layout.size_bytes)
            return
        if self._gone:
            # No order of the members avoids the broken links: those who stay go on without the others, who wait a
            # moment for that proposal.
            if self.seat not in self._gone:
                raise GaveUp(*self._gone)
            until = time.monotonic() + _JUDGE_S
            while time.monotonic() < until:
                self.peer_wait.attend(())
                self.peer_wait.pause(_LOOK_S)
            raise GaveUp()
        if self._exchange is None:
            self._exchange = Exchange(self._wait_for(self._opening))
        self.failpoints.reached("before_send")
        # One sum per rank is added up on its way; several per rank travel as they are, and are added up in order.
        slots_of = self.layout.slots.items()
        per_micro_batch = any(len(slots) > 1 or slots not in ((), (rank,)) for rank, slots in slots_of)
        reduce = self._gather if per_micro_batch else self._reduce
        under_way = self._thread.submit(lambda: reduce(into))
        self.failpoints.reached("after_send")
        self._wait_for(under_way)
        self.failpoints.reached("after_sum")

    def publish_own_time(self, seconds: float) -> None:
        """Say what a micro-batch took here, seconds."""
        self._own[self.seat.rank] = seconds

    def own_times(self) -> dict[int, float]:
        """Return what a micro-batch took every member that has said so, seconds."""
        return {rank: seconds for rank, seconds in self._own.items() if seconds > 0}

    def acknowledge(self, ack: Acknowledgement) -> None:
        """Show an acknowledgement to all members."""
        self.rendezvous.publish(self._ack_key(self.seat), encode(Shown(ack, self._own.get(self.seat.rank, 0.0))))

    def acknowledgements(self, tag: Tag, checked: bool) -> list[Acknowledgement]:
        """Return the acknowledgements that the others show for an attempt."""
        found = []
        for seat in self.generation.members:
            data = None if seat == self.seat else self.rendezvous.registers.read(self._ack_key(seat))
            if data is not None:
                shown = decode(data, Shown, "an acknowledgement")
                self._own[seat.rank] = shown.own_s
                found.append(shown.ack)
        return [ack for ack in found if ack.tag == tag]

    def announce_decision(self, step: int) -> None:
        """Nothing is told: the others look at the register."""

    def may_be_decided(self, step: int) -> bool:
        """Tell whether it is worth looking at the register, which it always is."""
        return True

    def close(self) -> None:
        """Close all connections and let go of all memory."""
        self._wanted = False
        if self._exchange is not None:
            self._exchange.transport.fail(LinkFailure("left", self._me))
        elif self._opening.is_completed() and self._opening.exception() is None:
            self._opening.result().fail(LinkFailure("left", self._me))
        self._thread.stop(timeout_s=0.0)
        self.slots = []

    # ------------------------------------------------------------------------------------------ the exchange

    def _reduce(self, into: Bytes) -> None:
        """Add up one sum per rank on the way."""
        into[:] = self.slots[0] if self.slots else 0
        assert self._exchange is not None
        schedule = self._way.all_reduce()
        plan = plan_messages(schedule, self._me)
        for run in self.layout.runs:
            call = signature_of(Reduction(run.dtype, _SUM), run.elements)
            chunks = chunks_of(into, run, schedule.chunks)
            fold = self._noticed(make_fold(run.dtype, _SUM))
            ExchangeRun(self._exchange, ExchangeRequest(plan, run.item_bytes, fold, call), chunks).run()

    def _noticed(self, fold: Fold) -> Fold:
        def noticed(sources: Sequence[int], target: int, elements: int) -> None:
            self.failpoints.reached("mid_chunk")
            fold(sources, target, elements)

        return noticed

    def _gather(self, into: Bytes) -> None:
        """Give everybody all sums, and add them up in order."""
        assert self._exchange is not None
        ranks, size = self.generation.ranks, self.layout.size_bytes
        counts = [len(self.layout.slots[rank]) for rank in ranks]
        memory, gather = np.zeros((sum(counts), size), dtype=np.uint8), self._way.all_gather()
        held = np.split(memory, np.cumsum(counts)[:-1])  # of each rank [its slots, size]
        for place, slot in zip(held[self._me], self.slots, strict=True):
            place[:] = slot
        plan = plan_messages(gather or self._way.all_reduce(), self._me)
        call = signature_of(Reduction(_BYTE, _SUM), size)
        chunks = [part.reshape(-1) for part in (held if gather else [memory])]
        request = ExchangeRequest(plan, 1, make_fold(_BYTE, _SUM), call)
        ExchangeRun(self._exchange, request, chunks).run()
        self.failpoints.reached("mid_chunk")
        add_up(self.layout.runs, self.layout.in_order(dict(zip(ranks, held, strict=True))), into, 0, size)

    def _wait_for(self, work: Work) -> Any:
        """Wait for what the thread does; attend to other things meanwhile."""
        others = [seat for seat in self.generation.members if seat != self.seat]
        try:
            self.peer_wait.wait(lambda: [] if work.is_completed() else others)
            return work.result()
        except Superseded:
            self.close()
            raise
        except LinkError as error:
            raise self._attribute(error.cause) from None
        except (RuntimeError, SignatureMismatch):  # others are at another generation
            raise GaveUp() from None

    def _attribute(self, cause: LinkFailure) -> GaveUp:
        """Find out whether a member is dead or only the link to it: give its heart time to beat.

        One that left knows better why: its proposal is awaited.
        """
        seat, left = self.generation.members[cause.vertex], cause.kind == "left"
        until = time.monotonic() + _JUDGE_S * (1 + left)
        while time.monotonic() < until:
            if seat in self.peer_wait.dead():
                return GaveUp(seat)
            self.peer_wait.attend(())
            self.peer_wait.pause(_LOOK_S)
        if left:
            return GaveUp()
        # It lives, so the link is broken: go around it, or where there is no way, on without those that are cut off.
        gone, link = blamed(self.generation, self.seat, seat)
        return GaveUp(*gone, broken=link)

    def _ack_key(self, seat: MemberId) -> str:
        return f"{self.generation.incarnation}/ack/{seat.rank}/{seat.epoch}"


def chunks_of(memory: Bytes, run: AttemptRun, parts: int) -> list[Bytes]:
    """Return the elements of a run as nearly equal parts."""
    bounds = [run.start + run.elements * part // parts * run.item_bytes for part in range(parts + 1)]
    return [memory[first:last] for first, last in itertools.pairwise(bounds)]
