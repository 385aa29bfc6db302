"""Where ranks are and what joins them: hosts, link classes, network interfaces, and the links that differ.

A *host* is what its inside links join at full rate: a server, or a whole rack where NVLink spans one (NVL72). Ranks are
numbered host by host. Costs follow R. W. Hockney ("The communication challenge for MPP", 1994): a message takes
`alpha_s` and its bytes at a rate; `ringside.predict.simulate` defines what else waits for what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError

# -------------------------------------------------------------------------------------------------
# What a link costs: link classes, switches that reduce, links that differ from their class.

LINK_KINDS = ("nvlink", "nvswitch", "pcie", "infiniband", "roce", "ethernet", "loopback", "shared_memory")


@dataclass(frozen=True, slots=True)
class LinkClass:
    """A kind of link, and what a message over it costs.

    Args:
        kind: One of `LINK_KINDS`.
        alpha_s: From a message being ready until its receiver has it, without its bytes, seconds.
        bytes_per_s: Of one rank's port (inside a host) or one network interface (between hosts), each direction.
        host_bytes_per_s: What all messages of the class inside one host carry together (a memory bus, a PCIe root);
            None: each port has its full rate at once. Not for links between hosts, whose interfaces limit it.

    Raises:
        UsageError: A figure cannot be; the message has a line for each.
    """

    kind: str
    alpha_s: float
    bytes_per_s: float
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        mistakes = [] if self.kind in LINK_KINDS else [f"kind {self.kind!r}: there are {', '.join(LINK_KINDS)}"]
        mistakes += wrong_delay("alpha_s", self.alpha_s)
        mistakes += wrong_rate("bytes_per_s", self.bytes_per_s)
        mistakes += wrong_rate("host_bytes_per_s", self.host_bytes_per_s)
        raise_mistakes(mistakes)


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch that reduces: NVLS inside a host, SHARP between hosts.

    Args:
        alpha_s: Of a message to or from it, seconds.
        bytes_per_s: Of one rank's way to it (inside) or one interface's (between), each direction.

    Raises:
        UsageError: A figure cannot be.
    """

    alpha_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        raise_mistakes(wrong_delay("alpha_s", self.alpha_s) + wrong_rate("bytes_per_s", self.bytes_per_s))


@dataclass(frozen=True, slots=True)
class LinkOverride:
    """One directed link that differs from its class.

    Args:
        src: Sending rank, or host.
        dst: Receiving rank, or host.
        alpha_s: Its latency, seconds; None: its class's.
        bytes_per_s: Its rate; None: its class's.
        of: `ranks` or `hosts`: what `src` and `dst` number. A link of two hosts is that of all their ranks.
    """

    src: int
    dst: int
    alpha_s: float | None = None
    bytes_per_s: float | None = None
    of: str = "ranks"


LEAST_RATE = 1e-6  # bytes per second; what is divided by less may be no number any more


def wrong_rate(name: str, value: float | None) -> list[str]:
    """Return what is wrong with a rate, as lines; None is fine."""
    if value is None or (math.isfinite(value) and value >= LEAST_RATE):
        return []
    return [f"{name}: bytes per second, at least {LEAST_RATE:g}, not {value:g}"]


def wrong_delay(name: str, value: float) -> list[str]:
    """Return what is wrong with a duration, as lines."""
    return [] if math.isfinite(value) and value >= 0 else [f"{name}: seconds, 0 or more, not {value:g}"]


def raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raise a `UsageError` with one line per mistake, if there is any."""
    if mistakes:
        raise UsageError("\n".join(mistakes))


# -------------------------------------------------------------------------------------------------
# The hardware: hosts, ranks, links; and what was timed on it.


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of a collective that were measured on the hardware, at one number of its hosts and ranks.

    Args:
        ranks_per_host: Ranks of every host that took part.
        nics: Network interfaces of each that they used.
        sizes_bytes: Sizes of the tensor, [n], n ≥ 1.
        times_s: What each took, seconds, [n].
        collective: `all_reduce`, or another key of `ringside.predict.tables.table.BUS_FACTORS`.
        algorithm: As the table names it; "auto": the library's choice.
        source: Where it comes from, such as the name of a log.

    Raises:
        UsageError: A figure cannot be; the message has a line for each.
    """

    ranks_per_host: tuple[int, ...]
    nics: int
    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    collective: str = "all_reduce"
    algorithm: str = "auto"
    source: str = ""

    def __post_init__(self) -> None:
        figures = (*self.sizes_bytes, *self.times_s)
        mistakes = []
        if not self.sizes_bytes or len(self.sizes_bytes) != len(self.times_s):
            counts = f"{len(self.sizes_bytes)} and {len(self.times_s)}"
            mistakes.append(f"sizes_bytes and times_s: as many of one as of the other, at least 1, not {counts}")
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            mistakes.append("sizes_bytes and times_s: numbers more than 0")
        if min(self.ranks_per_host, default=0) < 1 or sum(self.ranks_per_host) < 2:
            mistakes.append(f"ranks_per_host: two ranks or more, not {list(self.ranks_per_host)}")
        if self.nics < 1:
            mistakes.append(f"nics: at least 1, not {self.nics}")
        raise_mistakes(mistakes)


