"""Building a wiring: namespaces, devices, addresses, routes and rates, with `ip` and `tc`."""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringside.lab import shaping
from ringside.lab.delay import start_delay
from ringside.lab.names import LabName
from ringside.lab.namespaces import inside
from ringside.lab.tools import batch
from ringside.lab.wiring import BRIDGE, SWITCH, End, Link, Wiring, routes

_SETTINGS = {
    "ipv6/conf/default/disable_ipv6": "1",  # no advertisements and listener reports in the counters
    "bridge/bridge-nf-call-iptables": "0",
    "bridge/bridge-nf-call-arptables": "0",
    "ipv4/tcp_congestion_control": "reno",  # fills a link from its first bytes on (docs/design/0005-lab.md)
    "ipv4/tcp_no_metrics_save": "1",  # a connection does not inherit what an earlier one met on another network
}
"""Under /proc/sys/net, in every namespace; one that this kernel lacks is left out."""


def build(lab: LabName, wiring: Wiring, rate: float | None) -> subprocess.Popen[str] | None:
    """Make the namespaces and everything in them.

    Args:
        lab: Names them.
        wiring: What to build.
        rate: Of every link, bit/s; None for no limit.

    Returns:
        The process that delays frames, if the links have a delay.

    Raises:
        RingsideError: A command was refused. What there is by then is the caller's to remove.
    """
    batch("ip", (f"netns add {lab.namespace(node)}" for node in wiring.nodes))
    for node in wiring.nodes:
        inside(lab.namespace(node), _apply_settings)
    delays = _lay_cables(lab, wiring)
    try:
        for node in wiring.nodes:
            batch("ip", ("link set lo up", *wiring.setup[node]), lab.namespace(node))
        shape(lab, dict.fromkeys(wiring.links, rate))
        _switch_on(lab, wiring)
    except BaseException:
        if delays is not None:
            delays.kill()
            delays.wait()
        raise
    return delays


def shape(lab: LabName, rates: Mapping[Link, float | None]) -> None:
    """Give links a rate in bit/s, or none, at both ends."""
    pieces = {end: shaping.pieces(end.device, rate) for link, rate in rates.items() for end in link.ends}
    if any(end.node == SWITCH for end in pieces):  # what a process at the switch hands down goes through the bridge
        slowest = min(rates.values(), key=lambda rate: math.inf if rate is None else rate)
        pieces[End(SWITCH, BRIDGE)] = shaping.pieces(BRIDGE, slowest)
    _on_ends(lab, "ip", pieces)
    _on_ends(lab, "tc", {end: shaping.limit(end.device, rate) for link, rate in rates.items() for end in link.ends})


def cut(lab: LabName, links: list[Link]) -> None:
    """Have links drop every frame at both ends."""
    _on_ends(lab, "tc", {end: shaping.drop_all(end.device) for link in links for end in link.ends})


def _lay_cables(lab: LabName, wiring: Wiring) -> subprocess.Popen[str] | None:
    ends = [[(lab.namespace(end.node), end.device) for end in link.ends] for link in wiring.links]
    delay_s = max((link.delay_s for link in wiring.links), default=0.0)
    if delay_s > 0:
        return start_delay(delay_s, [(a, b) for a, b in ends])
    batch(
        "ip",
        (f"link add name {a} netns {at_a} type veth peer name {b} netns {at_b}" for (at_a, a), (at_b, b) in ends),
    )
    return None


def _switch_on(lab: LabName, wiring: Wiring) -> None:
    _on_ends(lab, "ip", {end: [f"link set {end.device} up"] for link in wiring.links for end in link.ends})
    commands: dict[str, list[str]] = {}
    for link in wiring.links:
        for node, command in routes(link):
            commands.setdefault(node, []).append(command)
    for node, lines in commands.items():
        batch("ip", lines, lab.namespace(node))


def _on_ends(lab: LabName, tool: str, commands: Mapping[End, Sequence[str]]) -> None:
    by_node: dict[str, list[str]] = {}
    for end, mine in commands.items():
        by_node.setdefault(end.node, []).extend(mine)
    for node, lines in by_node.items():
        batch(tool, lines, lab.namespace(node))


def _apply_settings() -> None:
    for name, value in _SETTINGS.items():
        with contextlib.suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)
