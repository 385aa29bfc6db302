"""What is known of the links between ranks or hosts: as numbers, and as the topology that `ringside probe` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError

TOPOLOGY_SCHEMA = 1

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """The cost of messages among n vertices (ranks, or hosts), by R. W. Hockney's model: latency and time per byte.

    Vertices of one *site* share what leads out of it: all messages of a round from site A to site B follow each other
    on one link, and where `out` and `into` are given, all that leave or enter a site share its network interface.

    Args:
        latency_s: From a message being ready at one vertex until the other can use it, without its bytes, seconds,
            float64 [n, n], row = sender.
        seconds_per_byte: Of each directed link, float64 [n, n].
        out: Seconds per byte that leaves each site, float64 [sites]; None: every link has its full rate at once.
        into: Seconds per byte that enters each site, float64 [sites]; None likewise.
        reduce: Seconds per byte of adding up.
        overhead_s: What a vertex does for every message that it sends or takes, seconds.
        site: The site of each vertex, int64 [n]; None: each is its own.

    Raises:
        UsageError: The shapes do not fit together, or a figure is negative or not finite.
    """

    latency_s: Floats
    seconds_per_byte: Floats
    out: Floats | None = None
    into: Floats | None = None
    reduce: float = 0.0
    overhead_s: float = 0.0
    site: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "seconds_per_byte", "out", "into"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _figures(name, getattr(self, name)))
        n = len(self.latency_s)
        sites = n if self.site is None else int(np.max(self.site, initial=-1)) + 1
        if self.site is not None:
            object.__setattr__(self, "site", np.asarray(self.site, dtype=np.int64))
        links, nics = (self.latency_s, self.seconds_per_byte), (self.out, self.into)
        shapes = [*((array, (n, n)) for array in links), *((array, (sites,)) for array in nics)]
        if any(array is not None and array.shape != shape for array, shape in shapes):
            raise UsageError(f"a network of {n} vertices on {sites} sites needs figures for each, and these do not fit")

    @property
    def size(self) -> int:
        """Number of vertices."""
        return len(self.latency_s)

    @cached_property
    def sites(self) -> NDArray[np.int64]:
        """The site of each vertex, int64 [n]."""
        return np.arange(self.size, dtype=np.int64) if self.site is None else self.site

    @cached_property
    def rates(self) -> Floats:
        """Bytes per second of each directed link, float64 [n, n]; 0 on the diagonal."""
        with np.errstate(divide="ignore"):
            rates: Floats = 1.0 / self.seconds_per_byte
        rates[np.diag_indices(self.size)] = 0.0
        return rates

    @cached_property
    def even(self) -> bool:
        """Whether all links and vertices are alike, so that a rotational schedule is as slow on every vertex."""
        off = ~np.eye(self.size, dtype=np.bool_)
        arrays = [self.latency_s[off], self.seconds_per_byte[off], self.out, self.into]
        return self.site is None and all(a is None or not len(a) or a.min() == a.max() for a in arrays)

    def expanded(self, hosts: Sequence[Sequence[int]], latency_s: float, seconds_per_byte: float) -> CostNetwork:
        """Return the network of the ranks on these hosts.

        Args:
            hosts: The ranks of each host, of which this network's vertices are the hosts.
            latency_s: Of a message inside a host, seconds.
            seconds_per_byte: Of a message inside a host.
        """
        n = sum(map(len, hosts))
        site = np.empty(n, dtype=np.int64)
        for host, ranks in enumerate(hosts):
            site[list(ranks)] = host
        same = site[:, None] == site[None, :]  # ranks of one host
        latency = np.where(same, latency_s, self.latency_s[np.ix_(site, site)])
        per_byte = np.where(same, seconds_per_byte, self.seconds_per_byte[np.ix_(site, site)])
        return CostNetwork(latency, per_byte, self.out, self.into, self.reduce, self.overhead_s, site)

    def to_topology(
        self, names: Sequence[str] = (), ranks_per_host: Sequence[int] = (), source: str = "given"
    ) -> dict[str, Any]:
        """Return the topology as plain data, for a JSON file that people and the predictor read.

        Args:
            names: Of the vertices.
            ranks_per_host: Ranks of each.
            source: Where the numbers come from, such as `measured by ringside probe`.
        """
        n = self.size
        names = list(names) or [f"host{v}" for v in range(n)]
        ranks = list(ranks_per_host) or [1] * n
        vertices: list[dict[str, Any]] = [{"name": a, "ranks": b} for a, b in zip(names, ranks, strict=True)]
        for key, values in (("out_bytes_per_s", self.out), ("in_bytes_per_s", self.into)):
            if values is not None:
                for vertex, value in zip(vertices, values.tolist(), strict=True):
                    vertex[key] = _inverse(value)
        return {
            "schema": TOPOLOGY_SCHEMA,
            "kind": "ringside topology",
            "source": source,
            "hosts": vertices,
            "links": [
                {
                    "src": src,
                    "dst": dst,
                    "alpha_s": float(self.latency_s[src, dst]),
                    "bytes_per_s": _inverse(float(self.seconds_per_byte[src, dst])),
                }
                for src in range(n)
                for dst in range(n)
                if src != dst
            ],
            "reduce_bytes_per_s": _inverse(self.reduce),
            "overhead_s": self.overhead_s,
        }

    @staticmethod
    def from_topology(data: Any) -> CostNetwork:
        """Return the network that a topology describes.

        Raises:
            UsageError: It is no topology of this schema, or a link is missing.
        """
        try:
            if data["schema"] != TOPOLOGY_SCHEMA or data["kind"] != "ringside topology":
                raise UsageError(f"this is a {data['kind']} of schema {data['schema']}, not a ringside topology of 1")
            hosts, links = data["hosts"], data["links"]
            n = len(hosts)
            latency, per_byte = np.full((n, n), np.nan), np.full((n, n), np.nan)
            latency[np.diag_indices(n)] = per_byte[np.diag_indices(n)] = 0.0  # NaN that stays is a missing link
            for link in links:
                latency[link["src"], link["dst"]] = link["alpha_s"]
                per_byte[link["src"], link["dst"]] = _inverse(link["bytes_per_s"])
            nics = [
                np.array([_inverse(host[key]) for host in hosts]) if all(key in host for host in hosts) else None
                for key in ("out_bytes_per_s", "in_bytes_per_s")
            ]
            reduce, overhead_s = _inverse(data.get("reduce_bytes_per_s")), float(data.get("overhead_s", 0.0))
        except (KeyError, TypeError, IndexError, ValueError, ArithmeticError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"this is no ringside topology: {type(error).__name__} {error}") from None
        return CostNetwork(latency, per_byte, nics[0], nics[1], reduce, overhead_s)


def _inverse(value: float | None) -> Any:
    """Return seconds per byte for bytes per second and the other way round; None stands for no limit."""
    return 0.0 if value is None else 1.0 / value if value else None


def _figures(name: str, values: Any) -> Floats:
    array: Floats = np.array(values, dtype=np.float64)
    if array.size and not (np.isfinite(array).all() and (array >= 0).all()):
        raise UsageError(f"{name} of a network must be finite and not negative: a link is missing or broken")
    array.flags.writeable = False
    return array
