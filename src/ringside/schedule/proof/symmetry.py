"""The proof of a rotational schedule from one rank's share of it.

The rotation takes chunk block i to block i+1 and rank r to rank r+1, so what happens to the chunks of block 0 happens
to all others, turned. Those chunks' transfers, on all ranks, are one turned representative per orbit: 2(n-1) of a
ring's 2n(n-1). They are run on symbols here.

One thing does not rotate: folds are in ascending *rank* order, and that order changes when ranks are renumbered. Of a
fold of two values the order does not matter, since addition commutes. A fold of three or more is the same in all turns
if it adds what ranks held at the start: which ranks then says which sum, whatever the order. Where a schedule does
anything else, `prove` gives up, and the whole schedule has to be looked at.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ringside.schedule.proof.audit import Problem, Proof
from ringside.schedule.proof.expressions import Expressions, Ids
from ringside.schedule.proof.results import Outcome, wrong_results
from ringside.schedule.proof.safety import deadlocks, malformed, unordered_writes
from ringside.schedule.schedule import Round, Schedule, Transfer
from ringside.schedule.traffic import Counts, all_representatives, rotational_traffic, well_formed

_ROTATING = ("all_reduce", "reduce_scatter", "all_gather")


def prove(schedule: Schedule, buffers: int) -> Proof | None:
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
    return Proof(problems, canonical, rotational_traffic(schedule, number, step), partial(_expression, block, end))


def _expression(block: _Block, end: Outcome, chunk: int, rank: int) -> str:
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
