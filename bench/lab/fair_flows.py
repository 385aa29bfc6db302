"""What is on the wire, and how fast: flows that are max-min fair in what they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

import numpy as np

from ringside.predict.topology.topology import Topology
from ringside.predict.topology.wires import wires_for
from ringside.schedule import Schedule

# (sender, receiver).
Link = tuple[int, int]


class Flows:
    """What is on the wire, and how fast: max-min fair in what links share."""

    def __init__(self, schedule: Schedule, topology: Topology, links: Sequence[Link]) -> None:
        wires = wires_for(schedule, topology)
        src, dst = (np.array([link[side] for link in links], dtype=np.int64) for side in (0, 1))
        alpha, per_byte = wires.costs(src, dst)
        self.alpha_s = dict(zip(links, alpha.tolist(), strict=True))
        self.left: dict[Link, float] = {}
        self.rate: dict[Link, float] = {}
        self._through: dict[Link, list[tuple[tuple[int, int], float]]] = {
            link: [((-1, at), seconds)] for at, (link, seconds) in enumerate(zip(links, per_byte.tolist(), strict=True))
        }
        for kind, (whose, seconds) in enumerate(wires.shares(src, dst)):
            for link, number, each in zip(links, whose.tolist(), seconds.tolist(), strict=True):
                if number >= 0:
                    self._through[link].append(((kind, number), each))
        self._stale = False

    def start(self, link: Link, size_bytes: float) -> None:
        """Put a message on a link that carries none."""
        self.left[link] = max(size_bytes, 0.0)
        self._stale = True

    def end(self, link: Link) -> None:
        """Take the message off a link."""
        del self.left[link]
        self._stale = True

    def advance(self, now: float, then: float) -> None:
        """Let time pass, during which nothing begins or ends."""
        for link in self.left:
            self.left[link] -= self.rate[link] * (then - now)

    def next_end(self, now: float) -> tuple[float, Link | None]:
        """Return when the next message has left, and over which link."""
        if self._stale:
            self._set_rates()
        best, which = inf, None
        for link, left in self.left.items():
            ends = now + max(left, 0.0) / self.rate[link]
            if ends < best:
                best, which = ends, link
        return best, which

    def _set_rates(self) -> None:
        """Fill all links at the same pace until something is full; its links keep their rate, and so on."""
        self._stale = False
        self.rate = dict.fromkeys(self.left, 0.0)
        users: defaultdict[tuple[int, int], dict[Link, float]] = defaultdict(dict)
        for link in self.left:
            for thing, seconds in self._through[link]:
                users[thing][link] = seconds
        room = dict.fromkeys(users, 1.0)  # the share of its time that nobody uses yet
        growing = set(self.left)
        while growing:
            # What is full first if all that still grow do so at one pace.
            full, most = None, inf
            for thing, links in users.items():
                taken = sum(seconds for link, seconds in links.items() if link in growing)
                if taken > 0 and room[thing] / taken < most:
                    full, most = thing, room[thing] / taken
            if full is None:
                break
            # Let them grow until then; who uses what is full grows no more.
            for link in growing:
                self.rate[link] += most
            for thing, links in users.items():
                room[thing] -= most * sum(seconds for link, seconds in links.items() if link in growing)
            growing -= {link for link in users[full] if link in growing}
