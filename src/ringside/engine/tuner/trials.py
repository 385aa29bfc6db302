"""Promising choices take turns in the first all-reduces of a size: a state machine. No clock, no messages of its own.

What is timed at start-up has to be done in a second, so large sizes are not timed at all and small ones a few times.
The first all-reduces of the job itself are of just the sizes that matter, and cost only what a worse choice takes more.

Choices that are within a tenth of each other after that go on in turn until one is plainly ahead, or the most turns are
over. They are compared turn by turn, with what the others took right beside them: what a machine does besides changes
from second to second by more than they differ.

One thing turns do not show: a large tensor that travels in pieces is begun before the one ahead of it is there. What
has no pieces, such as the group's own all-reduce, must be faster by more than a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.tuner.table import Rank, TimingRow
from ringside.text import duration

MOST = 5  # choices that take part, besides the native ones
PROMISING, PROMISING_SMALL = 1.3, 2.0  # times the least expected: slower ones do not take part
HOPELESS = (3.0, 1.5, 1.3, 1.15)  # times the best so far, turn by turn: such a choice leaves
HOPELESS_SMALL = (4.0, 3.0, 2.0, 1.6, 1.4)  # a single one of a millisecond may take twice as long by chance
TURNS_LARGE, TURNS_SMALL = 5, 6  # the first of them warms up: connections, places, pages
MORE_LARGE, MORE_SMALL = 12, 9  # turns at most of those that are close by then
CLOSE, MOST_CLOSE = 1.1, 3  # times the best; so many of these go on
CALLS_SMALL = 4  # in a row: the first one after another choice finds threads asleep and caches cold
_CHEAP, _CHEAP_SMALL = 2, 3  # choices that take part because of their price alone
_STAYS = 1.5  # times the best so far: the group's own all-reduce leaves at no less
_PLAIN = 2.0  # turns won less turns lost over the root of their number: asked turn by turn, chance makes it 1 in 10
_TIE = 1.05  # times the best: within it what travels in pieces wins over what does not
LARGE_BYTES = 1 << 20
_NATIVES = (NATIVE, f"hosts/{NATIVE}")


def _candidates(rank: Rank) -> list[str]:
    """Return the choices that take part at a size, the present one first; fewer than two: nobody needs to.

    These are the fastest expected, the group's own, and that within hosts where it was not timed at this size: what
    they take may jump from one size to the next. What a few took at start-up in a busy moment says little: the cheapest
    by price take part in any case, and of large tensors, which are not timed at start-up, the cheapest ring of each way
    through a host.
    """
    large = rank.size_bytes >= LARGE_BYTES
    least = min((row.expected_s for row in rank.rows if row.eligible), default=math.inf)
    near = [row.choice for row in rank.rows if row.expected_s <= (PROMISING if large else PROMISING_SMALL) * least]
    cheap = sorted((row.predicted_s, row.choice) for row in rank.rows if row.measured_s is None or not large)
    low = [name for predicted_s, name in cheap if large or predicted_s <= PROMISING_SMALL * cheap[0][0]]
    rings: dict[str, str] = {}
    for _, choice in cheap if large else ():
        if AlgorithmSpec.parse(choice).algorithm == "ring":
            rings.setdefault(AlgorithmSpec.parse(choice).over, choice)
    rings.pop("ranks" if len(rings) > 1 else "", None)  # of several ranks on a host each would send what is the same
    native = [
        row.choice for row in rank.rows if row.choice in _NATIVES and (row.measured_s is None or row.choice == NATIVE)
    ]
    if not near:
        return []
    low = low[: _CHEAP if large else _CHEAP_SMALL]
    return list(dict.fromkeys([rank.winner, *near[: MOST - 1], *low, *rings.values(), *native]))


class OnlineTrials:
    """The turns of one size.

    Every rank calls `took` after each all-reduce; when a turn is over (`complete`), all ranks agree on the slowest
    rank's `times` and give them to `judge`.

    Args:
        names: The choices.
        turns: How many each has.
        more: How many more those have that are close then.
        hopeless: Who takes that many times what the best takes, turn by turn, leaves.
        calls: All-reduces of a choice in a row; of several, the mean of all but the first counts.
        stays: The group's own all-reduce has all of its `turns`, and wins unless another one is plainly, or by far,
            faster.
        pieces: What goes through hosts by a schedule travels in pieces; it wins ties with what does not.

    Attributes:
        names: As given.
        turns: How many there were.
    """

    def __init__(
        self,
        names: Sequence[str],
        turns: int,
        more: int = 0,
        hopeless: Sequence[float] = HOPELESS,
        calls: int = 1,
        *,
        stays: bool = False,
        pieces: bool = False,
    ) -> None:
        self._hopeless, self._calls, self._stays, self._pieces = hopeless, calls, stays, pieces
        self._row: list[float] = []
        self.names = list(names)
        self._turns, self._more = turns, more
        self._going = list(range(len(names)))
        self._took: dict[int, float] = {}
        self._heard: list[list[float]] = [[] for _ in names]
        self.turns = 0

    @property
    def current(self) -> str:
        """Whose turn it is; each turn begins with another one."""
        order = self._going[self.turns % len(self._going) :] + self._going[: self.turns % len(self._going)]
        return self.names[next(at for at in order if at not in self._took)]

    def took(self, seconds: float) -> None:
        """Take what the current choice took here."""
        self._row.append(seconds)
        if len(self._row) == self._calls:
            self._took[self.names.index(self.current)] = mean(self._row[1:] or self._row)
            self._row.clear()

    @property
    def complete(self) -> bool:
        """Whether all have had their turn."""
        return len(self._took) == len(self._going)

    @property
    def times(self) -> list[float]:
        """What each took here in this turn, -1 for those that left, by `names`."""
        return [self._took.get(at, -1.0) for at in range(len(self.names))]

    def judge(self, slowest: Sequence[float]) -> None:
        """Take the slowest rank's times of this turn, by `names`."""
        for at in self._going:
            if self.turns == 1:
                self._heard[at].clear()  # what was only warming up
            self._heard[at].append(slowest[at])
        so_far = {at: lower_tertile(self._heard[at]) for at in self._going}
        hopeless = self._hopeless[min(self.turns, len(self._hopeless) - 1)]
        own = math.inf if self._stays else max(hopeless, _STAYS)
        most = {at: own if self.names[at] == NATIVE else hopeless for at in self._going}
        self._going = [at for at in self._going if so_far[at] <= most[at] * min(so_far.values())]
        self._took = {}
        self.turns += 1
        if self.turns < self._turns or not self._more:
            return
        # The first turns are over: those go on that are not plainly behind, if they are close to the best, or native.
        shares = self._shares()
        best = min(self._going, key=lambda at: shares[at])
        tied = self._tied(best, shares)
        left = [at for at in self._going if at in tied or not self._plainly(best, at)]
        near = [at for at in left if shares[at] <= CLOSE * shares[best] and self.names[at] != NATIVE]
        native = [at for at in left if self.names[at] == NATIVE]
        self._going = sorted(native + sorted(near, key=lambda at: (at not in tied, shares[at]))[:MOST_CLOSE])

    def _plainly(self, better: int, worse: int) -> bool:
        """Return whether one was faster in so many turns more than the other that it is not by chance."""
        pairs = list(zip(self._heard[better], self._heard[worse], strict=True))
        lead = sum((a < b) - (a > b) for a, b in pairs)
        return lead >= _PLAIN * math.sqrt(len(pairs))

    def _tied(self, best: int, shares: Mapping[int, float]) -> list[int]:
        """Return those that win over the best one though they took a little longer, the fastest first."""
        if not self._pieces or _has_pieces(self.names[best]):
            return []
        near = [at for at in self._going if shares[at] <= _TIE * shares[best] and _has_pieces(self.names[at])]
        return sorted(near, key=lambda at: (shares[at], self.names[at]))

    def _shares(self) -> dict[int, float]:
        """Return what those that have not left take by what all of them took in the same turn; the median of turns."""
        turns = zip(*(self._heard[at] for at in self._going), strict=True)
        rows = [[one / sum(row) for one in row] for row in turns]
        return {at: median(column) for at, column in zip(self._going, zip(*rows, strict=True), strict=True)}

    @property
    def over(self) -> bool:
        """Whether it is decided."""
        return self.turns >= self._turns + self._more or len(self._going) == 1

    def result(self) -> dict[str, float]:
        """Return the time of each choice, seconds, those that left among them.

        Times of those that have not left stand to each other as they did in the same turns.
        """
        found = {name: lower_tertile(times) for name, times in zip(self.names, self._heard, strict=True)}
        shares = self._shares()
        level = median(lower_tertile(self._heard[at]) / shares[at] for at in self._going)
        return found | {self.names[at]: level * shares[at] for at in self._going}

    @property
    def speed_ratio(self) -> float:
        """How many times faster one that left, as others were faster, was then than those that did not leave are now.

        More than 1 is odd: what all of them take has changed meanwhile. 0: nobody left.
        """
        found = [lower_tertile(times) for times in self._heard]
        left = [took for at, took in enumerate(found) if at not in self._going]
        return min(found[at] for at in self._going) / min(left) if left else 0.0

    def is_tie(self) -> bool:
        """Tell whether the winner took a little longer than the best, which does not travel in pieces."""
        shares = self._shares()
        return bool(self._tied(min(self._going, key=lambda at: (shares[at], self.names[at])), shares))

    def winner(self) -> str:
        """Return the best of those that have not left."""
        shares = self._shares()
        best = min(self._going, key=lambda at: (shares[at], self.names[at]))
        for at in self._going if self._stays else ():
            if self.names[at] == NATIVE and shares[at] < _STAYS * shares[best] and not self._plainly(best, at):
                return NATIVE
        return self.names[next(iter(self._tied(best, shares)), best)]


