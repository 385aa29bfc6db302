"""What a collective takes as a formula, on topologies whose hosts are all alike: flat ones, and hosts of several ranks.

The formulas follow from the rules in `ringside.predict.simulate` and are exact: they equal the simulation. Where there
is none (a tree that is not full, hosts that halving does not divide, pipelined schedules), `closed_form` returns None.
For flat networks without overhead they are those of R. Thakur, R. Rabenseifner, W. Gropp (IJHPCA 19, 2005), with the
ports of a rank shared by all that it sends or receives at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringside.predict.topology.topology import Switch, Topology
from ringside.predict.topology.wires import Floats
from ringside.schedule import (
    Schedule,
    by_name,
    direct_all_gather,
    direct_reduce_scatter,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)
from ringside.schedule.algorithms.doubling import largest_power

# -------------------------------------------------------------------------------------------------
# A topology whose hosts and links are all alike, as the few numbers that formulas need.


@dataclass(frozen=True)
class Even:
    """An even topology in numbers: `hosts` of `local` ranks each. Rates are in seconds per byte.

    Args:
        hosts: How many.
        local: Ranks of each.
        alpha_in: Latency inside a host, seconds.
        port: Of a rank's port inside its host.
        bus: Of all that is inside a host.
        alpha_out: Latency between hosts, seconds.
        nic: Of an interface, or of all of a host where they are pooled: of a message between hosts by itself.
        per_nic: Ranks that use one.
        up: Of a host's uplink; 0: it blocks nothing.
        reduce: Of adding up.
        overhead_s: Per message sent or taken, seconds.
        switch: What reduces: inside the only host, or between several.
        switch_pool: Interfaces that a message to a switch between hosts uses.
    """

    hosts: int
    local: int
    alpha_in: float
    port: float
    bus: float
    alpha_out: float
    nic: float
    per_nic: float
    up: float
    reduce: float
    overhead_s: float
    switch: Switch | None = None
    switch_pool: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.local

    @property
    def flat(self) -> bool:
        """Whether all ranks are joined alike."""
        return self.hosts == 1 or self.local == 1

    def inside(self, from_each: Floats, senders: float) -> Floats:
        """Return wire seconds inside a host: bytes through a rank's port, and how many ranks send as much."""
        return np.maximum(from_each * self.port, from_each * senders * self.bus)

    def between(self, from_each: Floats) -> Floats:
        """Return wire seconds between hosts, when every rank sends `from_each` bytes."""
        return np.maximum(from_each * self.per_nic * self.nic, from_each * self.local * self.up)

    def alone(self, size: Floats) -> Floats:
        """Return wire seconds of a message that is the only one of its host."""
        return size * max(self.nic, self.up)

    def exchange(self, size: Floats, near: int, far: int, added: float) -> Floats:
        """Return what a round takes in which every rank does the same.

        Args:
            size: Bytes of a message.
            near: Messages that each rank sends, and takes, inside its host.
            far: Messages that it sends to, and takes from, other hosts.
            added: Messages' worth of bytes that it adds up.
        """
        took = np.zeros_like(size)
        if near:
            took = self.alpha_in + self.inside(near * size, self.local)
        if far:
            took = np.maximum(took, self.alpha_out + self.between(far * size))
        return took + 2 * self.overhead_s * (near + far) + self.reduce * added * size


