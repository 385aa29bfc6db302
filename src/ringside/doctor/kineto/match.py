"""The same collective on all ranks: matched by group and sequence number, waits, lateness, clocks.

`wait = own duration − minimum over ranks` needs no common clock. All ranks leave a collective together, so its ends
coincide: they show how far the ranks' clocks are apart, and lateness is measured after that is taken off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ringside.doctor.kineto.trace import RankTrace, TracedCollective
from ringside.monitor.intervals import Floats
from ringside.monitor.stats import row_medians as _medians

ROUNDS = 8
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Matched:
    """Collectives that several ranks took part in.

    Args:
        ranks: The ranks, int [ranks].
        parts: What each collective is, as the first rank that took part recorded it.
        steps: Step number of each, int [n]; -1 outside of any.
        starts: Arrival, float64 [n, ranks], seconds; NaN for ranks that took no part.
        ends: End, the same.
        unmatched: Collectives that only one rank shows.
        conflicts: Sequence numbers at which ranks called different collectives: (group, number, kind per rank).
    """

    ranks: list[int]
    parts: list[TracedCollective]
    steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    starts: Floats
    ends: Floats
    unmatched: int
    conflicts: list[tuple[str, int, dict[int, str]]]

    @property
    def durations(self) -> Floats:
        """From arrival to end, float64 [n, ranks], seconds."""
        return self.ends - self.starts

    @property
    def waits(self) -> Floats:
        """Own duration − the minimum over ranks, float64 [n, ranks], seconds."""
        least: Floats = np.nanmin(self.durations, axis=1, keepdims=True)
        return self.durations - least

    @property
    def clocks(self) -> Floats:
        """How far each rank's clock is ahead of the middle of all, float64 [ranks], seconds, from collective ends."""
        # Ranks and collectives in turn (a median polish): few ends that are off by more than the clocks do not matter.
        offsets = np.zeros(len(self.ranks))
        for _ in range(ROUNDS if len(self.ends) else 0):
            rest = self.ends - offsets
            offsets += np.nan_to_num(_medians((rest - _medians(rest)[:, None]).T))
        return offsets

    @property
    def lateness(self) -> Floats:
        """Arrival after the first one's, clocks corrected, float64 [n, ranks], seconds."""
        corrected = self.starts - self.clocks
        first: Floats = np.nanmin(corrected, axis=1, keepdims=True)
        return corrected - first

    def mean_per_rank(self, values: Floats) -> Floats:
        """Return the mean over collectives of some values, float64 [ranks]; NaN where a rank took part in none."""
        if not len(values):
            return np.full(len(self.ranks), np.nan)
        return np.ma.filled(np.ma.masked_invalid(values).mean(axis=0), np.nan)

    def end_spread_s(self) -> float:
        """Return how far apart the ranks leave a collective, clocks corrected: the median, seconds; NaN without any."""
        if not len(self.ends):
            return float("nan")
        rest = self.ends - self.clocks
        return float(np.median(np.nanmax(rest, axis=1) - np.nanmin(rest, axis=1)))


def match_collectives(traces: Sequence[RankTrace]) -> Matched:
    """Match the collectives of several ranks' traces.

    Where profilers recorded sequence numbers, (group, number) is the key; else the step, the kind, the size and how
    many of them came before in that step.
    """
    table: dict[Hashable, dict[int, TracedCollective]] = defaultdict(dict)
    steps: dict[Hashable, int] = {}
    for trace in traces:
        begins = np.array([step.start_s for step in trace.steps])
        counts: dict[Hashable, int] = defaultdict(int)
        for collective in trace.collectives:
            if collective.kind in POINT_TO_POINT:
                continue
            home = int(np.searchsorted(begins, collective.start_s, side="right")) - 1 if len(begins) else -1
            step = trace.steps[home].number if home >= 0 else -1
            group = (collective.group, collective.ranks)
            key: Hashable = (group, collective.seq)
            if collective.seq < 0:  # not recorded: the n-th of its like in the step
                alike = (step, group, collective.kind, collective.elements)
                key = (*alike, counts[alike])
                counts[alike] += 1
            table[key].setdefault(trace.rank, collective)
            steps.setdefault(key, step)
    shared = {key: by_rank for key, by_rank in table.items() if len(by_rank) > 1}
    # One sequence number, different calls: what a hang or garbage is made of. Sizes count for all-reduce alone: of
    # other collectives ranks may put in different ones.
    conflicts = []
    for by_rank in shared.values():
        first = next(iter(by_rank.values()))
        kinds = {call.kind for call in by_rank.values()}
        sizes = {call.elements for call in by_rank.values()}
        if first.seq >= 0 and (len(kinds) > 1 or (first.kind == "all_reduce" and len(sizes) > 1)):
            calls = {rank: f"{call.kind} of {call.elements}" for rank, call in by_rank.items()}
            conflicts.append((first.group, first.seq, calls))
    # Rows of collectives by columns of ranks.
    ranks = [trace.rank for trace in traces]
    place = {rank: index for index, rank in enumerate(ranks)}
    starts = np.full((len(shared), len(ranks)), np.nan)
    ends = np.full((len(shared), len(ranks)), np.nan)
    for row, by_rank in enumerate(shared.values()):
        for rank, collective in by_rank.items():
            starts[row, place[rank]], ends[row, place[rank]] = collective.start_s, collective.end_s
    return Matched(
        ranks=ranks,
        parts=[next(iter(by_rank.values())) for by_rank in shared.values()],
        steps=np.array([steps[key] for key in shared], dtype=np.int64),
        starts=starts,
        ends=ends,
        unmatched=len(table) - len(shared),
        conflicts=conflicts,
    )
