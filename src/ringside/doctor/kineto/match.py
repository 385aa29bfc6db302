"""The same collective on all ranks: matched by group and sequence number, waits, lateness, clocks.

`wait = own duration − minimum over ranks` needs no common clock. All ranks leave a collective together, so its ends
are one: they tell how far the ranks' clocks are apart, and lateness is measured after that is taken off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ringside.doctor.kineto.intervals import Floats
from ringside.doctor.kineto.trace import RankTrace, TracedCollective
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
        return self.durations - _smallest(self.durations)

    @property
    def clocks(self) -> Floats:
        """How far each rank's clock is ahead of the middle of all, float64 [ranks], seconds, from collective ends."""
        offsets = np.zeros(len(self.ranks))
        for _ in range(ROUNDS):
            if not len(self.ends):
                break
            rest = self.ends - offsets
            offsets += np.nan_to_num(_medians((rest - _medians(rest)[:, None]).T))
        return offsets

    @property
    def lateness(self) -> Floats:
        """Arrival after the first one's, clocks corrected, float64 [n, ranks], seconds."""
        corrected = self.starts - self.clocks
        return corrected - _smallest(corrected)

    def end_spread_s(self) -> float:
        """Return how far apart the ranks leave a collective, clocks corrected: the median, seconds; NaN without any."""
        if not len(self.ends):
            return float("nan")
        rest = self.ends - self.clocks
        return float(np.median(np.nanmax(rest, axis=1) - np.nanmin(rest, axis=1)))


def match(traces: Sequence[RankTrace]) -> Matched:
    """Match the collectives of several ranks' traces.

    Where profilers recorded sequence numbers, (group, number) is the key; else the step, the kind, the size and how
    many of them came before in that step.
    """
    table: dict[Hashable, dict[int, TracedCollective]] = defaultdict(dict)
    steps: dict[Hashable, int] = {}
    for trace in traces:
        for key, step, one in _keyed(trace):
            table[key].setdefault(trace.rank, one)
            steps.setdefault(key, step)
    shared = {key: by_rank for key, by_rank in table.items() if len(by_rank) > 1}
    conflicts = _conflicts(shared)
    ranks = [trace.rank for trace in traces]
    place = {rank: index for index, rank in enumerate(ranks)}
    starts = np.full((len(shared), len(ranks)), np.nan)
    ends = np.full((len(shared), len(ranks)), np.nan)
    for row, by_rank in enumerate(shared.values()):
        for rank, one in by_rank.items():
            starts[row, place[rank]], ends[row, place[rank]] = one.start_s, one.end_s
    return Matched(
        ranks=ranks,
        parts=[next(iter(by_rank.values())) for by_rank in shared.values()],
        steps=np.array([steps[key] for key in shared], dtype=np.int64),
        starts=starts,
        ends=ends,
        unmatched=len(table) - len(shared),
        conflicts=conflicts,
    )


def _keyed(trace: RankTrace) -> list[tuple[Hashable, int, TracedCollective]]:
    begins = np.array([step.start_s for step in trace.steps])
    numbers = [step.number for step in trace.steps]
    counts: dict[Hashable, int] = defaultdict(int)
    keyed: list[tuple[Hashable, int, TracedCollective]] = []
    for one in trace.collectives:
        home = int(np.searchsorted(begins, one.start_s, side="right")) - 1 if len(begins) else -1
        step = numbers[home] if home >= 0 else -1
        if one.kind in POINT_TO_POINT:
            continue
        group = (one.group, one.ranks)
        key: Hashable = (group, one.seq)
        if one.seq < 0:
            alike = (step, group, one.kind, one.elements)
            key = (*alike, counts[alike])
            counts[alike] += 1
        keyed.append((key, step, one))
    return keyed


def _conflicts(shared: dict[Hashable, dict[int, TracedCollective]]) -> list[tuple[str, int, dict[int, str]]]:
    found = []
    for by_rank in shared.values():
        one = next(iter(by_rank.values()))
        kinds = {rank: part.kind for rank, part in by_rank.items()}
        sizes = {part.elements for part in by_rank.values()}
        differs = len(set(kinds.values())) > 1
        if one.seq >= 0 and (differs or (one.kind == "all_reduce" and len(sizes) > 1)):
            words = {rank: f"{part.kind} of {part.elements}" for rank, part in by_rank.items()}
            found.append((one.group, one.seq, words))
    return found


def _smallest(values: Floats) -> Floats:
    smallest: Floats = np.min(np.where(np.isnan(values), np.inf, values), axis=1, keepdims=True, initial=np.inf)
    return smallest
