"""A topology whose hosts and links are all alike, as the few numbers that formulas need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.predict.topology import Switch, Topology

Floats = NDArray[np.float64]


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
        message: Of a message between hosts by itself.
        nic: Of an interface.
        per_nic: Ranks that use one.
        up: Of a host's uplink; 0: it blocks nothing.
        reduce: Of adding up.
        overhead_s: Per message sent or taken, seconds.
        switch: What reduces, and whether it stands inside a host.
    """

    hosts: int
    local: int
    alpha_in: float
    port: float
    bus: float
    alpha_out: float
    message: float
    nic: float
    per_nic: float
    up: float
    reduce: float
    overhead_s: float
    switch: tuple[Switch, bool] | None = None
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

    def between(self, largest: Floats, from_each: Floats) -> Floats:
        """Return wire seconds between hosts, when every rank sends `from_each` bytes, in messages of `largest`."""
        shared = np.maximum(from_each * self.per_nic * self.nic, from_each * self.local * self.up)
        return np.maximum(largest * self.message, shared)

    def alone(self, size: Floats) -> Floats:
        """Return wire seconds of a message that is the only one of its host."""
        return np.maximum(size * self.message, size * max(self.nic, self.up))

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
            took = np.maximum(took, self.alpha_out + self.between(size, far * size))
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
    switch, here = (topology.nvls, True) if topology.hosts == 1 else (topology.sharp, False)
    return Even(
        hosts=topology.hosts,
        local=local,
        alpha_in=0.0 if inside is None else inside.alpha_s,
        port=0.0 if inside is None else inside.seconds_per_byte,
        bus=0.0 if inside is None or inside.host_bytes_per_s is None else 1.0 / inside.host_bytes_per_s,
        alpha_out=0.0 if between is None else between.alpha_s,
        message=1.0 / (pool * rate),
        nic=1.0 / (pool * rate),
        per_nic=local if topology.pooled else max(1, local // nics),
        up=topology.oversubscription / (nics * rate) if blocked else 0.0,
        reduce=0.0 if topology.reduce_bytes_per_s is None else 1.0 / topology.reduce_bytes_per_s,
        overhead_s=topology.overhead_s,
        switch=None if switch is None else (switch, here),
        switch_pool=pool,
    )
