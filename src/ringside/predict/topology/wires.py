"""A topology as arrays: what a message costs by itself, and what it shares with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.predict.topology.topology import LinkClass, Switch, Topology
from ringside.schedule import Schedule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Wires:
    """What joins the vertices of a schedule: the ranks of a topology, and switches after them.

    Args:
        topology: Of as many ranks as the schedule.
        switches: Vertices that are switches.

    Raises:
        UsageError: There are switches, and the topology has none that reduces.
    """

    topology: Topology
    switches: int = 0

    def __post_init__(self) -> None:
        if self.switches and self.topology.switch is None:
            where, key = ("inside its host", "nvls") if self.topology.hosts == 1 else ("between its hosts", "sharp")
            raise UsageError(
                f"topology {self.topology.name!r} has no switch {where} that reduces, and this schedule needs one: "
                f"add [{key}] with alpha_s and bytes_per_s, or take another algorithm"
            )

    @property
    def vertices(self) -> int:
        """Ranks and switches together."""
        return self.topology.ranks + self.switches

    @cached_property
    def _host(self) -> Ints:
        """The host of every vertex; switches have none, -1."""
        return np.concatenate([self.topology.host_of, np.full(self.switches, -1, dtype=np.int64)])

    @cached_property
    def _nic(self) -> Ints:
        return np.concatenate([self.topology.nic_of, np.full(self.switches, -1, dtype=np.int64)])

    def costs(self, src: Ints, dst: Ints) -> tuple[Floats, Floats]:
        """Return (latency in seconds, seconds per byte) of messages by themselves, float64 [messages] each."""
        inside, switched = self._kinds(src, dst)
        alpha, per_byte = np.empty(len(src)), np.empty(len(src))
        kinds = ((inside, self.topology.inside), (~inside, self.topology.between), (switched, self.topology.switch))
        for which, link in kinds:  # a message to a switch is of the first two as well: the last one counts
            if link is not None:
                alpha[which], per_byte[which] = link.alpha_s, 1.0 / self._rate(link)
        if not self.topology.overrides:
            return alpha, per_byte
        pairs = ~switched
        # Links of their own: those of hosts first, since a link of two ranks is more exact.
        for of, key in (
            ("hosts", self._host[src] * self.topology.hosts + self._host[dst]),
            ("ranks", src * self.topology.ranks + dst),
        ):
            keys, alphas, rates = self._overrides[of]
            if len(keys):
                index = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
                hit = pairs & (keys[index] == key) & (~inside if of == "hosts" else True)
                alpha = np.where(hit & ~np.isnan(alphas[index]), alphas[index], alpha)
                per_byte = np.where(hit & ~np.isnan(rates[index]), rates[index], per_byte)
        return alpha, per_byte

    def shares(self, src: Ints, dst: Ints) -> Iterator[tuple[Ints, Floats]]:
        """Yield, for every kind of thing that messages share, whose each uses, -1: none, and its seconds per byte.

        Ports of ranks (out, in), the memory or bus of a host, network interfaces (out, in), uplinks of leaves (up,
        down). All the bytes that a round puts through one of them take it their sum.
        """
        topology = self.topology
        inside, switched = self._kinds(src, dst)
        if topology.hosts == 1 or topology.ranks > topology.hosts:  # else no message stays in a host
            # A rank's port to the others of its host; the switch in a host hangs on it, too.
            plain, reducing = (0.0 if it is None else 1.0 / it.bytes_per_s for it in (topology.inside, topology.switch))
            for vertex in (src, dst):
                port = np.where(inside & (vertex < topology.ranks), vertex, -1)
                yield port, np.where(switched, reducing, plain)
            if topology.inside is not None and topology.inside.host_bytes_per_s is not None:
                bus = np.where(inside & ~switched, self._host[src], -1)
                yield bus, np.full(len(src), 1.0 / topology.inside.host_bytes_per_s)
        if topology.hosts == 1 or topology.between is None:
            return
        # The interfaces of both hosts, or what all links of either carry together.
        plain, reducing = (0.0 if it is None else 1.0 / self._rate(it) for it in (topology.between, topology.sharp))
        for side, vertex in enumerate((src, dst)):
            interface = np.where(inside, -1, self._nic[vertex])
            if topology.host_rates:
                rates = np.array([*(pair[side] for pair in topology.host_rates), np.inf])
                yield interface, 1.0 / rates[self._host[vertex]]
            else:
                yield interface, np.where(switched, reducing, plain)
        # Uplinks of leaves, where they carry less than the hosts below them send.
        if topology.oversubscription > 1:
            per_host = topology.nics * topology.between.bytes_per_s
            hosts = np.bincount(np.arange(topology.hosts) // topology.hosts_per_leaf)
            uplink = np.append(topology.oversubscription / (hosts * per_host), 0.0)
            leaf = np.append(np.arange(topology.hosts) // topology.hosts_per_leaf, -1)
            ends = leaf[self._host[src]], leaf[self._host[dst]]
            for end in ends:
                yield np.where(inside | (ends[0] == ends[1]), -1, end), uplink[end]

    # ---------------------------------------------------------------------------------------------- kinds of messages

    def _kinds(self, src: Ints, dst: Ints) -> tuple[Flags, Flags]:
        """Return whether messages stay in a host, and whether they go to or from a switch."""
        ranks = self.topology.ranks
        switched: Flags = (src >= ranks) | (dst >= ranks)
        if self.topology.hosts == 1:
            return np.ones(len(src), dtype=np.bool_), switched
        return (self._host[src] == self._host[dst]) & ~switched, switched

    def _rate(self, link: LinkClass | Switch) -> float:
        """Return the rate of a message by itself."""
        between = link is self.topology.between or link is self.topology.sharp
        return link.bytes_per_s * (self.topology.nics if between and self.topology.pooled else 1)

    @cached_property
    def _overrides(self) -> dict[str, tuple[Ints, Floats, Floats]]:
        """By what links of their own join: (keys, ascending; latencies; seconds per byte), NaN: as of their class."""
        found = {}
        for of, count in (("hosts", self.topology.hosts), ("ranks", self.topology.ranks)):
            known: dict[int, list[float]] = {}
            for link in self.topology.overrides:
                if link.of == of:
                    figures = known.setdefault(link.src * count + link.dst, [np.nan, np.nan])
                    if link.alpha_s is not None:
                        figures[0] = link.alpha_s
                    if link.bytes_per_s is not None:
                        figures[1] = 1.0 / link.bytes_per_s
            keys = np.array(sorted(known), dtype=np.int64)
            values = np.array([known[key] for key in keys.tolist()]).reshape(-1, 2)
            found[of] = keys, values[:, 0], values[:, 1]
        return found


def wires_for(schedule: Schedule, topology: Topology) -> Wires:
    """Return the wires that a schedule runs over; `UsageError` if the two do not fit together."""
    if schedule.ranks != topology.ranks:
        raise UsageError(
            f"{schedule.name} is for {schedule.ranks} ranks, and {topology.name!r} has {topology.ranks} "
            f"({topology.hosts} hosts): make the schedule for {topology.ranks}, or the topology with .sized(hosts=...)"
        )
    return Wires(topology, schedule.switches)
