"""Chooses how all-reduces between hosts are carried out: by measurement, alike on all ranks, and says why.

At start-up links are timed, every candidate is priced, the best few are timed beside the group's own collective, and
rank 0 decides; the table it makes reaches all ranks byte for byte. During training every rank compares what
all-reduces take with what they should take; every few collectives the ranks vote, and if all of them find that the
network has changed, they time and decide anew. See docs/design/0006-selection.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringside.engine.across import Across
from ringside.engine.audition import Audition, audition_of, settled
from ringside.engine.choice import NATIVE, Choice
from ringside.engine.drift import EVERY_NOTED, LARGE_BYTES, Drift
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.explanation import Explanation
from ringside.engine.pricing import Cluster, Price
from ringside.engine.probing import PROBE, QUICK, Probe, Prober
from ringside.engine.selection_cache import Mode, cache_path, load, store
from ringside.engine.selection_table import LADDER, Rank, Table, Timings, candidates, make_table, predicted_at, priced
from ringside.engine.told import Call
from ringside.engine.wire import Wire
from ringside.schedule import binomial_broadcast

_log = logging.getLogger(__name__)

STARTUP_S = 0.9
PROBE_S = 0.35  # of it, or of a revision's, for the links
REVISION_S = 1.5
_TIMED = (4 << 10, 1 << 20, 64 << 10, 4 << 20, 4, 256 << 10)  # in this order, as far as the budget goes
_MOST_TIMED = 4 << 20  # larger tensors go in blocks of this size: their ranking is that of one block
_REPEATS = 3
_FEW = 3  # choices that are timed where there is no time for more
_MOST_PACE = 2.0  # what choices take over what they should, as the smaller sizes tell of larger ones
_HOPELESS = 2.0  # times the best of a turn: such a choice is not timed again
_MUST, _MUST_S = _TIMED[:3], 0.1  # are timed once even late, unless that is to take so long
_NOT_NATIVE = frozenset(DTYPES.index(name) for name in ("int16", "bool"))  # Gloo has no reductions of them
_NOT_NATIVE_OPS = frozenset(OP_CODES[name] for name in ("min", "max"))  # Gloo's may lose a NaN, ours never
_FLOAT32 = DTYPES.index("float32")
_MOST_EXPECTED = 1024
_FEWEST = "leaders/parameter_server"  # it has the fewest messages; their price does not tell how busy cores will be
_OTHERWISE = Choice("ring", "hosts")  # with RINGSIDE_SELECTION=off


class _Plan(msgspec.Struct, frozen=True):
    """What rank 0 has all ranks time: choices per size."""

    turns: list[tuple[int, list[str]]]


@dataclass(eq=False)
class _Race:
    """The choices that are timed at one size, turn by turn; the same on all ranks."""

    size: int
    names: list[str]
    keep: frozenset[str]

    def __post_init__(self) -> None:
        self.data = np.zeros(max(self.size // 4, 1), dtype=np.float32)
        self.going = list(range(len(self.names)))
        self.turns: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def took(self, seconds: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Take a turn's times of the slowest rank, -1 where a choice was not timed, and leave out the hopeless."""
        self.turns.append(seconds)
        best = min(float(seconds[at]) for at in self.going)
        self.going = [at for at in self.going if self.names[at] in self.keep or seconds[at] <= _HOPELESS * best]

    def cost_s(self) -> float:
        """Return what the next turn takes, if it takes what the last one did."""
        return sum(max(float(self.turns[-1][at]), 0.0) for at in self.going)

    def medians(self) -> dict[tuple[str, int], float]:
        """Return the median of each choice's turns."""
        if not self.turns:
            return {}
        took = np.array(self.turns)
        times = zip(self.names, (column[column >= 0] for column in took.T), strict=True)
        return {(name, self.size): float(np.median(seconds)) for name, seconds in times if len(seconds)}


