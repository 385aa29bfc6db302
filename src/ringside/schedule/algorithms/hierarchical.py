"""Hierarchical."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt, lcm

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule.algorithms.direct import direct_reduce_scatter
from ringside.schedule.algorithms.ring import ring
from ringside.schedule.collective import ALL_REDUCE, REDUCE_SCATTER
from ringside.schedule.combine import refined, relabel, reverse
from ringside.schedule.schedule import Round, Schedule, joined

# Hosts of 5, 7, 9, 11 and 13 ranks would need 45045 slices to share the work exactly; this many share it within 0.1%.
MOST_SLICES = 1024

Make = Callable[[int], Schedule]


def hierarchical(
    ranks_per_host: int | Sequence[int],
    hosts: int | None = None,
    *,
    inner: Make = direct_reduce_scatter,
    outer: Make = ring,
) -> Schedule:
    """Hierarchical: reduce inside every host, all-reduce each slice between hosts, gather inside. For two kinds of
    links.

    The outer links carry 1/ranks_per_host of what a flat algorithm sends over them, and all of a host's ranks use them
    at once. M. Cho, U. Finkler, D. Kung, H. Hunter: "BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy", MLSys 2019.

    Return the hierarchical all-reduce; ranks are numbered host by host.

    The tensor is cut into slices, as many as the hosts' sizes have in common (their least common multiple, at most
    1024). Inside a host of g ranks, rank j reduces its g-th part of them; each slice is then all-reduced among the
    ranks that carry it, one per host; the reversed inner algorithm hands it to everybody in the host. Hosts of unequal
    sizes wait for the slowest inner algorithm; a rank of a small host carries more slices.

    Args:
        ranks_per_host: Ranks in every host, or a list of the hosts' sizes, such as `[3, 2, 4]`.
        hosts: Number of hosts; left out where a list says it.
        inner: Makes the reduce-scatter inside a host of the given size.
        outer: Makes the all-reduce between the given number of hosts; it may use switches.

    Raises:
        UsageError: A size is below 1, hosts are missing or said twice, or `inner` or `outer` make something else.
    """
    sizes = _sizes(ranks_per_host, hosts)
    made, between = {size: inner(size) for size in dict.fromkeys(sizes)}, outer(len(sizes))
    kinds = tuple(made.values())  # far fewer than hosts
    for part, wanted, schedule in [("outer", ALL_REDUCE, between), *(("inner", REDUCE_SCATTER, s) for s in kinds)]:
        if schedule.collective != wanted:
            raise UsageError(f"{part} must make a {wanted}, and {schedule.name} is a {schedule.collective}")
    slices = min(lcm(*(s.chunks for s in kinds)), max(MOST_SLICES, *(s.chunks for s in kinds)))
    rounds = max(s.rounds for s in kinds)
    # Hosts of unequal sizes have no stretches inside: every round is its own.
    inside = (kinds[0].stretches if len(kinds) == 1 else ()) or (1,) * rounds
    return Schedule(
        "hierarchical",
        ranks=sum(sizes),
        chunks=slices * between.chunks,
        rounds=2 * rounds + between.rounds,
        generate=_hierarchical_round,
        parameters=(tuple(made[size] for size in sizes), between, slices),
        switches=between.switches,
        stretches=(*inside, *(between.stretches or (1,) * between.rounds), *inside[::-1]),
    )


def host_sizes(n: int) -> list[int]:
    """Return the hosts that the catalogue's `hierarchical` cuts n ranks into: as square as can be.

    As many hosts as the largest divisor of n that is at most the square root of n; for primes, as many as the square
    root rounded down, their sizes differing by one.

    Raises:
        UsageError: n < 1.
    """
    if n < 1:
        raise UsageError(f"hierarchical needs at least 1 rank, not {n}")
    root = isqrt(n)
    divisor = max(d for d in range(1, root + 1) if n % d == 0)
    count = divisor if divisor > 1 else root
    return [n // count + (host < n % count) for host in range(count)]


def square_hierarchical(n: int) -> Schedule:
    """Return the hierarchical all-reduce of n ranks in hosts of `host_sizes(n)`; raise `UsageError`: n < 1."""
    return hierarchical(host_sizes(n))


def over_groups(groups: Sequence[Sequence[int]]) -> Schedule:
    """Return the hierarchical all-reduce of ranks that are near each other as `groups` says, however they are numbered.

    Args:
        groups: The ranks of each; together they are 0 to n - 1, each once.

    Raises:
        UsageError: They are not.
    """
    schedule, order = hierarchical([len(ranks) for ranks in groups]), [rank for ranks in groups for rank in ranks]
    return schedule if order == list(range(len(order))) else relabel(schedule, order)


def _sizes(ranks_per_host: int | Sequence[int], hosts: int | None) -> tuple[int, ...]:
    if isinstance(ranks_per_host, int):
        if hosts is None:
            raise UsageError("hierarchical needs a number of hosts, or a list of their sizes such as [3, 2, 4]")
        sizes = (ranks_per_host,) * hosts
    else:
        sizes = tuple(int(size) for size in ranks_per_host)
        if hosts not in (None, len(sizes)):
            raise UsageError(f"hierarchical was given {len(sizes)} host sizes and hosts={hosts}; leave hosts out")
    if not sizes or min(sizes) < 1:
        raise UsageError(f"hierarchical needs at least 1 host of at least 1 rank each, not {list(sizes)}")
    return sizes


def _hierarchical_round(inners: tuple[Schedule, ...], outer: Schedule, slices: int, k: int) -> Round:
    inside = max(s.rounds for s in inners)
    if k < inside:
        return _inside(inners, outer.chunks, slices, k)
    if k < inside + outer.rounds:  # the outer round of every slice, slice by slice
        step, carrier = outer.round(k - inside), _carriers(inners, outer, slices)
        chunk = np.arange(slices, dtype=np.int64)[:, None] * outer.chunks + step.chunk
        src, dst = carrier[step.src].T.ravel(), carrier[step.dst].T.ravel()
        return Round(src, dst, chunk.ravel(), np.tile(step.reduce, slices))
    return _inside(tuple(reverse(s) for s in inners), outer.chunks, slices, k - inside - outer.rounds)


def _inside(inners: tuple[Schedule, ...], pieces: int, slices: int, k: int) -> Round:
    """All hosts' inner rounds side by side; each slice is `pieces` chunks."""
    parts, first = [], 0
    for s in inners:
        if k < s.rounds:
            step = refined(refined(s.round(k), s.chunks, slices), slices, slices * pieces)
            parts.append(Round(step.src + first, step.dst + first, step.chunk, step.reduce))
        first += s.ranks
    return joined(parts)


