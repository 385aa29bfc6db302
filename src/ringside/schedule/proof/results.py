"""Whether the values that ranks end with are the ones the collective wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.collective import Collective, Table
from ringside.schedule.proof.audit import Problem
from ringside.schedule.proof.expressions import Expressions, Ids
from ringside.text import name_vertices


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a schedule left, for some of its chunks.

    Args:
        pool: Where the expressions live.
        final: What every vertex holds of every chunk, int64 [vertices, chunks].
        written: The round that last wrote it, int64 [vertices, chunks]; -1: none.
        holds: What vertices held at the start, bool [vertices, chunks].
        wants: Where results must be, bool [vertices, chunks].
        ranks: Vertices from here on are switches.
        collective: What it should be.
    """

    pool: Expressions
    final: Ids
    written: Ids
    holds: Table
    wants: Table
    ranks: int
    collective: Collective


@dataclass(frozen=True, slots=True)
class _Result:
    """One value that a chunk ends with, and the ranks that hold it, the one it first came to in front."""

    chunk: int
    expression: int
    holders: tuple[int, ...]
    round: int | None

    @property
    def when(self) -> str:
        return "no round writes it" if self.round is None else f"written in round {self.round + 1}"


def wrong_results(end: Outcome) -> Iterator[Problem]:
    """Name every value that some rank wrongly ends with, chunk by chunk."""
    right = _right_expressions(end)
    once = end.collective.exactly_once
    # The chunks of which somebody ends with a wrong value, or not all with the same.
    top = np.where(end.wants, end.final, -1).max(axis=0)
    suspects = np.flatnonzero((end.wants & (~right[end.final] | (end.final != top))).any(axis=0))
    for chunk in suspects.tolist():
        column = np.where(end.wants[:, chunk], end.final[:, chunk], -1)
        distinct = np.unique(column[end.wants[:, chunk]])
        for expression in distinct[~right[distinct]].tolist():
            yield from _wrong_sum(end, _result(end, chunk, expression, column))
        complete = [_result(end, chunk, expression, column) for expression in distinct[right[distinct]].tolist()]
        yield from _different_orders(end, complete if once else [])


def canonical(end: Outcome) -> bool:
    """Return whether every wanted result is the left fold of its contributions in ascending rank order."""
    chunk = np.arange(end.final.shape[1], dtype=np.int64)
    several = end.holds.sum(axis=0) > 1
    if not several.any():
        return True
    members = np.sort(end.collective.members(end.ranks))
    anybody = end.wants.argmax(axis=0)
    return bool(end.pool.left_folds(end.final[anybody, chunk][several], chunk[several], members).all())


def _right_expressions(end: Outcome) -> NDArray[np.bool_]:
    """Return which expressions, bool [expressions], add up all that was held of their chunk, exactly once."""
    sizes, sets = end.pool.sizes_and_sets()
    bits = np.packbits(end.holds.T, axis=1, bitorder="little")
    words = np.zeros((len(bits), sets.shape[1] * 8), dtype=np.uint8)
    words[:, : bits.shape[1]] = bits
    wanted = words.view("<u8")
    everything = np.zeros(len(sizes), dtype=np.bool_)
    # An expression belongs to one chunk, that of its leaves; only those that a vertex ends with are checked.
    for vertex in np.flatnonzero(end.wants.any(axis=1)).tolist():
        chunk = np.flatnonzero(end.wants[vertex])
        expression = end.final[vertex, chunk]
        right = (sets[expression] == wanted[chunk]).all(axis=1)
        if end.collective.exactly_once:
            right &= sizes[expression] == end.holds.sum(axis=0)[chunk]
        everything[expression] = right
    return everything


def _result(end: Outcome, chunk: int, expression: int, column: Ids) -> _Result:
    holders = np.flatnonzero(column == expression)
    first = holders[np.argsort(end.written[holders, chunk], kind="stable")]
    when = int(end.written[first[0], chunk])
    return _Result(chunk, expression, tuple(first.tolist()), None if when < 0 else when)


def _wrong_sum(end: Outcome, result: _Result) -> Iterator[Problem]:
    pool, held = end.pool, np.flatnonzero(end.holds[:, result.chunk]).tolist()
    times = pool.contributors(result.expression)
    missing = [rank for rank in held if rank not in times]
    value = f"chunk {result.chunk} of {_who(end, result.holders)} ends as {pool.text(result.expression, 60)}"
    aim = "" if end.collective.name == "all_reduce" else f", which a {end.collective} needs"
    if missing:
        message = f"{value} ({result.when}), without the {_contributions(missing)} of {_who(end, missing)}{aim}"
        yield Problem("missing", message, result.holders[0], result.chunk, result.round)
    foreign = [vertex for vertex in times if vertex not in held]
    if foreign and not missing:
        message = (
            f"{value} ({result.when}), with what {_who(end, foreign)} held there at the start, "
            f"which a {end.collective} leaves undefined"
        )
        yield Problem("undefined", message, result.holders[0], result.chunk, result.round)
    double = [vertex for vertex, count in sorted(times.items()) if count > 1 and vertex in held]
    if double and end.collective.exactly_once:
        # Where it went wrong: the oldest part of the expression that contains something twice.
        nodes = reversed(pool.reachable(result.expression))
        oldest = next(node for node in nodes if max(pool.contributors(node).values()) > 1)
        rank, k = pool.origin(oldest)
        message = (
            f"{value}, with the {_contributions(double)} of {_who(end, double)} more than once, "
            f"first so on {_who(end, [rank])} in round {k + 1}"
        )
        yield Problem("double", message, rank, result.chunk, k)


def _different_orders(end: Outcome, results: list[_Result]) -> Iterator[Problem]:
    if len(results) < 2:
        return
    # Take the order that most ranks agree on as the intended one.
    usual, *others = sorted(results, key=lambda result: (-len(result.holders), min(result.holders)))
    for result in others:
        message = (
            f"chunk {result.chunk} of {_who(end, result.holders)} ends as {end.pool.text(result.expression, 60)} "
            f"({result.when}), but of {_who(end, usual.holders)} as {end.pool.text(usual.expression, 60)}: "
            "added in another order, so not equal bit for bit"
        )
        yield Problem("order", message, result.holders[0], result.chunk, result.round)


def _who(end: Outcome, vertices: tuple[int, ...] | list[int]) -> str:
    return name_vertices(vertices, end.ranks)


def _contributions(ranks: list[int]) -> str:
    return "contribution" if len(ranks) == 1 else "contributions"
