"""The proof that a schedule is what it says it is, and what it costs.

`verify` runs a schedule on symbols: every chunk on every vertex holds an expression, the sum it is, and every round
rewrites them. At the end every wanted expression must add up every contribution exactly once, and all ranks must hold
the same one. No numbers are involved, so the proof holds for all inputs, dtypes and sizes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ringside.errors import UsageError
from ringside.schedule.proof.audit import Audit, Problem, Proof
from ringside.schedule.proof.expressions import Expressions, Ids, advance
from ringside.schedule.proof.results import Outcome, canonical, wrong_results
from ringside.schedule.proof.safety import deadlocks, malformed, unordered_writes
from ringside.schedule.schedule import Round, Schedule, Transfer
from ringside.schedule.traffic import Counts, TrafficTally, all_representatives, rotational_traffic, well_formed

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
        by_symmetry: Prove a rotational schedule from one orbit, or not; None: if it is large. It makes no difference to
            the verdict.

    Returns:
        The audit; `.ok` is the verdict.

    Raises:
        UsageError: `buffers` < 1.
    """
    if buffers < 1:
        raise UsageError(f"a rank needs at least 1 buffer to receive anything, not {buffers}")
    large, by_orbit = schedule.ranks * schedule.chunks > _MANY_CELLS, None
    if schedule.rotational and (large if by_symmetry is None else by_symmetry):
        by_orbit = _prove_from_orbit(schedule, buffers)
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


# -------------------------------------------------------------------------------------------------
# The proof of a rotational schedule from one rank's share of it.
#
# The rotation takes chunk block i to block i+1 and rank r to rank r+1, so what happens to the chunks of block 0 happens
# to all others, turned. Those chunks' transfers, on all ranks, are one turned representative per orbit: 2(n-1) of a
# ring's 2n(n-1). They are run on symbols here.
#
# One thing does not rotate: folds are in ascending *rank* order, and that order changes when ranks are renumbered. Of a
# fold of two values the order does not matter, since addition commutes. A fold of three or more is the same in all
# turns if it adds what ranks held at the start: which ranks then says which sum, whatever the order. Where a schedule
# does anything else, `_prove_from_orbit` gives up, and the whole schedule has to be looked at.

_ROTATING = ("all_reduce", "reduce_scatter", "all_gather")


def _prove_from_orbit(schedule: Schedule, buffers: int) -> Proof | None:
    """Return the proof of a rotational schedule, or None where one orbit does not decide.

    Problems name the chunk, rank and round of one orbit; the same is wrong in every turn of it.
    """
    if schedule.collective.name not in _ROTATING or schedule.collective.group is not None:
        return None
    number, step = all_representatives(schedule)
    keep = well_formed(schedule, step)
    problems: list[Problem] = []
    for i in np.flatnonzero(~keep).tolist():
        problems += malformed(schedule, step.where(np.arange(len(step)) == i), int(number[i]))
    # Every transfer turned until it carries a chunk of block 0.
    n, width, kept = schedule.ranks, schedule.chunks // schedule.ranks, step.where(keep)
    turn = kept.chunk // width
    turned = Round((kept.src - turn) % n, (kept.dst - turn) % n, kept.chunk % width, kept.reduce)
    block = _Block(schedule, number[keep], turned)
    unsafe = [] if problems else [*block.unordered(), *block.deadlocks(buffers)]
    end = block.run()
    if end is None:
        return None
    if not problems:
        problems = [*unsafe, *([] if block.complete(end) else wrong_results(end))]
    canonical = block.folds_starts or schedule.ranks <= 2 or schedule.collective.name == "all_gather"
    return Proof(
        problems, canonical, rotational_traffic(schedule, number, step), partial(_turned_expression, block, end)
    )


def _turned_expression(block: _Block, end: Outcome, chunk: int, rank: int) -> str:
    # The value of the block's chunk on the rank that is as far from it, turned back.
    n = block.schedule.ranks
    turn, place = divmod(chunk, block.width)
    value = int(end.final[(rank - turn) % n, place])
    if not block.folds_starts:
        return end.pool.text(value, turn=turn)
    first, *others = sorted((r + turn) % n for r in end.pool.contributors(value))
    return "(" * len(others) + f"x{first}" + "".join(f"+x{r})" for r in others)