def _carriers(inners: tuple[Schedule, ...], outer: Schedule, slices: int) -> NDArray[np.int64]:
    """Return which vertex carries a slice for a host, or for one of the outer algorithm's switches.

    Returns:
        int64 [hosts + switches, slices].
    """
    which = np.arange(slices, dtype=np.int64)
    rows, first = [], 0
    for s in inners:
        rows.append(first + which * s.chunks // slices * s.ranks // s.chunks)
        first += s.ranks
    rows += [np.full(slices, first + switch) for switch in range(outer.switches)]
    return np.stack(rows)


# -------------------------------------------------------------------------------------------------
# In-network reduction.


def in_network(n: int) -> Schedule:
    """In-network reduction: the switch adds. One round up, one down, whatever the number of ranks.

    R. Graham et al.: "Scalable Hierarchical Aggregation Protocol (SHArP): a hardware architecture for efficient data
    reduction", COM-HPC 2016.

    Return the all-reduce of `n` ranks around one switch, vertex n, that reduces.

    Round 0: everybody sends the tensor up, and the switch adds in rank order; round 1: it sends the sum down to all.
    One chunk, 2 rounds, one tensor sent and received per rank over one port: less than any schedule without such a
    switch can do. Canonical. A single rank needs neither rounds nor a switch.

    Raises:
        UsageError: n < 1.
    """
    alone = n <= 1
    return Schedule("in_network", n, 1, 0 if alone else 2, _switch_round, (n,), switches=0 if alone else 1)


def _switch_round(n: int, k: int) -> Round:
    ranks = np.arange(n, dtype=np.int32)
    switch = np.full(n, n, dtype=np.int32)
    src, dst = (ranks, switch) if k == 0 else (switch, ranks)
    return Round(src, dst, np.zeros_like(ranks), np.full(n, k == 0))
