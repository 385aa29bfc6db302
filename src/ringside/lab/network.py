"""Building a wiring: namespaces, devices, addresses, routes and rates, with `ip` and `tc`; and why that cannot be."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from ringside.errors import RingsideError
from ringside.lab.delay import start_delay
from ringside.lab.namespaces import LabName, inside
from ringside.lab.wiring import BRIDGE, MTU_BYTES, SWITCH, LabLink, LinkEnd, Wiring

# -------------------------------------------------------------------------------------------------
# iproute2: a few commands at a time, and why the lab cannot be had on this machine.

_LIMIT_S = 60.0


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run commands of `ip` or `tc` in one process, first to last.

    Args:
        tool: "ip" or "tc".
        lines: The commands, without the tool's name.
        namespace: In which network namespace; None for the one we are in.

    Raises:
        RingsideError: One of them was refused; those before it have been carried out.
    """
    text = "\n".join(lines)
    if not text:
        return
    command = [tool, *(("-n", namespace) if namespace else ()), "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        said = "; ".join(line for line in done.stderr.splitlines() if not line.startswith("Command failed"))
        raise RingsideError(f"the lab could not be wired: {tool} refused a command: {said or 'no reason given'}")


@cache
def unavailable() -> str:
    """Return why no lab can be had here, in one line; "" if it can be. Found out once per process, by trying."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the lab needs iproute2, and there is no command {tool!r} on the PATH"
    if os.geteuid() != 0:
        return "the lab needs root, to make network namespaces"
    # Wire two namespaces that have no name, and so leave nothing, with what the lab is made of.
    script = (
        "ip link add name lab0 type bridge && ip link add name a type veth peer name b && "
        "tc qdisc add dev a root tbf rate 1gbit burst 64kb limit 1mb && unshare -n true"
    )
    try:
        command = ["unshare", "-n", "-m", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the lab needs unshare to work: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return f"the lab needs privileges or kernel modules that are missing: {lines[-1] if lines else 'no reason given'}"


# -------------------------------------------------------------------------------------------------
# A link's rate, as commands for `tc` and `ip`.
#
# Each end of a link has a token bucket filter on what it sends. Limiting what the hosts send would not limit what one
# of them receives from several at once; the end at the switch does.
#
# Three sizes belong to a rate, all of them times at that rate, chosen by measurement (docs/lab.md):
#
# - the bucket, 0.5 ms: what may go out at once after a pause. Less, and a timer that fires late costs throughput;
# - the largest piece TCP hands down at once, 0.13 ms: full 64 KiB pieces leave no room for the other direction's
#   acknowledgements in the bucket, and cost up to half of the throughput when both directions are busy. Where there is
#   a delay every piece passes through one process: a twentieth of it, if that is more;
# - the queue, 16 ms, on links that take longer than 10 ms 1.6 times that: then frames are dropped. Less, and three
#   senders to one receiver lose throughput to losses.

_FRAME_BYTES = MTU_BYTES + 14
_BUCKET_S, _PIECE_S, _QUEUE_S = 0.5e-3, 0.13e-3, 16e-3
_PIECE_OF_DELAY, _QUEUE_OF_DELAY = 0.05, 1.6
_MOST_PIECE_BYTES = 65536


def piece_bytes(rate: float | None, delay_s: float = 0.0) -> int:
    """Return the largest piece (GSO) TCP may hand down to a link.

    Args:
        rate: Of the link, bit/s; None for one without a limit.
        delay_s: Of the link, one way, seconds.
    """
    if rate is None:
        return _MOST_PIECE_BYTES
    piece_s = max(_PIECE_S, _PIECE_OF_DELAY * delay_s)
    return min(max(int(rate / 8 * piece_s), 2 * _FRAME_BYTES), _MOST_PIECE_BYTES)


def bucket_bytes(rate: float, delay_s: float = 0.0) -> int:
    """Return how much may go out at once after a pause over a link; arguments as for `piece_bytes`."""
    return max(int(rate / 8 * _BUCKET_S), 2 * piece_bytes(rate, delay_s))


def limit(device: str, rate: float | None, delay_s: float = 0.0) -> list[str]:
    """Return the commands for `tc` that give a device the rate of a link; arguments as for `piece_bytes`.

    What waits there is dropped: a frame larger than the new bucket would stay first in the queue for ever.
    """
    unlimited = f"qdisc replace dev {device} root pfifo limit 1000"
    if rate is None:
        return [unlimited]
    queue_bytes = max(int(rate / 8 * max(_QUEUE_S, _QUEUE_OF_DELAY * delay_s)), 64 * _FRAME_BYTES)
    sizes = f"burst {bucket_bytes(rate, delay_s)} limit {queue_bytes}"
    return [unlimited, f"qdisc replace dev {device} root tbf rate {rate:.0f}bit {sizes}"]


def pieces(device: str, rate: float | None, delay_s: float = 0.0) -> list[str]:
    """Return the commands for `ip` that bound what TCP hands down to a device at once; arguments as for `limit`."""
    return [f"link set {device} gso_max_size {piece_bytes(rate, delay_s)}"]


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
    batch("ip", (f"netns add {lab.namespace(node)}" for node in wiring.setup))
    for node in wiring.setup:
        inside(lab.namespace(node), _apply_settings)
    # Cables: veth pairs, or TAP devices that a process joins where there is a delay.
    ends = [[(lab.namespace(end.node), end.device) for end in link.ends] for link in wiring.links]
    delays = None
    if wiring.delay_s > 0 and ends:
        delays = start_delay(wiring.delay_s, [(a, b) for a, b in ends])
    else:
        pairs = (f"link add name {a} netns {near} type veth peer name {b} netns {far}" for (near, a), (far, b) in ends)
        batch("ip", pairs)
    try:
        for node, addresses in wiring.setup.items():
            batch("ip", ("link set lo up", *addresses), lab.namespace(node))
        # The rate before the devices are up: not one frame passes at another.
        shape(lab, dict.fromkeys(wiring.links, rate))
        _on_ends(lab, "ip", {end: [f"link set {end.device} up"] for link in wiring.links for end in link.ends})
        for node, routes in wiring.routes.items():
            batch("ip", routes, lab.namespace(node))
    except BaseException:
        if delays is not None:
            delays.kill()
            delays.wait()
        raise
    return delays


def shape(lab: LabName, rates: Mapping[LabLink, float | None]) -> None:
    """Give links a rate in bit/s, or none, at both ends."""
    limits = {end: limit(end.device, rate, link.delay_s) for link, rate in rates.items() for end in link.ends}
    attached = {end: pieces(end.device, rate, link.delay_s) for link, rate in rates.items() for end in link.ends}
    if any(end.node == SWITCH for end in attached):  # what a process at the switch hands down goes through the bridge
        slowest = min(rates.values(), key=lambda rate: math.inf if rate is None else rate)
        attached[LinkEnd(SWITCH, BRIDGE)] = pieces(BRIDGE, slowest)
    _on_ends(lab, "ip", attached)
    _on_ends(lab, "tc", limits)


def cut(lab: LabName, links: list[LabLink]) -> None:
    """Have links drop every frame at both ends, which the sender takes for sent.

    A queue that is full drops too, but reports it. TCP takes that for congestion of its own host: it counts no
    keepalive as unanswered, and never gives up a connection that is idle. What is lost on the way is not like that.
    """
    ends = [end for link in links for end in link.ends]
    _on_ends(lab, "tc", {end: [f"qdisc replace dev {end.device} root blackhole"] for end in ends})


def _on_ends(lab: LabName, tool: str, commands: Mapping[LinkEnd, Sequence[str]]) -> None:
    by_node: dict[str, list[str]] = {}
    for end, lines in commands.items():
        by_node.setdefault(end.node, []).extend(lines)
    for node, lines in by_node.items():
        batch(tool, lines, lab.namespace(node))


def _apply_settings() -> None:
    for name, value in _SETTINGS.items():
        with contextlib.suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)


# -------------------------------------------------------------------------------------------------
# What the kernel counted on the interfaces of a namespace.


def interface_bytes(namespace: str, devices: Iterable[str]) -> tuple[int, int]:
    """Return (received, sent) bytes of some interfaces of a namespace, summed, Ethernet headers included.

    A piece that TCP hands down at once (GSO) counts with one header, for it is never cut up inside one machine.
    """
    text = inside(namespace, Path("/proc/thread-self/net/dev").read_text)
    rows = (line.partition(":") for line in text.splitlines() if ":" in line)
    counters = {name.strip(): numbers.split() for name, _, numbers in rows}
    found = [counters[device] for device in devices]
    # Of a row's sixteen counters eight are of what was received, bytes first, and eight of what was sent.
    return sum(int(row[0]) for row in found), sum(int(row[8]) for row in found)