@dataclass(eq=False)
class _Block:
    """All transfers of the chunks of block 0, of all rounds.

    Args:
        schedule: The whole schedule.
        number: Each transfer's round, int64 [transfers], ascending.
        step: The transfers.
    """

    schedule: Schedule
    number: Counts
    step: Round
    folds_starts: bool = False

    @property
    def width(self) -> int:
        """Chunks in the block."""
        return self.schedule.chunks // self.schedule.ranks

    def _cells(self, side: Ids) -> Ids:
        """Number the (round, vertex, chunk) that each transfer reads or writes, int64 [transfers]."""
        return (self.number * self.schedule.ranks + side) * self.width + self.step.chunk

    def unordered(self) -> list[Problem]:
        written, copies = self._cells(self.step.dst.astype(np.int64)), ~self.step.reduce
        cells, times = np.unique(written, return_counts=True)
        clashes = np.intersect1d(cells[times > 1], written[copies]) // (self.schedule.ranks * self.width)
        small = replace(self.schedule, chunks=self.width, rotational=False)
        rounds = np.unique(clashes).tolist()
        return [p for k in rounds for p in unordered_writes(small, self.step.where(self.number == k), k)]

    def deadlocks(self, buffers: int) -> list[Problem]:
        """Check the rounds in which a chunk is read that a single message writes; others cannot block."""
        written, read = (self._cells(side.astype(np.int64)) for side in (self.step.dst, self.step.src))
        cells, times = np.unique(written[self.step.reduce], return_counts=True)
        alone = np.setdiff1d(written, cells[times > 1])
        rounds = np.unique(np.intersect1d(alone, read) // (self.schedule.ranks * self.width))
        return [p for k in rounds.tolist() for p in deadlocks(self.schedule, self.schedule.round(k), k, buffers)]

    def run(self) -> Outcome | None:
        """Run the block on symbols; None: it folds in a way that does not rotate."""
        n = self.schedule.ranks
        which = np.arange(self.width, dtype=np.int64)
        holds = self.schedule.collective.holds(n, self.schedule.chunks, which)
        wants = self.schedule.collective.wants(n, self.schedule.chunks, which)
        pool = Expressions(n, self.width, holds)
        state = pool.start().tolist()
        written = np.full((n, self.width), -1, dtype=np.int64)
        written[self.step.dst, self.step.chunk] = self.number
        rounds: dict[int, list[Transfer]] = defaultdict(list)
        for k, row in zip(self.number.tolist(), self.step, strict=True):
            rounds[k].append(row)
        kinds: set[str] = set()
        for k, rows in rounds.items():
            self._advance(pool, state, rows, k, kinds)
        if "other" in kinds or {"pair", "starts"} <= kinds:
            return None
        self.folds_starts = "starts" in kinds
        final = np.array(state, dtype=np.int64).reshape(n, self.width)
        return Outcome(pool, final, written, holds, wants, n, self.schedule.collective)

    def _advance(
        self, pool: Expressions, state: list[list[int]], rows: list[Transfer], k: int, kinds: set[str]
    ) -> None:
        """Take the state through round k and note which kinds of folds there were."""
        # All transfers carry the values from before the round.
        folds: dict[tuple[int, int], list[int]] = defaultdict(list)
        copies = {}
        for src, dst, chunk, reducing in rows:
            if reducing:
                folds[dst, chunk].append(src)
            else:
                copies[dst, chunk] = state[src][chunk]
        sums = {}
        for (dst, chunk), sources in folds.items():
            terms = [(rank, state[rank][chunk]) for rank in sorted([*sources, dst])]
            # A fold in rank order rotates if it has two terms (a sum commutes), or only what ranks held at the start.
            if len(terms) == 2:
                kinds.add("pair")
            else:
                first_leaf = chunk * self.schedule.ranks
                kinds.add("starts" if all(value == first_leaf + rank for rank, value in terms) else "other")
            value = terms[0][1]
            for _, term in terms[1:]:
                value = pool.add_one(value, term, dst, k)
            sums[dst, chunk] = value
        for (dst, chunk), value in [*sums.items(), *copies.items()]:
            state[dst][chunk] = value

    def complete(self, end: Outcome) -> bool:
        """Return whether each chunk's wanted values are one, and it contains every contribution once."""
        for chunk in range(self.width):
            distinct = np.unique(end.final[end.wants[:, chunk], chunk])
            held = np.flatnonzero(end.holds[:, chunk]).tolist()
            if len(distinct) != 1 or end.pool.contributors(int(distinct[0])) != dict.fromkeys(held, 1):
                return False
        return True
