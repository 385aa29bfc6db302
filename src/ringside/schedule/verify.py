"""The proof that a schedule is an all-reduce, and what it costs.

`verify` runs a schedule on symbols: every chunk on every rank holds an expression, the sum it is, and every round
rewrites them. At the end every expression must add up every rank's contribution exactly once, and all ranks must hold
the same one. No numbers are involved, so the proof holds for all inputs, dtypes and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule.audit import Audit, Problem
from ringside.schedule.deadlock import Wait, cycles
from ringside.schedule.expressions import Expressions, Ids, advance
from ringside.schedule.schedule import Round, Schedule


def verify(schedule: Schedule, *, buffers: int = 1) -> Audit:
    """Prove a schedule right, or say what is wrong with it and where.

    It proves that every result contains every contribution exactly once; that all ranks compute each chunk by the same
    expression, up to the order of the two operands of one addition (which IEEE 754 leaves without effect), so that
    results are equal bit for bit; that no two writes into one chunk are unordered; and that no round can deadlock when
    a rank has room for `buffers` messages that it has received but not stored (`ringside.schedule.deadlock`). If a
    transfer is malformed, nothing else is looked at.

    Args:
        schedule: Any schedule; a broken one is reported, not raised.
        buffers: Messages a rank can hold, at least 1.

    Returns:
        The audit; `.ok` is the verdict.

    Raises:
        UsageError: `buffers` < 1.
    """
    if buffers < 1:
        raise UsageError(f"a rank needs at least 1 buffer to receive anything, not {buffers}")
    pool = Expressions(schedule.ranks, schedule.chunks)
    state = pool.start()
    written = np.full(state.shape, -1, dtype=np.int64)
    traffic = _Traffic(schedule.ranks)
    malformed: list[Problem] = []
    unsafe: list[Problem] = []
    for k in range(schedule.rounds):
        step = schedule.round(k)
        malformed += _malformed(schedule, step, k)
        step = step.where(_well_formed(schedule, step))
        unsafe += [*_unordered_writes(schedule, step, k), *_deadlocks(step, k, buffers)]
        state = advance(pool, state, step, k)
        written[step.dst, step.chunk] = k
        traffic.count(step)
    problems = malformed or [*unsafe, *_wrong_results(pool, state, written)]
    return Audit(
        name=schedule.name,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        rounds=schedule.rounds,
        problems=tuple(problems),
        max_bytes_sent=Fraction(int(traffic.sent.max()), schedule.chunks),
        max_bytes_received=Fraction(int(traffic.received.max()), schedule.chunks),
        max_ports=traffic.ports,
        buffers=buffers,
        _pool=pool,
        _final=state,
    )


class _Traffic:
    """Chunks sent and received per rank, int64 [ranks], and the most peers of one rank in one round."""

    def __init__(self, ranks: int) -> None:
        self.sent = np.zeros(ranks, dtype=np.int64)
        self.received = np.zeros(ranks, dtype=np.int64)
        self.ports = 0

    def count(self, step: Round) -> None:
        ranks = len(self.sent)
        self.sent += np.bincount(step.src, minlength=ranks)
        self.received += np.bincount(step.dst, minlength=ranks)
        src, dst = np.divmod(np.unique(step.src.astype(np.int64) * ranks + step.dst), ranks)
        peers = [np.bincount(side, minlength=1).max() for side in (src, dst)]
        self.ports = max(self.ports, *map(int, peers))


def _well_formed(schedule: Schedule, step: Round) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = (step.chunk >= 0) & (step.chunk < schedule.chunks) & (step.src != step.dst)
    for side in (step.src, step.dst):
        inside &= (side >= 0) & (side < schedule.ranks)
    return inside


def _malformed(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    for src, dst, chunk, _ in step.where(~_well_formed(schedule, step)):
        outside = [rank for rank in (src, dst) if not 0 <= rank < schedule.ranks]
        if outside:
            why = f"there is no rank {outside[0]}, only ranks 0 to {schedule.ranks - 1}"
        elif src == dst:
            why = "a rank cannot send to itself"
        else:
            why = f"there is no chunk {chunk}, only chunks 0 to {schedule.chunks - 1}"
        message = f"in round {k} rank {src} sends chunk {chunk} to rank {dst}, but {why}"
        yield Problem("malformed", message, rank=(outside or [src])[0], chunk=chunk, round=k)


def _unordered_writes(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    target = step.dst.astype(np.int64) * schedule.chunks + step.chunk
    unique, writes = np.unique(target, return_counts=True)
    for flat in np.intersect1d(unique[writes > 1], target[~step.reduce]).tolist():
        rank, chunk = divmod(flat, schedule.chunks)
        sources = step.src[target == flat].tolist()
        message = (
            f"in round {k} {_ranks(sources)} write into chunk {chunk} of rank {rank} at once, at least one of them "
            "overwriting it: the result depends on who comes last"
        )
        yield Problem("order", message, rank, chunk, k)


def _deadlocks(step: Round, k: int, buffers: int) -> Iterator[Problem]:
    for cycle in cycles(step, buffers):
        enough = buffers + 1
        while cycles(step, enough):
            enough += 1
        who = " and ".join(_wait(wait) for wait in cycle[:4]) + (" and so on" if len(cycle) > 4 else "")
        message = f"in round {k} {who}; with {enough} buffers instead of {buffers} this round can finish"
        yield Problem("deadlock", message, cycle[0].rank, cycle[0].chunk, k)


def _wait(wait: Wait) -> str:
    if wait.on == wait.rank:
        reason = "a message from a lower rank that it has not taken yet (list them in rank order)"
    else:
        reason = f"rank {wait.on} to read that chunk"
    return f"rank {wait.rank} holds a message for chunk {wait.chunk} and waits for {reason}"


@dataclass(frozen=True, slots=True)
class _Result:
    """One value that a chunk ends with, and the ranks that hold it, the one it first came to in front."""

    chunk: int
    expression: int
    holders: tuple[int, ...]
    round: int | None

    @property
    def when(self) -> str:
        return "no round writes it" if self.round is None else f"written in round {self.round}"


def _wrong_results(pool: Expressions, final: Ids, written: Ids) -> Iterator[Problem]:
    """Look at every value that some rank ends with, chunk by chunk."""
    sizes, sets = pool.sizes_and_sets()
    everybody = np.bitwise_or.reduce(sets[: pool.ranks])
    for chunk in range(final.shape[1]):
        column = final[:, chunk]
        distinct = np.unique(column)
        right = (sizes[distinct] == pool.ranks) & (sets[distinct] == everybody).all(axis=1)
        if len(distinct) == 1 and right[0]:
            continue
        for expression in distinct[~right].tolist():
            yield from _wrong_sum(pool, _result(chunk, expression, column, written))
        complete = [_result(chunk, expression, column, written) for expression in distinct[right].tolist()]
        yield from _different_orders(pool, complete)


def _result(chunk: int, expression: int, column: Ids, written: Ids) -> _Result:
    holders = np.flatnonzero(column == expression)
    first = holders[np.argsort(written[holders, chunk], kind="stable")]
    when = int(written[first[0], chunk])
    return _Result(chunk, expression, tuple(first.tolist()), None if when < 0 else when)


def _wrong_sum(pool: Expressions, result: _Result) -> Iterator[Problem]:
    times = pool.contributors(result.expression)
    missing = [rank for rank in range(pool.ranks) if rank not in times]
    where = f"chunk {result.chunk} of {_ranks(result.holders)}"
    if missing:
        message = (
            f"{where} ends as {pool.text(result.expression, 60)} ({result.when}), "
            f"without the {_contributions(missing)} of {_ranks(missing)}"
        )
        yield Problem("missing", message, result.holders[0], result.chunk, result.round)
    double = [rank for rank, count in sorted(times.items()) if count > 1]
    if double:
        rank, k = pool.origin(_first_double(pool, result.expression))
        message = (
            f"{where} ends as {pool.text(result.expression, 60)}, "
            f"with the {_contributions(double)} of {_ranks(double)} more than once, "
            f"first so on rank {rank} in round {k}"
        )
        yield Problem("double", message, rank, result.chunk, k)


def _first_double(pool: Expressions, expression: int) -> int:
    """Return the oldest part of an expression that contains something twice."""
    for node in reversed(pool.reachable(expression)):
        if max(pool.contributors(node).values()) > 1:
            return node
    raise AssertionError("nothing is in it twice")


def _different_orders(pool: Expressions, results: list[_Result]) -> Iterator[Problem]:
    if len(results) < 2:
        return
    # Take the order that most ranks agree on as the intended one.
    usual, *others = sorted(results, key=lambda result: (-len(result.holders), min(result.holders)))
    for result in others:
        message = (
            f"chunk {result.chunk} of {_ranks(result.holders)} ends as {pool.text(result.expression, 60)} "
            f"({result.when}), but of {_ranks(usual.holders)} as {pool.text(usual.expression, 60)}: "
            "added in another order, so not equal bit for bit"
        )
        yield Problem("order", message, result.holders[0], result.chunk, result.round)


def _contributions(ranks: list[int]) -> str:
    return "contribution" if len(ranks) == 1 else "contributions"


def _ranks(ranks: Iterable[int]) -> str:
    """Say which ranks, runs of them shortened: `rank 3`, `ranks 0, 2-5`."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "ranks " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
