"""New schedules out of old ones: pipelined, striped, reversed, renamed, on a part of the ranks.

Every combinator is a function from schedules to a schedule; what it makes is a value like any other, generated when
asked for. `verify` proves the result; a combinator refuses only what it cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule.collective import Collective
from ringside.schedule.schedule import Round, Schedule, joined

_REVERSED = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    "barrier": "barrier",
}


def pipelined(s: Schedule, segments: int) -> Schedule:
    """Return `s` with every chunk cut into segments that follow each other one round apart.

    Chunk c becomes the chunks `c*segments + j`; segment j does in round k + j what its chunk did in round k. Takes
    `s.rounds + segments - 1` rounds, each 1/segments as long. The bounds of chunks nest, so the result is equal to
    that of `s` bit for bit.

    Args:
        s: Any schedule.
        segments: Pieces per chunk, at least 1.

    Raises:
        UsageError: `segments` < 1.
    """
    if segments < 1:
        raise UsageError(f"pipelining {s.name} needs at least 1 segment, not {segments}")
    return replace(
        s,
        chunks=s.chunks * segments,
        rounds=s.rounds + segments - 1 if s.rounds else 0,
        generate=_pipelined_round,
        parameters=(s, segments),
        stretches=s.stretches if segments == 1 else (),
    )


def _pipelined_round(s: Schedule, segments: int, t: int) -> Round:
    # In round t segment j does what its chunk did in round t - j. The oldest is asked for first, or the cache would
    # drop each round just before it is needed again.
    running, round_of = range(max(0, t - s.rounds + 1), min(segments, t + 1)), _rounds_of(s)
    steps = [round_of(t - j) for j in reversed(running)][::-1]
    step, segment = joined(steps), np.repeat(running, [len(step) for step in steps])
    return Round(step.src, step.dst, step.chunk * segments + segment, step.reduce)


@lru_cache(maxsize=2)
def _rounds_of(s: Schedule) -> Callable[[int], Round]:
    """Return what makes a round, or a rotational one's representatives: each is needed once for every segment."""
    return lru_cache(maxsize=64)(s.representatives if s.rotational else s.round)


def striped(schedules: Sequence[Schedule], name: str = "striped") -> Schedule:
    """Return the schedules side by side, each on an equal share of the tensor, all starting in round 0.

    Args:
        schedules: One or more of the same ranks and the same collective, which must not say by its chunks' numbers whom
            they belong to (all-reduce, broadcast, reduce, barrier). Stripe i is part i of the tensor.
        name: What to call the result.

    Raises:
        UsageError: The schedules do not fit together.
    """
    stripes = tuple(schedules)
    if not stripes:
        raise UsageError("there is nothing to stripe: give at least one schedule")
    first = stripes[0]
    if any((s.ranks, s.collective) != (first.ranks, first.collective) for s in stripes):
        kinds = ", ".join(f"{s.name} ({s.collective}, {s.ranks} ranks)" for s in stripes)
        raise UsageError(f"stripes must have the same ranks and collective, not {kinds}")
    if first.collective.owned:
        raise UsageError(f"a {first.collective} cannot be striped: its chunks' numbers are their owners'")
    return Schedule(
        name,
        first.ranks,
        chunks=len(stripes) * lcm(*(s.chunks for s in stripes)),
        rounds=max(s.rounds for s in stripes),
        generate=_striped_round,
        parameters=(stripes,),
        switches=max(s.switches for s in stripes),
        collective=first.collective,
    )


def _striped_round(stripes: tuple[Schedule, ...], k: int) -> Round:
    share = lcm(*(s.chunks for s in stripes))
    parts = [(i, refined(s.round(k), s.chunks, share)) for i, s in enumerate(stripes) if k < s.rounds]
    return joined([Round(p.src, p.dst, p.chunk + i * share, p.reduce) for i, p in parts])


def reverse(s: Schedule) -> Schedule:
    """Return `s` run backwards: every transfer goes the other way, copies become reductions and reductions copies.

    It makes an all-gather of a reduce-scatter and the other way round, a broadcast of a reduce, a scatter of a gather
    (which copy in both directions), an all-reduce of an all-reduce. Right for schedules in which every rank hands a
    chunk on only once, as trees and rings do; `verify` tells.

    Raises:
        UsageError: `s` is an all-to-all: backwards its chunks would have other numbers.
    """
    if s.collective.name not in _REVERSED:
        raise UsageError(f"{s.name} cannot be reversed: backwards the chunks of an all-to-all have other numbers")
    name, collective = f"reversed {s.name}", replace(s.collective, name=_REVERSED[s.collective.name])
    return replace(
        s, name=name, generate=_reversed_round, parameters=(s,), collective=collective, stretches=s.stretches[::-1]
    )


def _reversed_round(s: Schedule, k: int) -> Round:
    # Where the collective copies in both directions, so does its reverse.
    last = s.rounds - 1 - k
    step = s.representatives(last) if s.rotational else s.round(last)
    copies_stay = s.collective.name in ("gather", "scatter", "barrier")
    back = Round(step.dst, step.src, step.chunk, step.reduce if copies_stay else ~step.reduce)
    return back if s.rotational else in_rank_order(back, s.chunks)


