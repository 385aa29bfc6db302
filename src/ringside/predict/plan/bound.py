"""What bounds a collective: which figure of the topology its time follows, latency or bandwidth, of which links.

Each figure is made a hundredth worse, the price taken again; the share by which the time follows is the figure's.
Shares add up to about one where one path decides; where two paths are equally long both count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringside.predict.plan.options import AUTO, has_library, option
from ringside.predict.topology.topology import LinkClass, Topology

WORSE = 1.01


@dataclass(frozen=True)
class Bound:
    """One figure that a time follows.

    Args:
        kind: `latency`, `bandwidth`, or `work` for what is spent beside links.
        where: `inside` hosts, `between` them, `switch`; empty for work.
        link: The link class, such as `infiniband`.
        share: By how much the time follows it: 1 is all.
    """

    kind: str
    where: str
    link: str
    share: float


def bounds(topology: Topology, algorithm: str, size_bytes: float) -> tuple[Bound, ...]:
    """Return what an all-reduce's time follows, the largest share first; shares under 1 % left out.

    Args:
        topology: What it runs over.
        algorithm: As for `options.option`.
        size_bytes: More than 0.
    """
    now = _seconds(topology, algorithm, size_bytes)
    found = []
    for kind, where, link, worse in _worsened(topology):
        share = (_seconds(worse, algorithm, size_bytes) / now - 1.0) / (WORSE - 1.0)
        found.append(Bound(kind, where, link, min(max(share, 0.0), 1.0)))
    found.append(Bound("work", "", "", max(0.0, 1.0 - sum(bound.share for bound in found))))
    return tuple(sorted((bound for bound in found if bound.share >= 0.01), key=lambda bound: -bound.share))


def _seconds(topology: Topology, algorithm: str, size_bytes: float) -> float:
    name = AUTO if algorithm == AUTO and has_library(topology) else algorithm
    return float(option(topology, name).predict([size_bytes]).times_s[0])


def _worsened(topology: Topology) -> Iterator[tuple[str, str, str, Topology]]:
    """Yield (kind, where, link class, the topology with that figure worse)."""
    for where in ("inside", "between"):
        link = getattr(topology, where)
        if link is None or (where == "between" and topology.hosts == 1):
            continue
        yield "latency", where, link.kind, _slower(topology, where, replace(link, alpha_s=link.alpha_s * WORSE))
        shared = link.host_bytes_per_s and link.host_bytes_per_s / WORSE
        narrow = replace(link, bytes_per_s=link.bytes_per_s / WORSE, host_bytes_per_s=shared)
        yield "bandwidth", where, link.kind, _slower(topology, where, narrow)
    for name in ("nvls", "sharp"):
        switch = getattr(topology, name)
        if switch is not None:
            late, slow = replace(switch, alpha_s=switch.alpha_s * WORSE), switch.bytes_per_s / WORSE
            yield "latency", "switch", name, replace(topology, **{name: late})
            yield "bandwidth", "switch", name, replace(topology, **{name: replace(switch, bytes_per_s=slow)})


def _slower(topology: Topology, where: str, worse: LinkClass) -> Topology:
    """Return it with a link class worse, and the links and interfaces of their own with it."""
    before: LinkClass = getattr(topology, where)
    if where == "inside":
        return replace(topology, inside=worse)
    rate, delay = worse.bytes_per_s / before.bytes_per_s, WORSE if worse.alpha_s > before.alpha_s else 1.0
    own = tuple(
        replace(
            link,
            alpha_s=None if link.alpha_s is None else link.alpha_s * delay,
            bytes_per_s=None if link.bytes_per_s is None else link.bytes_per_s * rate,
        )
        for link in topology.overrides
    )
    rates = tuple((out * rate, into * rate) for out, into in topology.host_rates)
    return replace(topology, between=worse, overrides=own, host_rates=rates)