RAILS = ("pooled", "own")
MOST_RANKS = 1 << 24
MOST_TIMES = 1e9  # as fast, or as slow: what links can be asked to become


@dataclass(frozen=True)
class Topology:
    """Hosts, their ranks, and what joins them. A frozen value.

    Args:
        name: What it is called.
        ranks_per_host: Ranks of every host; ranks are numbered host by host.
        inside: Links between ranks of one host; needed if a host has several.
        between: Links between hosts, of one network interface; needed if there are several hosts.
        nics: Network interfaces (rails) of every host.
        rails: `pooled`: a message uses all interfaces of its host, as NCCL's channels do: every message of the schedule
            stands for its share in each of them. `own`: rank i of a host with g ranks uses interface i * nics // g, so
            ranks may share one.
        oversubscription: 1 for a network that blocks nothing; at o, what leaves a leaf shares 1/o of its hosts' rate.
        hosts_per_leaf: Hosts under one leaf switch; messages among them do not use its uplinks.
        nvls: A switch inside every host that reduces; None: there is none.
        sharp: Switches between hosts that reduce; None: there are none.
        reduce_bytes_per_s: How fast a rank adds up what it received; None: as fast as it comes (GPU kernels reduce
            while they receive, and link rates are measured with it).
        overhead_s: What a rank does for every message that it sends or takes, seconds.
        overrides: Links that differ.
        host_rates: For every host what all its links carry together, (out, in) in bytes/s; empty: `nics` interfaces.
        measured: What collectives took on this hardware, at any number of hosts; predictions are held to it.
        sources: Where each number comes from, by its name such as `inside.alpha_s`.

    Raises:
        UsageError: It cannot be; the message has one line per mistake.
    """

    name: str
    ranks_per_host: tuple[int, ...]
    inside: LinkClass | None = None
    between: LinkClass | None = None
    nics: int = 1
    rails: str = "pooled"
    oversubscription: float = 1.0
    hosts_per_leaf: int = 1
    nvls: Switch | None = None
    sharp: Switch | None = None
    reduce_bytes_per_s: float | None = None
    overhead_s: float = 0.0
    overrides: tuple[LinkOverride, ...] = ()
    host_rates: tuple[tuple[float, float], ...] = ()
    measured: tuple[MeasuredTimes, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Links of their own are judged only where the counts that they number are right.
        mistakes = self._wrong_figures() or self._wrong_overrides()
        raise_mistakes([f"topology {self.name!r}: {mistake}" for mistake in mistakes])

    # ---------------------------------------------------------------------------------------------- what it is

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.ranks_per_host)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.ranks_per_host)

    @cached_property
    def largest_host(self) -> int:
        """Ranks of the largest host."""
        return max(self.ranks_per_host)

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """The host of every rank, int64 [ranks]."""
        return np.repeat(np.arange(self.hosts, dtype=np.int64), self.ranks_per_host)

    @cached_property
    def nic_of(self) -> NDArray[np.int64]:
        """The interface that every rank's messages to other hosts leave by, int64 [ranks]; pooled ones are one."""
        if self.pooled:
            return self.host_of
        sizes = np.array(self.ranks_per_host, dtype=np.int64)
        first = np.cumsum(sizes) - sizes
        local = np.arange(self.ranks, dtype=np.int64) - first[self.host_of]
        return (self.host_of * self.nics + local * self.nics // sizes[self.host_of]).astype(np.int64)

    @property
    def pooled(self) -> bool:
        """Whether a message uses all interfaces of its host."""
        return self.rails == "pooled" or bool(self.host_rates)

    @property
    def switch(self) -> Switch | None:
        """What reduces among all ranks: inside the only host, or between several."""
        return self.nvls if self.hosts == 1 else self.sharp

    @property
    def even(self) -> bool:
        """Whether all hosts have as many ranks, and no link or interface differs: closed forms apply."""
        return not self.overrides and not self.host_rates and len(set(self.ranks_per_host)) == 1

    def class_of(self, src: int, dst: int) -> str:
        """Return the kind of link between two ranks; a switch's number (not below `ranks`) is in the network."""
        link = self.inside if self._together(src, dst) else self.between
        return "none" if link is None else link.kind

    def _together(self, src: int, dst: int) -> bool:
        if max(src, dst) >= self.ranks:
            return self.hosts == 1
        return bool(self.host_of[src] == self.host_of[dst])

    # ---------------------------------------------------------------------------------------------- what if

    def sized(self, hosts: int, ranks_per_host: int | Sequence[int] | None = None) -> Topology:
        """Return it with another number of hosts, all like the first, or of other sizes; overrides are dropped.

        Args:
            hosts: How many, at least 1.
            ranks_per_host: Ranks of each; a list: of every one. None: as many as the first has. Hosts of which only
                some ranks are used keep as many interfaces as those ranks have by right.
        """
        per = self.ranks_per_host[0] if ranks_per_host is None else ranks_per_host
        if not isinstance(per, int) and len(per) != hosts:
            raise UsageError(f"{hosts} hosts need {hosts} numbers of ranks, not {list(per)}")
        sizes = (per,) * max(hosts, 0) if isinstance(per, int) else tuple(per)
        full = self.ranks_per_host[0]
        share = min(1.0, max(sizes, default=full) / full)
        nics = max(1, math.ceil(self.nics * share))
        return replace(self, ranks_per_host=sizes, nics=nics, overrides=(), host_rates=())

    def with_slow_link(self, src: int, dst: int, times: float) -> Topology:
        """Return it with the link from rank `src` to rank `dst` `times` slower per byte than it is."""
        if not times > 0 or not math.isfinite(times):
            raise UsageError(f"a link cannot be {times:g} times slower: give a number above 0, such as 4")
        # It takes the place of an override of the same link, and keeps that one's latency.
        before = [old for old in self.overrides if (old.of, old.src, old.dst) == ("ranks", src, dst)]
        kept = [old for old in self.overrides if old not in before]
        alpha_s = before[-1].alpha_s if before else None
        link = LinkOverride(src, dst, alpha_s, self.rate_of(src, dst) / times)
        return replace(self, overrides=(*kept, link))

    def with_link_rate(self, times: float) -> Topology:
        """Return it with links between hosts that carry `times` as many bytes per second.

        Raises:
            UsageError: It is one host, or they cannot be so many times faster.
        """
        if not 1.0 / MOST_TIMES <= times <= MOST_TIMES:
            raise UsageError(f"links cannot carry {times:g} times as much: give a number above 0, such as 2")
        if self.between is None or self.hosts == 1:
            raise UsageError(f"{self.name} is one host: nothing travels between hosts; give --to-hosts")
        overrides = []
        for link in self.overrides:
            a, b = (int(self.host_of[end]) if link.of == "ranks" else end for end in (link.src, link.dst))
            if link.bytes_per_s is not None and a != b:
                link = replace(link, bytes_per_s=times * link.bytes_per_s)
            overrides.append(link)
        return replace(
            self,
            between=replace(self.between, bytes_per_s=times * self.between.bytes_per_s),
            sharp=self.sharp and replace(self.sharp, bytes_per_s=times * self.sharp.bytes_per_s),
            overrides=tuple(overrides),
            host_rates=tuple((times * out, times * into) for out, into in self.host_rates),
        )

    def without_rail(self, host: int) -> Topology:
        """Return it with one network interface fewer on a host; pooled rails only.

        Raises:
            UsageError: There is no such host, it has only one interface left, or ranks own their rails.
        """
        if not 0 <= host < self.hosts or not self.pooled or self.between is None:
            raise UsageError(
                f"host {host} of {self.name!r} has no pooled rail to lose: hosts are 0 to {self.hosts - 1}"
            )
        nominal = self.nics * self.between.bytes_per_s
        rates = list(self.host_rates or ((nominal, nominal),) * self.hosts)
        left = tuple(rate - nominal / self.nics for rate in rates[host])
        if min(left) <= 0:
            raise UsageError(f"host {host} of {self.name!r} has one rail: without it, nothing reaches it")
        rates[host] = (left[0], left[1])
        return replace(self, host_rates=tuple(rates))

    def rate_of(self, src: int, dst: int) -> float:
        """Return the rate of a message from one rank to another with nothing beside it, bytes/s."""
        if not (0 <= src < self.ranks and 0 <= dst < self.ranks) or src == dst:
            raise UsageError(f"there is no link from rank {src} to rank {dst}: ranks are 0 to {self.ranks - 1}")
        together = self._together(src, dst)
        link = self.inside if together else self.between
        assert link is not None
        rate = most = link.bytes_per_s * (1 if together or not self.pooled else self.nics)
        hosts = (int(self.host_of[src]), int(self.host_of[dst]))
        for of, pair in (("hosts", hosts), ("ranks", (src, dst))):
            for own in self.overrides:
                if own.of == of and (own.src, own.dst) == pair and own.bytes_per_s is not None:
                    rate = own.bytes_per_s
        # No link of its own carries more than the port or the interface at either end of it.
        if self.host_rates and not together:
            most = min(self.host_rates[hosts[0]][0], self.host_rates[hosts[1]][1])
        return min(rate, most)

    # ---------------------------------------------------------------------------------------------- what cannot be

    def _wrong_figures(self) -> list[str]:
        """Return what is wrong with everything but links of their own, a line each."""
        mistakes = []
        # Counts.
        if not self.ranks_per_host:
            mistakes.append("hosts: at least 1, not 0")
        else:
            if min(self.ranks_per_host) < 1:
                mistakes.append(f"ranks_per_host: at least 1 on every host, not {min(self.ranks_per_host)}")
            if self.ranks > MOST_RANKS:
                mistakes.append(f"{self.ranks} ranks: at most {MOST_RANKS}")
            if self.nics < 1:
                mistakes.append(f"nics: at least 1, not {self.nics}; a host without one has no way to the others")
            if self.hosts_per_leaf < 1:
                mistakes.append(f"hosts_per_leaf: at least 1, not {self.hosts_per_leaf}")
        # What joins them.
        if self.hosts > 1 and self.between is None:
            mistakes.append(f"between: {self.hosts} hosts and no network that joins them; name one")
        if max(self.ranks_per_host, default=1) > 1 and self.inside is None:
            mistakes.append("inside: hosts with several ranks and no network that joins them; name one")
        if self.host_rates and len(self.host_rates) != self.hosts:
            mistakes.append(f"host_rates: one (out, in) for each of {self.hosts} hosts, not {len(self.host_rates)}")
        # Rates and durations.
        if self.rails not in RAILS:
            mistakes.append(f"rails {self.rails!r}: pooled or own")
        if not (math.isfinite(self.oversubscription) and self.oversubscription >= 1):
            mistakes.append(f"oversubscription: at least 1 (2 for 2:1), not {self.oversubscription:g}")
        mistakes += wrong_rate("reduce_bytes_per_s", self.reduce_bytes_per_s)
        mistakes += wrong_delay("overhead_s", self.overhead_s)
        for host, rates in enumerate(self.host_rates):
            for rate in rates:
                mistakes += wrong_rate(f"host_rates of host {host}", rate)
        return mistakes

    def _wrong_overrides(self) -> list[str]:
        """Return what is wrong with links of their own, a line each."""
        mistakes = []
        for link in self.overrides:
            most = {"ranks": self.ranks, "hosts": self.hosts}.get(link.of, 0)
            name = f"override {link.of} {link.src} > {link.dst}"
            if not (0 <= link.src < most and 0 <= link.dst < most) or link.src == link.dst:
                which = f"two different {link.of} of 0 to {most - 1}" if most else "of ranks or hosts"
                mistakes.append(f"{name}: {which}")
            wrong = wrong_rate("bytes_per_s", link.bytes_per_s)
            wrong += [] if link.alpha_s is None else wrong_delay("alpha_s", link.alpha_s)
            mistakes += [f"{name}: {line}" for line in wrong]
        return mistakes

    # ---------------------------------------------------------------------------------------------- words

    def describe(self) -> str:
        """Return it in one line."""
        sizes = sorted(set(self.ranks_per_host))
        per = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        words = [f"{self.name}: {self.hosts} host{'s' * (self.hosts > 1)} of {per} rank{'s' * (per != '1')}"]
        if self.inside is not None and sizes[-1] > 1:
            words.append(f"inside {self.inside.kind} {self.inside.bytes_per_s / 1e9:.4g} GB/s")
        if self.between is not None and self.hosts > 1:
            nics = f"{self.nics} × " if self.nics > 1 else ""
            words.append(f"between {nics}{self.between.kind} {self.between.bytes_per_s / 1e9:.4g} GB/s")
        if self.oversubscription > 1:
            words.append(f"oversubscribed {self.oversubscription:g}:1")
        if self.overrides:
            count = len(self.overrides)
            words.append("1 link of its own" if count == 1 else f"{count} links of their own")
        return ", ".join(words)
