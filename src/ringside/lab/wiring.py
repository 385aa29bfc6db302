"""Which namespaces and links a lab is made of, and what its hosts are called there; rates and delays as people
write them. Pure: nothing is done here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import combinations

from ringside.errors import UsageError

MOST_HOSTS = 250
INTERFACE = "lab0"
"""The interface that bears a host's address, on every host."""

SWITCH = "switch"
BRIDGE = "br0"
SWITCH_ADDRESS = "10.77.0.254"
"""The switch's IPv4 address, in a star."""


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link.

    Args:
        node: Whose namespace it lies in (`h0`, ..., `switch`).
        device: The interface's name there.
    """

    node: str
    device: str


@dataclass(frozen=True)
class LabLink:
    """A cable between two nodes.

    Args:
        hosts: The hosts it joins, ascending; one for a host's link to the switch.
        ends: Its ends; the first is on the first host.
        delay_s: How long a frame takes over it, one way, seconds.
    """

    hosts: tuple[int, ...]
    ends: tuple[LinkEnd, LinkEnd]
    delay_s: float = 0.0


@dataclass(frozen=True)
class Wiring:
    """A lab, before it is built.

    Args:
        hosts: How many there are.
        links: All cables.
        delay_s: How long a frame takes over each of them, one way, seconds.
        setup: For each node, the commands of `ip` that give it addresses once its devices are there.
        routes: For each node, the commands of `ip` that give it routes once its devices are up; a switch needs none.
    """

    hosts: int
    links: tuple[LabLink, ...]
    delay_s: float
    setup: dict[str, tuple[str, ...]]
    routes: dict[str, list[str]]

    @property
    def has_switch(self) -> bool:
        """Whether there is a switch."""
        return SWITCH in self.setup

    def links_of(self, host: int) -> list[LabLink]:
        """Return the links that end at a host."""
        return [link for link in self.links if host in link.hosts]

    def link_between(self, a: int, b: int) -> LabLink:
        """Return the link of a pair of hosts.

        Raises:
            UsageError: There is none.
        """
        wanted = tuple(sorted((a, b)))
        found = next((link for link in self.links if link.hosts == wanted), None)
        if found is None:
            why = "in a star every host has one link, to the switch; name a host" if self.has_switch else self._named()
            raise UsageError(f"there is no link between hosts {a} and {b}: {why}")
        return found

    def check_host(self, host: int) -> None:
        """Raise `UsageError` if there is no such host."""
        if not 0 <= host < self.hosts:
            raise UsageError(f"there is no host {host}: {self._named()}")

    def _named(self) -> str:
        return f"the hosts are 0 to {self.hosts - 1}"


def node_of(host: int) -> str:
    """Return the name of a host's node."""
    return f"h{host}"


def address_of(host: int) -> str:
    """Return a host's IPv4 address; it is the same in every wiring."""
    return f"10.77.0.{host + 1}"


def star(hosts: int, delay_s: float) -> Wiring:
    """Return the wiring in which every host has one link to a switch.

    Args:
        hosts: How many.
        delay_s: From host to host, one way, seconds: half of it on each of the two links in between.
    """
    ends = [(LinkEnd(node_of(host), INTERFACE), LinkEnd(SWITCH, f"port{host}")) for host in range(hosts)]
    setup: dict[str, tuple[str, ...]] = {node_of(host): (_address(host, 24),) for host in range(hosts)}
    ports = (f"link set {port.device} master {BRIDGE}" for _, port in ends)
    setup[SWITCH] = (*_bridge(BRIDGE), f"addr add {SWITCH_ADDRESS}/24 dev {BRIDGE}", *ports)
    links = tuple(LabLink((host,), pair, delay_s / 2) for host, pair in enumerate(ends))
    return Wiring(hosts, links, delay_s / 2, setup, {})


def mesh(hosts: int, delay_s: float) -> Wiring:
    """Return the wiring in which every pair of hosts has a link of its own.

    Every host has one address, on a bridge without ports, and a route to each other host over the pair's link.

    Args:
        hosts: How many.
        delay_s: From host to host, one way, seconds.
    """
    setup = {node_of(host): (*_bridge(INTERFACE), _address(host, 32)) for host in range(hosts)}
    routes = {node_of(host): [_route(host, peer) for peer in range(hosts) if peer != host] for host in range(hosts)}
    pairs = [(a, b) for a, b in combinations(range(hosts), 2)]
    links = tuple(LabLink(pair, (_mesh_end(*pair), _mesh_end(*reversed(pair))), delay_s) for pair in pairs)
    return Wiring(hosts, links, delay_s, setup, routes)


WIRINGS = {"star": star, "mesh": mesh}


def _mesh_end(host: int, peer: int) -> LinkEnd:
    return LinkEnd(node_of(host), f"to{peer}")


def _route(host: int, peer: int) -> str:
    return f"route replace {address_of(peer)}/32 dev {_mesh_end(host, peer).device} src {address_of(host)}"


def _bridge(name: str) -> tuple[str, ...]:
    return (f"link add name {name} type bridge mcast_snooping 0", f"link set {name} up")


def _address(host: int, prefix: int) -> str:
    return f"addr add {address_of(host)}/{prefix} dev {INTERFACE}"


# -------------------------------------------------------------------------------------------------
# Rates and delays of links as people write them: `1gbit`, `250mbit`, `5ms`.

MTU_BYTES = 1500
"""Size of an IP packet on the lab's links, bytes."""

PAYLOAD_SHARE = (MTU_BYTES - 52) / (MTU_BYTES + 14)
"""Share of a link's rate that is left for what TCP carries: IPv4, TCP with timestamps, and Ethernet headers are off."""

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*"
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_RATE, _MOST_RATE = 100e3, 100e9
_MOST_DELAY_S = 10.0


def parse_rate(text: str | float) -> float:
    """Return a rate in bit/s.

    Args:
        text: A number with bit, kbit, mbit or gbit (powers of 1000, as for `tc`), or bit/s as a number.

    Raises:
        UsageError: It is no rate, or not from 100kbit to 100gbit.
    """
    rate = float(text) if isinstance(text, int | float) else _number_with(text, _RATE_UNITS, "rate", "1gbit, 250mbit")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise UsageError(f"rate {text!r}: a link of the lab has from 100kbit to 100gbit")
    return rate


def parse_delay(text: str | float) -> float:
    """Return a delay in seconds.

    Args:
        text: A number with us, ms or s, or seconds as a number.

    Raises:
        UsageError: It is no duration, negative, or more than 10 s.
    """
    numeric = isinstance(text, int | float) or text.strip() == "0"
    delay = float(text) if numeric else _number_with(str(text), _TIME_UNITS, "delay", "5ms, 200us")
    if not 0.0 <= delay <= _MOST_DELAY_S or math.isnan(delay):
        raise UsageError(f"delay {text!r}: it is from 0 to 10s")
    return delay


def payload_bytes_per_second(rate: str | float) -> float:
    """Return how many bytes of payload TCP can carry per second over a link of that rate, one way.

    Args:
        rate: As `parse_rate` takes it.
    """
    return parse_rate(rate) / 8 * PAYLOAD_SHARE


def _number_with(text: str, units: dict[str, float], quantity: str, examples: str) -> float:
    match = re.fullmatch(_NUMBER + f"({'|'.join(units)})", text.lower())
    if match is None:
        raise UsageError(f"{quantity} {text!r}: it is a number with one of {', '.join(units)}, such as {examples}")
    return float(match[1]) * units[match[2]]
