"""A topology from what `ringside probe` measured."""

from __future__ import annotations

from statistics import median
from typing import Any

from ringside.errors import UsageError
from ringside.predict.topology import LinkClass, LinkOverride, Topology

SCHEMA = 1
_ONE_INTERFACE = 1.5


def from_probe(data: Any, origin: str = "probe", kind: str = "ethernet") -> Topology:
    """Return the topology that `ringside probe` measured.

    Args:
        data: Its JSON, as plain data: every host, its ranks, and every link between hosts.
        origin: What to call it in errors.
        kind: Of the links between hosts, which a probe cannot tell.

    Raises:
        UsageError: It is something else, or a link was broken.
    """
    try:
        if data["kind"] != "ringside topology" or data["schema"] != SCHEMA:
            raise UsageError(
                f"{origin}: a {data['kind']} of schema {data['schema']}, not a ringside topology of {SCHEMA}"
            )
        ranks = tuple(int(host["ranks"]) for host in data["hosts"])
        links = [
            LinkOverride(int(one["src"]), int(one["dst"]), float(one["alpha_s"]), _rate(one["bytes_per_s"]), "hosts")
            for one in data["links"]
        ]
        sides = ("out_bytes_per_s", "in_bytes_per_s")
        together = [tuple(float(host[side]) for side in sides if host.get(side)) for host in data["hosts"]]
        reduce, overhead_s = data.get("reduce_bytes_per_s"), float(data.get("overhead_s", 0.0))
        reduce = float(reduce) if reduce else None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{origin}: no ringside topology: {type(error).__name__} {error}") from None
    _check_complete(origin, len(ranks), links)
    known = all(len(rates) == len(sides) for rates in together)
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=1e9)
    least = min((link.alpha_s or 0.0 for link in links), default=0.0)
    several = max(ranks, default=1) > 1
    source = str(data.get("source", "measured by ringside probe"))
    return Topology(
        name=origin,
        ranks_per_host=ranks,
        # A probe times links between hosts only; inside, what `ringside.engine.pricing` assumes of messages.
        inside=LinkClass("shared_memory", 0.7 * least, 1e9) if several else None,
        between=LinkClass(kind, least, fastest) if links else None,
        reduce_bytes_per_s=reduce,
        overhead_s=overhead_s,
        overrides=tuple(links),
        host_rates=_interfaces(together, links) if known and links else (),
        sources={"between.alpha_s": source, "between.bytes_per_s": source},
    )


def _interfaces(together: list[tuple[float, ...]], links: list[LinkOverride]) -> tuple[tuple[float, float], ...]:
    """Return what every host's links carry together, (out, in) in bytes/s.

    Where that is under 1.5 times what one of them carries alone, they share one interface, and its rate is better known
    from the single link: a probe times all links together for a few messages only, and bursts flatter them.
    """
    found = []
    for host, rates in enumerate(together):
        ends = ([one for one in links if one.src == host], [one for one in links if one.dst == host])
        alone = [median(one.bytes_per_s or 0.0 for one in side) for side in ends]
        out, into = (
            min(one, rate) if rate < _ONE_INTERFACE * one else rate for rate, one in zip(rates, alone, strict=True)
        )
        found.append((float(out), float(into)))
    return tuple(found)


def _rate(value: Any) -> float:
    return float(value) if value is not None else 1e15  # no limit was found


def _check_complete(origin: str, n: int, links: list[LinkOverride]) -> None:
    have = {(link.src, link.dst) for link in links}
    lost = [(a, b) for a in range(n) for b in range(n) if a != b and (a, b) not in have]
    if lost:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        raise UsageError(
            f"{origin}: no link from host {lost[0][0]} to host {lost[0][1]}{more}: it was broken, or not timed"
        )