class Selector:
    """One rank's part in the choice of all-reduces. Every method but the cheap ones below is a collective.

    `choose`, `explain`, `observe` and `due` are local; `start`, `vote` and `revise` must be called by all ranks alike.

    Args:
        across: The group.
        key: What the choice depends on besides hosts and links: `ringside` and `torch` (versions), `wire_dtype`,
            `settings`.
        wire: How float32 elements travel between hosts; None: as they are.
        environ: RINGSIDE_SELECTION (`measured`, `off`, `fresh` or a table's path), RINGSIDE_CACHE_DIR, XDG_CACHE_HOME.
        clock: Seconds.

    Attributes:
        table: What was decided; None before `start`, and with RINGSIDE_SELECTION=off.
        probe: The links, as last timed; None likewise.
        history: What was changed during the run and why, in words.
        version: Grows with every change of the choices in use.
        calls: How many small all-reduces there were, by class of sizes, once that class is settled.
    """

    def __init__(
        self,
        across: Across,
        key: Mapping[str, str] | None = None,
        *,
        wire: Wire | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.table: Table | None = None
        self.probe: Probe | None = None
        self.history: list[str] = []
        self.version = 0
        self._across, self._clock = across, clock
        self._mode, self._environ = Mode.of_environment(environ), dict(environ)
        self._wire = wire
        self._prober = Prober(across, effort=replace(QUICK, budget_s=PROBE_S), clock=clock, wire=wire)
        self._key = {**_job(across), **{name: str(value) for name, value in (key or {}).items()}}
        self._timings: dict[tuple[str, int], float] = {}
        self._prices: dict[str, list[Price]] = {}
        self._pace: float | None = None
        self._first = across.roster.rank == 0
        self._bounds: list[float] = []
        self._choices: tuple[Choice, ...] = (_OTHERWISE,)
        self._plain: tuple[Choice, ...] = (_OTHERWISE,)
        self._drift = Drift(())
        self._asked = 0
        self._auditions: dict[int, Audition] = {}
        self.calls: Counter[int] = Counter()
        self._path: Path | None = None
        self._expected: dict[tuple[int, Choice], float | None] = {}

    # -------------------------------------------------------------------------------------------- cheap and local

    def choose(self, size_bytes: int, dtype: int = 0, op: int = 0) -> Choice:
        """Return how an all-reduce of this size is carried out; equal on all ranks.

        The first ones of a size are carried out by the promising choices in turn.

        Args:
            size_bytes: Of the tensor.
            dtype: Code of the element type.
            op: Code of the reduction.
        """
        at = bisect_left(self._bounds, size_bytes)
        if dtype in _NOT_NATIVE or op in _NOT_NATIVE_OPS:
            return self._plain[at]
        if at in self._auditions and dtype == _FLOAT32:
            return Choice.parse(self._auditions[at].current)
        return self._choices[at]

    def explain(self, size_bytes: int) -> Explanation:
        """Return why an all-reduce of this size goes the way it goes; `str` of it is a ranked table."""
        if self.table is None:
            return Explanation(size_bytes, str(self.choose(size_bytes)), "nothing was measured: RINGSIDE_SELECTION=off")
        return Explanation.of(size_bytes, self.table.at(size_bytes), tuple(self.history))

    def settled(self, size_bytes: int) -> bool:
        """Tell whether the choice for this size has been tried out in the job's own all-reduces."""
        return bisect_left(self._bounds, size_bytes) not in self._auditions

    def size_class(self, size_bytes: int) -> int:
        """Return the class of sizes that are chosen for together: the place in `calls`."""
        return bisect_left(self._bounds, size_bytes)

    def observe(self, size_bytes: int, choice: Choice, seconds: float, dtype: int = _FLOAT32) -> None:
        """Take what an all-reduce took here; with a wire dtype what was timed says nothing of other than float32."""
        if self.table is None:
            return
        known = self._wire is None or dtype == _FLOAT32
        expected_s = self._expected_s(size_bytes, choice) if known else None
        self._drift.observe(size_bytes, seconds / expected_s if expected_s else None)

    def _expected_s(self, size_bytes: int, choice: Choice) -> float | None:
        """Return what the table says, looked up once for the sizes in use: small all-reduces take a millisecond."""
        assert self.table is not None
        key = (size_bytes, choice)
        if key not in self._expected:
            if len(self._expected) >= _MOST_EXPECTED:
                self._expected.clear()
            self._expected[key] = self.table.expected_s(size_bytes, str(choice))
        return self._expected[key]

    def due(self, size_bytes: int) -> bool:
        """Tell whether the ranks should vote now; call it once after each all-reduce, alike on all ranks."""
        if self.table is None:
            return False
        self._asked = size_bytes
        return self._drift.due(size_bytes)

    # -------------------------------------------------------------------------------------------- collectives

    def start(self) -> None:
        """Measure and decide, or take what was decided before under the same conditions. Takes under a second."""
        if not self._mode.measure:
            return
        began = self._clock()
        self.probe = self._prober.probe()
        path = self._mode.path or cache_path(self._key, self._environ)
        kept = self._kept(path)
        data = self._tell(kept.encode() if kept is not None else b"")
        if not data:
            data = self._measured(STARTUP_S - (self._clock() - began), None)
            if self._first:
                self._store(path, Table.decode(data))
        self._path = path if kept is None and self._mode.path is None else None
        self._use(data)
        self._drift = Drift(self._bounds)
        if self._first:
            where = "kept" if kept is not None else "measured"
            _log.info("selection %s in %.2f s: %s", where, self._clock() - began, self._words())

    def _kept(self, path: Path) -> Table | None:
        """Return the table that was decided before, if it holds now, and go on from its figures; rank 0 only."""
        if not self._first or not self._mode.read:
            return None
        assert self.probe is not None
        level = logging.INFO if self._mode.path is None else logging.WARNING
        kept = load(path, self._key, self.probe.network, level=level)
        if kept is not None and tuple(rank.size_bytes for rank in kept.ranks) == LADDER:
            self._timings, self._prices = kept.timings(), kept.prices()
        return kept

    def _store(self, path: Path, table: Table) -> None:
        if self._mode.path is not None and path.exists():
            _log.warning("%s was not used and stays as it is: this run measures; move it away to keep its table", path)
        else:
            store(path, table)

    def vote(self) -> bool:
        """Tell whether all ranks find that all-reduces take longer than they should."""
        least = -float(self._prober.most(np.array([-self._drift.level]))[0])
        return least > self._drift.bar

    def revise(self, reason: str) -> None:
        """Time links and the best few choices again, decide anew, and remember why.

        Args:
            reason: For the log, such as "all-reduces of 4 MB take 3.1 times what they should".
        """
        if self.table is None:
            return
        before, began = self.table, self._clock()
        previous = self.probe
        self.probe = self._prober.probe()
        self._use(self._measured(REVISION_S - (self._clock() - began), before))
        assert self.table is not None
        old, new = before.at(self._asked).winner, self.table.at(self._asked).winner
        changed = [rank.winner for rank in before.ranks] != [rank.winner for rank in self.table.ranks]
        self._drift.revised(changed=changed)
        turn = f"{old} -> {new}" if old != new else f"{old} stays" + (", other sizes change" if changed else "")
        entry = f"{reason}; {_difference(previous, self.probe, self._across)}; {turn}"
        self.history.append(entry)
        if self._first:
            _log.warning("selection revised in %.2f s: %s", self._clock() - began, entry)

    def after(self, size_bytes: int, choice: Choice, seconds: float, dtype: int = _FLOAT32) -> None:
        """Do all that is to be done after an all-reduce: observe it, and vote and revise where that is due."""
        if not self._passed_over(size_bytes) and not self._heard(size_bytes, choice, seconds, dtype):
            self.note(size_bytes, choice, seconds, dtype)

    def note(self, size_bytes: int, choice: Choice, seconds: float, dtype: int) -> None:
        """Do what `after` does for those of which something is noted; arguments as for it."""
        self.observe(size_bytes, choice, seconds, dtype)
        if self.due(size_bytes) and self.vote():
            level = self._drift.level
            self.revise(f"all-reduces of {size_bytes / 1e6:.2g} MB take {level:.1f} times what they took")

    def _passed_over(self, size_bytes: int) -> bool:
        """Tell whether a small all-reduce is one of those, most of them, of which nothing is noted; alike on all ranks.

        To note what one takes costs about a tenth of what the smallest take.
        """
        if size_bytes >= LARGE_BYTES:
            return False
        at = bisect_left(self._bounds, size_bytes)
        if at in self._auditions:
            return False
        self.calls[at] += 1
        return self.calls[at] % EVERY_NOTED != 0

    def _heard(self, size_bytes: int, choice: Choice, seconds: float, dtype: int) -> bool:
        """Tell whether an all-reduce was part of an audition; when that is over, use what came of it."""
        at = bisect_left(self._bounds, size_bytes)
        audition = self._auditions.get(at)
        if self.table is None or audition is None or dtype != _FLOAT32 or str(choice) != audition.current:
            return False
        rank = self.table.ranks[at]
        usual = [self.table.expected_s(size, str(choice)) for size in (rank.size_bytes, size_bytes)]
        audition.took(seconds * (usual[0] / usual[1] if usual[0] and usual[1] else 1.0))
        if not audition.complete:
            return True
        audition.judge(self._prober.most(np.array(audition.times)).tolist())
        if audition.over:
            del self._auditions[at]
            self._settle(at, settled(rank, audition), audition.result())
        return True

    def _settle(self, at: int, rank: Rank, heard: Mapping[str, float]) -> None:
        """Use what an audition found, and remember it."""
        assert self.table is not None
        ranks = (*self.table.ranks[:at], rank, *self.table.ranks[at + 1 :])
        self._take_over(Table(self.table.key, self.table.topology, ranks))
        if self._first:
            self._timings.update({(name, rank.size_bytes): seconds for name, seconds in heard.items()})
            _log.info("all-reduces of about %.3g MB: %s", rank.size_bytes / 1e6, rank.why)
            if self._path is not None:
                store(self._path, self.table)

    # -------------------------------------------------------------------------------------------- measuring

    def _measured(self, budget_s: float, before: Table | None) -> bytes:
        """Price, time and decide; return the table as all ranks have it."""
        assert self.probe is not None
        deadline = self._clock() + budget_s
        cluster = self._prober.cluster(self.probe.network)
        plan = self._plan(cluster, before) if self._first else _Plan([])
        plan = msgspec.json.decode(self._tell(msgspec.json.encode(plan)), type=_Plan)
        timings = self._time(plan, deadline)
        if not self._first:
            return self._tell(b"")
        self._timings.update(timings)
        topology = self._topology(cluster)
        fresh = {size for _, size in timings}
        table = make_table(self._prices, Timings(self._timings), self._key, topology, before=before, fresh=fresh)
        return self._tell(table.encode())

    def _plan(self, cluster: Cluster, before: Table | None) -> _Plan:
        """Price the candidates and say which are to be timed, rank 0 only."""
        assert self.probe is not None
        prices = priced(candidates(cluster, self.probe.better_order), cluster)
        if before is None:
            self._prices = prices
            return _Plan([(size, _best(prices, size)) for size in _TIMED])
        used = {rank.winner for rank in before.ranks} - prices.keys()
        prices |= priced((Choice.parse(text) for text in used), cluster)
        self._timings = {
            (choice, size): seconds * predicted_at(size, prices[choice]) / predicted_at(size, self._prices[choice])
            for (choice, size), seconds in self._timings.items()
            if choice in prices and choice in self._prices
        }
        self._prices = prices
        size = min(LADDER[bisect_left(before.bounds(), self._asked)], _MOST_TIMED)
        names = [before.at(self._asked).winner, *_best(prices, size)]
        return _Plan([(size, list(dict.fromkeys(names)))])

    def _time(self, plan: _Plan, deadline: float) -> dict[tuple[str, int], float]:
        """Time what the plan says, in turns, as far as rank 0's clock allows; the medians of the slowest rank."""
        used = {rank.winner for rank in self.table.ranks} if self.table is not None else set()
        races = [_Race(size, names, frozenset({NATIVE, *used})) for size, names in plan.turns]
        warm: set[str] = set()
        self._pace = None
        for turn in range(_REPEATS):
            for race in races:
                count = int.from_bytes(
                    self._tell(self._affordable(race, turn, deadline).to_bytes(2, "little")), "little"
                )
                if count:
                    self._take_turn(race, count, turn, warm)
        return {key: seconds for race in races for key, seconds in race.medians().items()}

    def _affordable(self, race: _Race, turn: int, deadline: float) -> int:
        """Return how many choices, the first ones, the budget has room for in one more turn; rank 0's word counts."""
        if not self._first or (turn > 0 and not race.turns):
            return 0
        left_s = deadline - self._clock()
        if turn > 0:
            return len(race.names) if race.cost_s() < left_s else 0
        few = min(_FEW, len(race.names))
        cost_s, few_s = (self._cost_s(race.size, race.names[:count]) for count in (len(race.names), few))
        if cost_s < left_s:
            return len(race.names)
        must = self._pace is None or (race.size in _MUST and few_s < _MUST_S * self._pace)
        return few if must or few_s < left_s else 0

    def _cost_s(self, size: int, names: Sequence[str]) -> float:
        return (self._pace or 1.0) * sum(predicted_at(size, self._prices[name]) for name in names)

    def _take_turn(self, race: _Race, count: int, turn: int, warm: set[str]) -> None:
        race.going = [at for at in race.going if at < count]
        for at in race.going:
            if race.names[at] not in warm:
                warm.add(race.names[at])
                self._prober.warm_up(Choice.parse(race.names[at]))
        took = np.full(len(race.names), -1.0)
        for at in np.roll(race.going, -turn).tolist():
            took[at] = self._prober.time_once(Choice.parse(race.names[at]), race.data)
        race.took(self._prober.most(took))
        if self._first and turn == 0:
            predicted_s = sum(predicted_at(race.size, self._prices[race.names[at]]) for at in np.flatnonzero(took >= 0))
            self._pace = min(max(float(race.turns[0][took >= 0].sum()) / predicted_s, 1.0), _MOST_PACE)

    # -------------------------------------------------------------------------------------------- told by rank 0

    def _tell(self, data: bytes) -> bytes:
        """Return what rank 0 gives."""
        size = np.array([len(data)], dtype=np.int64)
        self._broadcast(size.view(np.uint8))
        content = np.zeros(int(size[0]), dtype=np.uint8)
        if not len(content):
            return b""
        if self._first:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        self._broadcast(content)
        return content.tobytes()

    def _broadcast(self, data: Any) -> None:
        call = Call(PROBE, DTYPES.index("uint8"), 0, len(data))
        self._across.run(binomial_broadcast(self._across.roster.size), [data], 1, call)

    # -------------------------------------------------------------------------------------------- the table in use

    def _use(self, data: bytes) -> None:
        self._take_over(Table.decode(data))
        assert self.table is not None
        self._auditions = {
            at: audition for at, rank in enumerate(self.table.ranks) if (audition := audition_of(rank)) is not None
        }

    def _take_over(self, table: Table) -> None:
        self.table = table
        self.version += 1
        self._expected.clear()
        self._bounds = self.table.bounds()
        self._choices = tuple(Choice.parse(rank.winner) for rank in self.table.ranks)
        self._plain = tuple(_without_native(rank) for rank in self.table.ranks)

    def _topology(self, cluster: Cluster) -> dict[str, Any]:
        roster = self._across.roster
        ranks = [len(ranks) for ranks in roster.hosts]
        return cluster.between.to_topology(roster.names, ranks, "measured by ringside at start-up")

    def _words(self) -> str:
        assert self.table is not None
        words: list[str] = []
        for rank in self.table.ranks:
            if not words or not words[-1].endswith(f" {rank.winner}"):
                words.append(f"from {rank.size_bytes} B {rank.winner}")
        return ", ".join(words)


def _best(prices: Mapping[str, Sequence[Price]], size: int) -> list[str]:
    """Return the choices to time at a size, the most promising first after native, of every way by turns.

    These are the native ones, and the best by price over leaders, hosts and ranks each.
    """
    ways: list[list[str]] = []
    shared = f"hosts/{NATIVE}" in prices
    for over, small, large, block in (("leaders", 3, 1, 0), ("hosts", 2, 2, 1), ("ranks", 1 if shared else 4, 3, 2)):
        count = small if size < 1 << 20 else large if size < _MOST_TIMED else block
        if over == "ranks" and shared and size >= 1 << 20:
            count = 0  # every byte would leave a host as often as it has ranks
        if over == "hosts" and size <= LADDER[0]:
            count = 0  # a single element is carried by one rank of a host, as by a leader
        ours = [name for name in prices if not name.endswith(NATIVE) and Choice.parse(name).over == over]
        if size < 1 << 16:  # nothing to cut in pieces
            ours = [name for name in ours if Choice.parse(name).segments == 1]
        ways.append(sorted(ours, key=lambda choice: predicted_at(size, prices[choice]))[:count])
    if size < 1 << 16 and _FEWEST in prices and _FEWEST not in ways[0]:
        ways[0].append(_FEWEST)
    if size >= 1 << 20:
        ways = [ways[1], ways[0], ways[2]]
    found = [name for names in itertools.zip_longest(*ways) for name in names if name is not None]
    return [NATIVE, *found, *([f"hosts/{NATIVE}"] if shared else [])]


def _without_native(rank: Rank) -> Choice:
    """Return what is chosen where native cannot be: the choice itself, or the fastest expected of ours."""
    names = [rank.winner, *(row.choice for row in rank.rows)]
    ours = (choice for choice in map(Choice.parse, names) if choice.algorithm != NATIVE)
    return next(ours, Choice("ring", Choice.parse(rank.winner).over))


def _job(across: Across) -> dict[str, str]:
    """Return what a table depends on, as far as the group tells."""
    roster = across.roster
    return {
        "hosts": ",".join(f"{name}:{len(ranks)}" for name, ranks in zip(roster.names, roster.hosts, strict=True)),
        "message_bytes": str(across.exchange.segment_bytes),
        "window": str(across.exchange.window),
        "block_bytes": str(across._block_bytes),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _difference(before: Probe | None, now: Probe, across: Across) -> str:
    """Say what became of the links, in a few words."""
    names = across.roster.names
    slow = now.slow
    if slow:
        link = slow[0]
        where = names[link.src] if link.dst < 0 else f"{names[link.src]} > {names[link.dst]}"
        return f"{where} carries {link.bytes_per_s / 1e6:.0f} MB/s, others {link.usual / 1e6:.0f} MB/s"
    if before is None:
        return "no link is slow"
    off = ~np.eye(now.network.size, dtype=np.bool_)
    share = math.exp(float(np.mean(np.log(now.rates[off] / before.rates[off]))))
    return f"links carry {share:.2f} times what they did"