def relabel(s: Schedule, order: Sequence[int]) -> Schedule:
    """Return `s` with rank i's part played by rank `order[i]`: a ring in another order, a tree with another root.

    Reductions still add in ascending rank order, as the contract says, so sums may be other ones. Where chunks belong
    to ranks they move with them. Switches keep their numbers.

    Args:
        s: Any schedule.
        order: A permutation of the ranks.

    Raises:
        UsageError: `order` is not a permutation, or the chunks of an owned collective do not divide by the ranks.
    """
    names = tuple(int(rank) for rank in order)
    if sorted(names) != list(range(s.ranks)):
        raise UsageError(f"an order of {s.ranks} ranks names each of 0 to {s.ranks - 1} once, not {list(names)}")
    if s.collective.group is not None:
        raise UsageError(f"relabel {s.name} before putting it on a group: the group's order does the same")
    if s.collective.owned and s.chunks % (s.ranks ** (2 if s.collective.name == "all_to_all" else 1)):
        raise UsageError(f"{s.name} cannot be relabelled: its {s.chunks} chunks do not divide by {s.ranks} ranks")
    root = None if s.collective.root is None else names[s.collective.root]
    name, collective = f"{s.name} in another order", replace(s.collective, root=root)
    return replace(
        s, name=name, generate=_relabelled_round, parameters=(s, names), collective=collective, rotational=False
    )


def _relabelled_round(s: Schedule, names: tuple[int, ...], k: int) -> Round:
    step = s.round(k)
    vertex = np.array([*names, *range(s.ranks, s.vertices)], dtype=np.int32)
    moved = _moved_chunks(s.collective, s.chunks, vertex[: s.ranks].astype(np.int64))
    chunk = moved[step.chunk].astype(np.int32)
    return in_rank_order(Round(vertex[step.src], vertex[step.dst], chunk, step.reduce), s.chunks)


def _moved_chunks(collective: Collective, chunks: int, names: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return every chunk's new number, int64 [chunks], so that it belongs to the renamed rank."""
    chunk = np.arange(chunks, dtype=np.int64)
    if not collective.owned:
        return chunk
    # An all-to-all's blocks belong to pairs of ranks.
    owners = (names[:, None] * len(names) + names).ravel() if collective.name == "all_to_all" else names
    owner, piece = np.divmod(chunk, chunks // len(owners))
    return owners[owner] * (chunks // len(owners)) + piece


def on_group(s: Schedule, ranks: Sequence[int], of: int) -> Schedule:
    """Return `s` run by some of the ranks of a larger world; the others do nothing and get nothing.

    Args:
        s: Any schedule over all of its own ranks.
        ranks: Which rank of the world plays rank i, `s.ranks` different ones.
        of: Ranks in the world.

    Raises:
        UsageError: `ranks` are not `s.ranks` different ranks below `of`, or `s` is on a group already.
    """
    group = tuple(int(rank) for rank in ranks)
    if len(set(group)) != len(group) or not all(0 <= rank < of for rank in group) or len(group) != s.ranks:
        raise UsageError(f"{s.name} needs {s.ranks} different ranks of 0 to {of - 1}, not {list(group)}")
    if s.collective.group is not None:
        raise UsageError(f"{s.name} is on a group already; put the schedule it was made of on the other group")
    collective = replace(s.collective, group=group)
    return replace(
        s, ranks=of, generate=_group_round, parameters=(s, group, of), collective=collective, rotational=False
    )


def _group_round(s: Schedule, group: tuple[int, ...], of: int, k: int) -> Round:
    step = s.round(k)
    vertex = np.array([*group, *range(of, of + s.switches)], dtype=np.int32)
    return in_rank_order(Round(vertex[step.src], vertex[step.dst], step.chunk, step.reduce), s.chunks)


def refined(step: Round, chunks: int, finer: int) -> Round:
    """Return a round over `chunks` chunks as one over `finer` ≥ chunks: chunk c is all t of `t*chunks//finer == c`."""
    if finer == chunks:
        return step
    # Chunk c begins at ceil(c * finer / chunks) in the finer numbering; each transfer is repeated for its pieces.
    bounds = -(-np.arange(chunks + 1, dtype=np.int64) * finer // chunks)
    first, count = bounds[step.chunk], np.diff(bounds)[step.chunk]
    which = np.repeat(np.arange(len(step)), count)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return Round(step.src[which], step.dst[which], first[which] + piece, step.reduce[which])


def in_rank_order(step: Round, chunks: int) -> Round:
    """Return the round with the messages of each fold in ascending rank order, in the places they had together."""
    # Sort by (target, sender), and put the k-th of a target where that target's k-th message was.
    target = step.dst.astype(np.int64) * chunks + step.chunk
    places, ascending = np.argsort(target, kind="stable"), np.lexsort((step.src, target))
    row = np.empty_like(places)
    row[places] = ascending
    return Round(step.src[row], step.dst[row], step.chunk[row], step.reduce[row])
