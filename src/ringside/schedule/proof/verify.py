"""The proof that a schedule is what it says it is, and what it costs.

`verify` runs a schedule on symbols: every chunk on every vertex holds an expression, the sum it is, and every round
rewrites them. At the end every wanted expression must add up every contribution exactly once, and all ranks must hold
the same one. No numbers are involved, so the proof holds for all inputs, dtypes and sizes.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ringside.errors import UsageError
from ringside.schedule.proof import symmetry as orbit
from ringside.schedule.proof.audit import Audit, Problem, Proof
from ringside.schedule.proof.expressions import Expressions, Ids, advance
from ringside.schedule.proof.results import Outcome, canonical, wrong_results
from ringside.schedule.proof.safety import deadlocks, malformed, unordered_writes
from ringside.schedule.schedule import Schedule
from ringside.schedule.traffic import TrafficTally, well_formed

# Ranks x chunks above which a rotational schedule is proved from one orbit.
_MANY_CELLS = 1 << 16


def verify(schedule: Schedule, *, buffers: int = 1, by_symmetry: bool | None = None) -> Audit:
    """Prove a schedule right, or say what is wrong with it and where.

    It proves that every result its collective wants contains every contribution exactly once and nothing undefined;
    that all ranks compute each chunk by the same expression, up to the order of the two operands of one addition (which
    IEEE 754 leaves without effect), so that results are equal bit for bit; that no two writes into one chunk are
    unordered; and that no round can deadlock when a rank has room for `buffers` messages that it has received but not
    stored (`ringside.schedule.proof.safety`). If a transfer is malformed, nothing else is looked at.

    Args:
        schedule: Any schedule; a broken one is reported, not raised.
        buffers: Messages a rank can hold, at least 1.
        by_symmetry: Prove a rotational schedule from one orbit (`ringside.schedule.proof.symmetry`), or not; None: if
        it is
            large. It makes no difference to the verdict.

    Returns:
        The audit; `.ok` is the verdict.

    Raises:
        UsageError: `buffers` < 1.
    """
    if buffers < 1:
        raise UsageError(f"a rank needs at least 1 buffer to receive anything, not {buffers}")
    large, by_orbit = schedule.ranks * schedule.chunks > _MANY_CELLS, None
    if schedule.rotational and (large if by_symmetry is None else by_symmetry):
        by_orbit = orbit.prove(schedule, buffers)
    found = by_orbit or _prove(schedule, buffers)
    return Audit(
        name=schedule.name,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        rounds=schedule.rounds,
        problems=tuple(found.problems),
        buffers=buffers,
        switches=schedule.switches,
        collective=schedule.collective,
        canonical=found.canonical and not found.problems,
        by_symmetry=by_orbit is not None,
        traffic=found.traffic,
        _expression=found.expression,
    )


def _prove(schedule: Schedule, buffers: int) -> Proof:
    """Prove a schedule by running all of it on symbols: every rank, every chunk."""
    # A switch holds and wants nothing.
    nothing = np.zeros((schedule.switches, schedule.chunks), dtype=np.bool_)
    tables = (schedule.collective.holds, schedule.collective.wants)
    holds, wants = (np.concatenate([table(schedule.ranks, schedule.chunks), nothing]) for table in tables)
    pool = Expressions(schedule.vertices, schedule.chunks, holds)
    state = pool.start()
    written = np.full(state.shape, -1, dtype=np.int64)
    tally = TrafficTally(schedule)
    impossible: list[Problem] = []
    unsafe: list[Problem] = []
    for k in range(schedule.rounds):
        step = schedule.round(k)
        wrong = list(malformed(schedule, step, k))  # go on without what cannot be, to find the rest
        if wrong:
            impossible += wrong
            step = step.where(well_formed(schedule, step))
        unsafe += [*unordered_writes(schedule, step, k), *deadlocks(schedule, step, k, buffers)]
        advance(pool, state, step, k, schedule.ranks)
        written[step.dst, step.chunk] = k
        tally.count(step)
    end = Outcome(pool, state, written, holds, wants, schedule.ranks, schedule.collective)
    problems = impossible or [*unsafe, *wrong_results(end)]
    return Proof(problems, canonical(end), tally.traffic(), partial(_expression, pool, state))


def _expression(pool: Expressions, final: Ids, chunk: int, rank: int) -> str:
    return pool.text(int(final[rank, chunk]))
