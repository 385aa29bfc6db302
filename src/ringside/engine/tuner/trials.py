"""Promising choices are tried in the job's own all-reduces of a size: a state machine. No clock, no messages.

What is timed at start-up has to be done in a second, so large sizes are not timed at all and small ones a few times.
The job's own all-reduces are of just the sizes that matter, and cost only what a worse choice takes more.

One choice is in use. Now and then a *trial* begins: a few all-reduces by it, right after them as many by a challenger,
for what a machine does besides changes from second to second by more than choices differ. A challenger that is plainly
faster is in use from then on. What a trial takes longer than all-reduces by the choice in use would is its cost, and
no trial begins before all of them, itself as far as is known, cost less than a share of the all-reduces of this size.
So a slow challenger is tried rarely, and a fast one at once.

One thing trials do not show: a large tensor that travels in pieces is begun before the one ahead of it is there. What
has no pieces, such as the group's own all-reduce, must be faster by more than a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.tuner.table import Rank, TimingRow
from ringside.text import duration

SHARE = 0.02  # of the all-reduces of a size so far, for trials
MOST = 5  # choices that take part, besides the native ones
PROMISING, PROMISING_SMALL = 1.3, 2.0  # times the least expected: slower ones do not take part
TURNS, MOST_TURNS = 4, 12  # trials of a challenger, after one that warms up
HOPELESS = (4.0, 3.0, 2.0, 1.5, 1.2)  # times the choice in use, trial by trial: such a challenger leaves
CALLS_LONG = 2  # on long links: a connection that was idle for a round trip and 0.2 s begins slowly
CALLS_SMALL = 4  # in a row: the first one after another choice finds threads asleep and caches cold
RISK, RISK_SMALL = 0.1, 1.0  # what an all-reduce by a choice that was never tried is expected to cost, at least
FAR = 1.5  # times as fast: then neither start-up nor a few turns that were lost are doubted
LEAST_FAR_BYTES, LARGE_BYTES = 1 << 10, 1 << 20
_CHEAP, _CHEAP_SMALL = 2, 3  # choices that take part because of their price alone
_PLAIN = 2.0  # turns won less turns lost over the root of their number: asked turn by turn, chance makes it 1 in 10
_TIE = 1.05  # times the best: within it what travels in pieces wins over what does not
_MEET = 1.25  # times the cheapest, on long links: within it a ring wins over flows that meet at a host
_NATIVES = (NATIVE, f"hosts/{NATIVE}")


def _candidates(rank: Rank, *, revised: bool, long: bool) -> list[str]:
    """Return the choices that take part at a size, the one to begin with first; fewer than two: nobody needs to.

    The others are the fastest expected, and the group's own within hosts where it was not timed at this size: what they
    take may jump from one size to the next. What a few took at start-up in a busy moment says little: the cheapest
    by price take part in any case, and of large tensors the cheapest ring of each way through a host.

    On long links large tensors begin with what is cheapest by price, or nearly so; only the group's own is tried.
    """
    large = rank.size_bytes >= LARGE_BYTES
    native = [
        row.choice for row in rank.rows if row.choice in _NATIVES and (row.measured_s is None or row.choice == NATIVE)
    ]
    if large and long:
        # What small ones took tells of rounds, not of bytes. And flows that meet at a receiver may lose segments, from
        # which connections that all choices share recover in seconds or minutes: none is tried, and what start-up or a
        # revision found, which know nothing of that, does not begin.
        return list(dict.fromkeys([_safe(rank, long=True), *native]))
    least = min((row.expected_s for row in rank.rows if row.eligible), default=math.inf)
    near = [row.choice for row in rank.rows if row.expected_s <= (PROMISING if large else PROMISING_SMALL) * least]
    cheap = sorted((row.predicted_s, row.choice) for row in rank.rows if row.measured_s is None or not large)
    low = [name for predicted_s, name in cheap if large or predicted_s <= PROMISING_SMALL * cheap[0][0]]
    rings = _rings(rank) if large else []
    if not near:
        return []
    low = low[: _CHEAP if large else _CHEAP_SMALL]
    first = rank.winner if revised else _safe(rank, long=False)
    return list(dict.fromkeys([first, *near[: MOST - 1], *low, *rings, *native]))


def _rings(rank: Rank) -> list[str]:
    """Return the cheapest ring of each way through a host; one over ranks, which sends more, if there is no other."""
    found: dict[str, str] = {}
    for row in sorted(rank.rows, key=lambda row: (row.predicted_s, row.choice)):
        choice = AlgorithmSpec.parse(row.choice)
        if choice.algorithm == "ring":
            found.setdefault(choice.over, row.choice)
    return [name for over, name in found.items() if over != "ranks" or len(found) == 1]


def _safe(rank: Rank, *, long: bool) -> str:
    """Return what to begin with: the group's own, unless another one is certain to be faster.

    Of small tensors that is what start-up found far ahead. Of large ones start-up has timed a few, if any; but a ring
    that sends fewer bytes is faster wherever bytes decide, whatever the links carry. And long links are not filled by
    the group's own, which has one connection and two segments on their way: there it is the cheapest of ours, or a
    ring that takes little more, in which one flow is all that a host receives: none meet in the queue before its link.
    """
    rows = {row.choice: row for row in rank.rows}
    native = rows.get(NATIVE)
    if rank.size_bytes >= LARGE_BYTES and long:
        ours = sorted((row.predicted_s, row.choice) for row in rank.rows if row.choice not in _NATIVES)
        rings = [name for predicted_s, name in ours if name in _rings(rank) and predicted_s <= _MEET * ours[0][0]]
        return next(iter([*rings, *(name for _, name in ours)]), rank.winner)
    if native is None:
        return rank.winner
    if rank.size_bytes >= LARGE_BYTES:
        ring = next(iter(_rings(rank)), NATIVE)
        return ring if rows[ring].predicted_s * _TIE <= native.predicted_s else NATIVE
    far = rank.size_bytes >= LEAST_FAR_BYTES and rows[rank.winner].expected_s * FAR <= native.expected_s
    return rank.winner if far else NATIVE


class OnlineTrials:
    """The trials of one size.

    Every rank calls `took` after each all-reduce of a trial; when that is over (`complete`), all ranks agree on the
    slowest rank's `times` and give them to `judge`.

    Args:
        names: The choices; the first one is in use.
        expected_s: What each is expected to take, seconds.
        calls: All-reduces in a row, of each of the two; of several, the mean of all but the first counts.
        risk: What an all-reduce by a choice that was never tried is expected to cost, at least, in all-reduces.
        pieces: What goes through hosts by a schedule travels in pieces; it wins ties with what does not.
        calls_before: All-reduces of this size that pay for no trial: those before.

    Attributes:
        names: As given.
        turns: How many trials there were.
        under_way: Whether the all-reduce that is under way is one of a trial.
    """

    def __init__(
        self,
        names: Sequence[str],
        expected_s: Sequence[float],
        calls: int = 1,
        risk: float = RISK,
        *,
        pieces: bool = False,
        calls_before: int = 0,
    ) -> None:
        self.names, self.turns, self.under_way = list(names), 0, False
        self._calls = calls
        # Times are judged with these weights, and all that follows is of times so weighed.
        self._weights = [_TIE if pieces and not _has_pieces(name) else 1.0 for name in names]
        weighed = [took * weight for took, weight in zip(expected_s, self._weights, strict=True)]
        self._using, self._going = 0, list(range(1, len(names)))
        self._row: list[float] = []  # the trial under way
        self._used: list[float] = []  # by trial, what the choice in use took
        # Of each: its times over those of the choice in use, trial by trial, and what that is as far as is known.
        self._ratios: list[list[float]] = [[] for _ in names]
        self._ratio = [took / weighed[0] for took in weighed]
        # In all-reduces by the choice in use: what a trial of each costs, and what all of them have.
        self._cost = [calls * max(ratio - 1, risk) for ratio in self._ratio]
        self._spent = SHARE * calls_before

    @property
    def using(self) -> str:
        """The choice in use."""
        return self.names[self._using]

    @property
    def current(self) -> str:
        """The choice of the next all-reduce."""
        return self.using if len(self._row) < self._calls or self.over else self.names[self._challenger]

    @property
    def _challenger(self) -> int:
        """The most promising one of those that may become the choice in use."""
        return min(self._going, key=lambda at: (self._ratio[at], at))

    @property
    def paid_at(self) -> float:
        """How many all-reduces of this size pay for the next trial."""
        return math.inf if self.over else (self._spent + self._cost[self._challenger]) / SHARE

    def took(self, seconds: float) -> None:
        """Take what an all-reduce of a trial took here."""
        self._row.append(seconds)
        self.under_way = False

    @property
    def complete(self) -> bool:
        """Whether a trial is over."""
        return len(self._row) == 2 * self._calls

    @property
    def times(self) -> list[float]:
        """What it took here: by the choice in use, by the challenger, and how much longer all by the challenger."""
        used, tried = self._row[: self._calls], self._row[self._calls :]
        return [mean(used[1:] or used), mean(tried[1:] or tried), sum(tried) - sum(used)]

    def judge(self, slowest: Sequence[float], besides_s: float = 0.0) -> None:
        """Take the slowest rank's times of a trial.

        Args:
            slowest: They.
            besides_s: What the trial took besides all-reduces, seconds.
        """
        used_s, tried_s, longer_s = slowest
        at = self._challenger
        self._row = []
        self.turns += 1
        self._cost[at] = max(longer_s + besides_s, 0.0) / used_s
        self._spent += self._cost[at]
        self._used.append(used_s * self._weights[self._using])
        self._ratios[at].append(tried_s * self._weights[at] / self._used[-1])
        heard = self._ratios[at][1:] or self._ratios[at]  # the first one warms up: connections, places, pages
        self._ratio[at] = median(heard)
        count = len(self._ratios[at]) - 1
        lead = sum((ratio < 1) - (ratio > 1) for ratio in heard)
        plain = _PLAIN * math.sqrt(count)
        if count >= TURNS and (lead >= plain or self._ratio[at] * FAR <= 1):
            self._use(at)
        elif (
            (count >= TURNS and -lead >= plain)
            or count == MOST_TURNS
            or lower_tertile(heard) > HOPELESS[min(count, len(HOPELESS) - 1)]
        ):
            self._going.remove(at)

    def _use(self, place: int) -> None:
        """Use another choice from now on, and compare the others with it."""
        faster = self._ratio[place]
        self._ratios[self._using].append(1.0)
        self._ratios = [[ratio / faster for ratio in ratios] for ratios in self._ratios]
        self._ratio = [ratio / faster for ratio in self._ratio]
        self._used = [took * faster for took in self._used]
        self._using = place
        self._going.remove(place)

    @property
    def over(self) -> bool:
        """Whether it is decided."""
        return not self._going

    def result(self) -> dict[str, float]:
        """Return the time of each choice that was tried, seconds; they stand to each other as in the same trials."""
        level = lower_tertile(self._used)
        tried = [at for at in range(len(self.names)) if self._ratios[at] or at == self._using]
        return {self.names[at]: level * self._ratio[at] / self._weights[at] for at in tried}

    def is_tie(self) -> bool:
        """Tell whether the choice in use takes a little longer than the best, which does not travel in pieces."""
        found = self.result()
        return found[self.using] > min(found.values()) and self._weights[self._using] < max(self._weights)


def _has_pieces(name: str) -> bool:
    """Tell whether large tensors travel in pieces by a choice."""
    choice = AlgorithmSpec.parse(name)
    return choice.over != "ranks" and choice.algorithm != NATIVE


def lower_tertile(times: Sequence[float]) -> float:
    """Return the lower tertile: what else a machine does makes a fast choice look slow, nothing a slow one fast."""
    return sorted(times)[(len(times) - 1) // 3]


def trials_for(
    rank: Rank,
    pieces_from_bytes: float = math.inf,
    *,
    revised: bool = False,
    calls_before: int = 0,
    long: bool = False,
) -> OnlineTrials | None:
    """Return the trials that a size needs; None: it had them, or no other choice is promising.

    Args:
        rank: What is known of the size.
        pieces_from_bytes: From that size on a tensor that goes through hosts by a schedule travels in pieces.
        revised: The job has run already, and what is known was timed and decided anew.
        calls_before: How many all-reduces of the size there were until then.
        long: Links are long: large tensors begin with one of ours, revised or not, only the group's own is tried, and
            the first all-reduce after another choice does not count.
    """
    known = {row.choice: row.expected_s for row in rank.rows}
    names = _candidates(rank, revised=revised, long=long) if not rank.turns and rank.winner in known else []
    if len(names) < 2:
        return None
    large, pieces = rank.size_bytes >= LARGE_BYTES, rank.size_bytes >= pieces_from_bytes
    calls, risk = (CALLS_LONG if long else 1, RISK) if large else (CALLS_SMALL, RISK_SMALL)
    expected_s = [known[name] for name in names]
    return OnlineTrials(names, expected_s, calls, risk, pieces=pieces, calls_before=calls_before)


def settled_rank(rank: Rank, trials: OnlineTrials) -> Rank:
    """Return what is known of a size by its trials, which need not be over."""
    if not trials.turns:
        why = f"{trials.using}: until another one is plainly faster in the job's own all-reduces"
        return Rank(rank.size_bytes, trials.using, why, rank.rows)
    heard, winner = trials.result(), trials.using
    native = heard.get(NATIVE, next((row.expected_s for row in rank.rows if row.choice == NATIVE), math.inf))
    rows = []
    for row in rank.rows:
        if row.choice in heard:
            took = heard[row.choice]
            row = TimingRow(row.choice, row.predicted_s, took, took, row.choice == NATIVE or took <= native)
        rows.append(row)
    rows.sort(key=lambda row: (row.expected_s, row.choice))
    others = sorted((took, name) for name, took in heard.items() if name != winner)
    beside = ", ".join(f"{name} {duration(took)}" for took, name in others)
    why = f"{winner}: {duration(heard[winner])} where it was used in turn with {beside}"
    if trials.is_tie():
        why += "; in a tie what travels in pieces wins, since the next tensor is begun before it is there"
    return Rank(rank.size_bytes, winner, why, tuple(rows), trials.turns if trials.over else 0)
