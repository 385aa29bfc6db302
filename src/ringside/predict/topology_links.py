"""What a link costs: link classes, switches that reduce, links that are not as their class says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringside.errors import UsageError

KINDS = ("nvlink", "nvswitch", "pcie", "infiniband", "roce", "ethernet", "loopback", "shared_memory")


@dataclass(frozen=True, slots=True)
class LinkClass:
    """A kind of link, and what a message over it costs.

    Args:
        kind: One of `KINDS`.
        alpha_s: From a message being ready until its receiver has it, without its bytes, seconds.
        bytes_per_s: Of one rank's port (inside a host) or one network interface (between hosts), each direction.
        host_bytes_per_s: What all messages of the class inside one host carry together (a memory bus, a PCIe root);
            None: each port has its full rate at once. Not for links between hosts, whose interfaces say it.

    Raises:
        UsageError: A figure cannot be; the message has a line for each.
    """

    kind: str
    alpha_s: float
    bytes_per_s: float
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        mistakes = [] if self.kind in KINDS else [f"kind {self.kind!r}: there are {', '.join(KINDS)}"]
        mistakes += wrong_delay("alpha_s", self.alpha_s)
        mistakes += wrong_rate("bytes_per_s", self.bytes_per_s)
        mistakes += wrong_rate("host_bytes_per_s", self.host_bytes_per_s)
        refuse(mistakes)

    @property
    def seconds_per_byte(self) -> float:
        """Of one port or interface."""
        return 1.0 / self.bytes_per_s


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
        refuse(wrong_delay("alpha_s", self.alpha_s) + wrong_rate("bytes_per_s", self.bytes_per_s))


@dataclass(frozen=True, slots=True)
class LinkOverride:
    """One directed link that is not as its class says.

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


def wrong_rate(name: str, value: float | None) -> list[str]:
    """Return what is wrong with a rate, as lines; None is fine."""
    if value is None or (math.isfinite(value) and value > 0):
        return []
    return [f"{name}: bytes per second, more than 0, not {value:g}"]


def wrong_delay(name: str, value: float) -> list[str]:
    """Return what is wrong with a duration, as lines."""
    return [] if math.isfinite(value) and value >= 0 else [f"{name}: seconds, 0 or more, not {value:g}"]


def refuse(mistakes: Sequence[str]) -> None:
    """Raise a `UsageError` with one line per mistake, if there is any."""
    if mistakes:
        raise UsageError("\n".join(mistakes))