def even(topology: Topology) -> Even | None:
    """Return the numbers of a topology whose hosts and links are alike; None if they are not."""
    local, nics = topology.ranks_per_host[0], topology.nics
    shared = not topology.pooled and nics < local and local % nics
    blocked = topology.oversubscription > 1 and topology.hosts > 1
    if not topology.even or shared or (blocked and topology.hosts_per_leaf > 1):
        return None
    inside, between = topology.inside, topology.between
    pool = nics if topology.pooled else 1
    rate = float("inf") if between is None else between.bytes_per_s
    return Even(
        hosts=topology.hosts,
        local=local,
        alpha_in=0.0 if inside is None else inside.alpha_s,
        port=0.0 if inside is None else 1.0 / inside.bytes_per_s,
        bus=0.0 if inside is None or inside.host_bytes_per_s is None else 1.0 / inside.host_bytes_per_s,
        alpha_out=0.0 if between is None else between.alpha_s,
        nic=1.0 / (pool * rate),
        per_nic=local if topology.pooled else max(1, local // nics),
        up=topology.oversubscription / (nics * rate) if blocked else 0.0,
        reduce=0.0 if topology.reduce_bytes_per_s is None else 1.0 / topology.reduce_bytes_per_s,
        overhead_s=topology.overhead_s,
        switch=topology.switch,
        switch_pool=pool,
    )


def closed_form(schedule: Schedule, topology: Topology, sizes: Sequence[float]) -> Floats | None:
    """Return what a schedule takes by its formula, seconds, float64 [sizes]; None: there is none.

    Args:
        schedule: One that the catalogue makes, or `hierarchical` over the topology's hosts with such a one outside.
        topology: Of as many ranks.
        sizes: Bytes.
    """
    numbers = even(topology)
    if numbers is None or schedule.ranks != topology.ranks:
        return None
    return _form(schedule, numbers, np.asarray(sizes, dtype=np.float64))


def _form(schedule: Schedule, e: Even, size: Floats) -> Floats | None:
    if schedule.ranks == 1 and schedule.rounds == 0:
        return np.zeros_like(size)
    if schedule.name == "hierarchical":
        return _hierarchical(schedule, e, size)
    if schedule.name not in FORMS or schedule != by_name(schedule.name, schedule.ranks):
        return None
    return FORMS[schedule.name](e, size)


# ------------------------------------------------------------------------------------------------ one by one


def _around(e: Even, size: Floats, rounds: int, adding: int) -> Floats:
    """Return what so many rounds around a ring take: the longest path of hops and of waiting to send.

    A path goes j hops on and stays with one sender for the other rounds, best with the slowest it meets. With hosts of
    g ranks, the time of a path that begins s ranks into a host is linear in whole turns of g hops, so that the first
    and the last few j decide.
    """
    n, g = e.ranks, e.local
    chunk = size / n
    near = e.inside(chunk, g if e.hosts == 1 else g - 1)
    far = e.alone(chunk)
    work = 2 * e.overhead_s * rounds + e.reduce * chunk * adding
    if e.hosts == 1:
        return rounds * (e.alpha_in + near) + work
    if g == 1:
        return rounds * (e.alpha_out + far) + work
    hops = np.unique(np.concatenate([np.arange(min(2 * g, rounds) + 1), np.arange(max(rounds - 2 * g, 0), rounds + 1)]))
    begin = np.arange(g)[:, None]
    over = (begin + hops) // g  # boundaries crossed: the sender at g - 1 sends to the next host
    meets_far = (begin + hops) >= g - 1
    meets_near = (hops > 0) | (begin < g - 1)
    best = np.zeros_like(size)
    for i in np.ndindex(size.shape):
        slow = np.maximum(np.where(meets_far, far[i], 0.0), np.where(meets_near, near[i], 0.0))
        path = (hops - over) * (e.alpha_in + near[i]) + over * (e.alpha_out + far[i]) + (rounds - hops) * slow
        best[i] = path.max()
    return best + work


def _to_everybody(e: Even, size: Floats, adding: bool) -> Floats:
    """Everybody sends a message to everybody at once."""
    near, far = e.local - 1, e.ranks - e.local
    return e.exchange(size, near, far, near + far if adding else 0)


def _parameter_server(e: Even, size: Floats) -> Floats:
    """Everything goes through the server's port, its host's interface and uplink."""
    near, far = e.local - 1, e.ranks - e.local
    took = np.zeros_like(size)
    if near:
        took = e.alpha_in + e.inside(near * size, 1)
    if far:
        through = np.maximum(far * size * max(e.nic, e.up), size * max(e.per_nic * e.nic, e.local * e.up))
        took = np.maximum(took, e.alpha_out + through)
    clients = near + far
    return 2 * took + 2 * e.overhead_s * (1 + clients) + e.reduce * clients * size


def _chain(e: Even, size: Floats) -> Floats:
    """The whole tensor up the chain, added up at every hop, and down again."""
    near = e.alpha_in + e.inside(size, 1)
    far = e.alpha_out + e.alone(size)
    hops, over = e.ranks - 1, e.hosts - 1
    return 2 * ((hops - over) * near + over * far) + hops * (4 * e.overhead_s + e.reduce * size)


def _recursive_doubling(e: Even, size: Floats) -> Floats | None:
    return _folded(e, size, [(1 << bit, size, 1.0) for bit in range(largest_power(e.ranks).bit_length() - 1)])


def _halving_doubling(e: Even, size: Floats) -> Floats | None:
    p = largest_power(e.ranks)
    levels = p.bit_length() - 1
    down = [(p >> (k + 1), size / (1 << (k + 1)), 1.0) for k in range(levels)]
    return _folded(e, size, down + [(distance, part, 0.0) for distance, part, _ in reversed(down)])


def _folded(e: Even, size: Floats, exchanges: Sequence[tuple[int, Floats, float]]) -> Floats | None:
    """Return what exchanges at (distance, bytes, share added) take, extra ranks folded in first and out at the end.

    Off powers of two (on flat networks) the longest path begins at a rank that somebody folded into, or ends at one
    that hands the result back, or both. In the last case only those bits of its number change once in which two such
    ranks can differ, and a round in which the path stays costs no latency.
    """
    extra = e.ranks - largest_power(e.ranks)
    if not e.flat and (extra or e.local & (e.local - 1)):
        return None
    took, latency = np.zeros_like(size), np.zeros(len(exchanges))
    for number, (distance, part, added) in enumerate(exchanges):
        inside = e.hosts == 1 or distance < e.local
        # All working ranks with their partners, those of a host at once.
        senders = largest_power(e.ranks) if e.hosts == 1 else e.local
        wire = e.inside(part, senders) if inside else e.between(part)
        took = took + wire + 2 * e.overhead_s + e.reduce * added * part
        latency[number] = e.alpha_in if inside else e.alpha_out
    if not extra:
        return took + float(latency.sum())
    hop = e.alpha_in + e.inside(size, extra) if e.hosts == 1 else e.alpha_out + e.alone(size)
    out = hop + 2 * e.overhead_s
    into = out + e.reduce * size
    times = Counter(distance for distance, _, _ in exchanges)
    span = 1 << (extra - 1).bit_length()  # the least power of two above every number below `extra`
    crossed = [distance < span or times[distance] == 2 for distance, _, _ in exchanges]
    every, some = float(latency.sum()), float(latency[crossed].sum())
    return took + np.maximum(into + out + some, np.maximum(into, out) + every)


def _tree(e: Even, size: Floats) -> Floats | None:
    """A full tree on a flat network: every level but the topmost moves two messages per parent."""
    n = e.ranks
    if not e.flat or n & (n - 1) or e.bus:
        return None
    alpha = e.alpha_in if e.hosts == 1 else e.alpha_out

    def level(children: int) -> Floats:
        wire = e.inside(children * size, 1) if e.hosts == 1 else e.alone(children * size)
        up_and_down = 2 * (alpha + wire) + 2 * e.overhead_s * (1 + children)
        return up_and_down + e.reduce * children * size

    return level(1) + (n.bit_length() - 2) * level(2)


def _two_tree(e: Even, size: Floats) -> Floats | None:
    return None if e.overhead_s or e.ranks < 4 else _tree(e, size / 2)


def _in_network(e: Even, size: Floats) -> Floats | None:
    """Up to the switch and down again; between hosts through the interfaces and the uplink that ranks share."""
    if e.switch is None:
        return None
    wire = size / e.switch.bytes_per_s
    if e.hosts > 1:
        wire = wire / e.switch_pool * e.per_nic
        wire = np.maximum(wire, e.local * size * e.up)
    return 2 * (e.switch.alpha_s + wire + e.overhead_s)


FORMS: dict[str, Callable[[Even, Floats], Floats | None]] = {
    "ring": lambda e, size: _around(e, size, 2 * (e.ranks - 1), e.ranks - 1),
    "direct": lambda e, size: _to_everybody(e, size / e.ranks, True) + _to_everybody(e, size / e.ranks, False),
    "one_shot": lambda e, size: _to_everybody(e, size, True),
    "parameter_server": _parameter_server,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "two_tree": _two_tree,
    "chain": _chain,
    "in_network": _in_network,
    "ring_reduce_scatter": lambda e, size: _around(e, size, e.ranks - 1, e.ranks - 1),
    "ring_all_gather": lambda e, size: _around(e, size, e.ranks - 1, 0),
    "direct_reduce_scatter": lambda e, size: _to_everybody(e, size / e.ranks, True),
    "direct_all_gather": lambda e, size: _to_everybody(e, size / e.ranks, False),
    "direct_all_to_all": lambda e, size: _to_everybody(e, size / e.ranks**2, False),
}


def _hierarchical(schedule: Schedule, e: Even, size: Floats) -> Floats | None:
    """Inside, between and inside again: all hosts alike, each slice carried by one rank of every host."""
    if len(schedule.parameters) != 3:  # of a combinator: in segments, or with its ranks in another order
        return None
    inners, outer, _ = schedule.parameters
    assert isinstance(inners, tuple)
    assert isinstance(outer, Schedule)
    inner = inners[0]
    if [s.ranks for s in inners] != [e.local] * e.hosts or outer.switches:
        return None
    backs = {
        direct_reduce_scatter(e.local): direct_all_gather(e.local),
        ring_reduce_scatter(e.local): ring_all_gather(e.local),
    }
    if inner not in backs or schedule != hierarchical(e.local, e.hosts, inner=lambda _: inner, outer=lambda _: outer):
        return None
    within = replace(e, hosts=1)
    there, back = _form(inner, within, size), _form(backs[inner], within, size)
    lane = replace(e, local=1, nic=e.per_nic * e.nic, per_nic=1, up=e.local * e.up)
    between = _form(outer, lane, size / e.local)
    assert there is not None  # all rings and exchanges inside a host have a formula
    assert back is not None
    return None if between is None else there + between + back
