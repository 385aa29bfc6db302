"""Analyses measured links: which are slow, and which order of a ring goes round them. Pure NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.engine.cost.network import Floats

SLOW = 0.5
"""A link is slow if its rate is below this share of the median of the links it is compared with."""

EXACT = 8
"""Up to here the best order of a ring is found by trying all."""


@dataclass(frozen=True, slots=True)
class MeasuredSlowLink:
    """A link that is slow, or a vertex all of whose links are.

    Args:
        src: Sender, or the vertex.
        dst: Receiver; -1: every link of `src` is slow.
        bytes_per_s: Its rate (of a vertex the median of its links' rates).
        usual: The median rate that it is compared with.
    """

    src: int
    dst: int
    bytes_per_s: float
    usual: float

    @property
    def share(self) -> float:
        """Its rate as a share of what is usual."""
        return self.bytes_per_s / self.usual


def slow_links(rates: Floats) -> list[MeasuredSlowLink]:
    """Return the links whose rate is under half of what is usual, slowest first.

    Usual is the median of all links but this one and its reverse (of two vertices: the reverse), so that a slow link
    does not hide itself; half is far from what noise does to the median of several timings. Where every link of a
    vertex is slow, the vertex is named once instead.

    Args:
        rates: Bytes per second, float64 [n, n], row = sender; 0 or NaN where unknown.
    """
    n = len(rates)
    slow = set(suspect_links(rates))
    found = [MeasuredSlowLink(*pair, float(rates[pair]), median_beside(rates, pair)) for pair in sorted(slow)]
    # Name a vertex once instead of all of its links; two slow links of three vertices' could be either's fault.
    for v in range(n if n >= 4 else 0):
        own = [(a, b) for a, b in np.argwhere(_known(rates)).tolist() if v in (a, b)]
        if own and slow.issuperset(own):
            usual = float(np.median([link.usual for link in found if v in (link.src, link.dst)]))
            rest = [link for link in found if v not in (link.src, link.dst)]
            found = [*rest, MeasuredSlowLink(v, -1, float(np.median([rates[pair] for pair in own])), usual)]
            break
    return sorted(found, key=lambda link: link.share)


def suspect_links(rates: Floats) -> list[tuple[int, int]]:
    """Return (sender, receiver) of every link whose rate is under half of what is usual beside it."""
    pairs = [(src, dst) for src, dst in np.argwhere(_known(rates)).tolist()]
    return [pair for pair in pairs if rates[pair] < SLOW * median_beside(rates, pair)]


def median_beside(rates: Floats, link: tuple[int, int]) -> float:
    """Return the median rate of all links but this one and, of three vertices or more, its reverse; 0: none."""
    others = _known(rates)
    others[link] = False
    if len(rates) > 2:
        others[link[::-1]] = False
    return float(np.median(rates[others])) if others.any() else 0.0


def carried_together(together: Floats, rates: Floats) -> Floats:
    """Return what enters each vertex while all send: at least what its fastest link carries alone, at most their sum.

    Args:
        together: As it was timed, bytes/s, [n].
        rates: Of every link alone, bytes/s, [senders, receivers].
    """
    return np.clip(together, rates.max(axis=0), rates.sum(axis=0))


def _known(rates: Floats) -> NDArray[np.bool_]:
    return np.isfinite(rates) & (rates > 0) & ~np.eye(len(rates), dtype=np.bool_)


def links_beside(link: tuple[int, int], suspects: Sequence[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    """Return the links that a doubted one is held against: they end where it ends and begin where it begins.

    What keeps a vertex busy slows all of its links at once. Where all of these are doubted too, it is any that is not.

    Args:
        link: The doubted one.
        suspects: All doubted ones.
        n: Number of vertices.
    """
    src, dst = link
    into = [(v, dst) for v in range(n) if v not in link and (v, dst) not in suspects]
    out = [(src, v) for v in range(n) if v not in link and (src, v) not in suspects]
    rest = [(v, w) for v in range(n) for w in range(n) if v != w and (v, w) != link and (v, w) not in suspects]
    return [*into[:1], *out[:1]] or rest[:1]


def plainly_slow(own: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether timings of a link are slow beside those of others, by more than they scatter.

    Even its fastest one has to be under half of the others' median: other work on a machine makes a good link look slow
    now and then, but not every time, and nothing makes a slow one look fast.

    Args:
        own: Bytes per second of the link, several.
        others: Of links beside it, in the same turns; none: there is nothing that speaks for it.
    """
    return not len(others) or max(own) < SLOW * float(np.median(others))


def slowest_of_ring(rates: Floats, order: Sequence[int]) -> float:
    """Return the rate of the slowest link of a ring in this order, bytes per second."""
    return _worth(rates, order)[0]


def best_ring_order(rates: Floats) -> tuple[int, ...]:
    """Return the order of a ring whose slowest link is fastest, then whose links are fastest in sum; it begins with 0.

    Exact for up to 8 vertices; beyond, the nearest neighbour and 2-opt (G. A. Croes, "A method for solving
    traveling-salesman problems", 1958) from several starts.

    Args:
        rates: Bytes per second, float64 [n, n], row = sender.
    """
    n = len(rates)
    if n <= EXACT:  # all orders at once, as rows
        rest = np.array(list(itertools.permutations(range(1, n))), dtype=np.int64).reshape(-1, max(n - 1, 0))
        orders = np.concatenate([np.zeros((len(rest), 1), dtype=np.int64), rest], axis=1)
        along = rates[orders, np.roll(orders, -1, axis=1)]
        best = np.lexsort((-along.sum(axis=1), -along.min(axis=1)))[0]
        return tuple(orders[best].tolist())
    starts = [list(range(n)), *(_nearest_neighbour(rates, start) for start in range(0, n, -(-n // 8)))]
    found = max((_two_opt(rates, order) for order in starts), key=lambda order: _worth(rates, order))
    first = found.index(0)
    return (*found[first:], *found[:first])


def _nearest_neighbour(rates: Floats, start: int) -> list[int]:
    order, left = [start], set(range(len(rates))) - {start}
    while left:
        order.append(max(left, key=lambda v: (rates[order[-1], v], -v)))
        left.remove(order[-1])
    return order


def _two_opt(rates: Floats, order: list[int]) -> list[int]:
    """Reverse pieces of the ring as long as that helps."""
    worth, better = _worth(rates, order), True
    while better:
        better = False
        for i, j in itertools.combinations(range(1, len(order) + 1), 2):
            turned = order[:i] + order[i:j][::-1] + order[j:]
            if (now := _worth(rates, turned)) > worth:
                order, worth, better = turned, now, True
    return order


def _worth(rates: Floats, order: Sequence[int]) -> tuple[float, float]:
    vertices = np.asarray(order)
    along = rates[vertices, np.roll(vertices, -1)]
    return float(along.min()), float(along.sum())


def round_robin(n: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two of n meet once: n - 1 rounds, or n of an odd n."""
    # The circle method: the first stays, the others move on by one place each round; of an odd n one has no partner.
    ring: list[int] = list(range(n + n % 2))
    rounds = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append(sorted((min(p), max(p)) for p in pairs if max(p) < n))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds if n > 1 else []