def _has_pieces(name: str) -> bool:
    """Tell whether large tensors travel in pieces by a choice."""
    choice = AlgorithmSpec.parse(name)
    return choice.over != "ranks" and choice.algorithm != NATIVE


def lower_tertile(times: Sequence[float]) -> float:
    """Return the lower tertile: what else a machine does makes a fast choice look slow, nothing a slow one fast."""
    return sorted(times)[(len(times) - 1) // 3]


def trials_for(rank: Rank, pieces_from_bytes: float = math.inf) -> OnlineTrials | None:
    """Return the trials that a size needs; None: it had them, or no other choice is promising.

    Args:
        rank: What is known of the size.
        pieces_from_bytes: From that size on a tensor that goes through hosts by a schedule travels in pieces.
    """
    names = [] if rank.turns else _candidates(rank)
    if len(names) < 2:
        return None
    if rank.size_bytes >= LARGE_BYTES:
        return OnlineTrials(names, TURNS_LARGE, MORE_LARGE, pieces=rank.size_bytes >= pieces_from_bytes)
    return OnlineTrials(names, TURNS_SMALL, MORE_SMALL, HOPELESS_SMALL, CALLS_SMALL, stays=True)


def settled_rank(rank: Rank, trials: OnlineTrials) -> Rank:
    """Return what was decided at a size by trials that is over."""
    heard, winner = trials.result(), trials.winner()
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
    return Rank(rank.size_bytes, winner, why, tuple(rows), trials.turns)
