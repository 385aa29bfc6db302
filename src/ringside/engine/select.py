"""Chooses how all-reduces between hosts are carried out: by measurement, alike on all ranks, and says why.

At start-up links are timed, every candidate is priced, the best few are timed beside the group's own collective, and
rank 0 decides; the table it makes reaches all ranks byte for byte. During training every rank compares what
all-reduces take with what they should take; every few collectives the ranks vote, and if all of them find that the
network has changed, they time and decide anew. See docs/design/0006-selection.md.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ringside.engine.across import Across
from ringside.engine.choice import NATIVE, Choice
from ringside.engine.drift import DRIFT, Drift
from ringside.engine.dtypes import DTYPES
from ringside.engine.exchange import Call
from ringside.engine.explanation import Explanation
from ringside.engine.pricing import Cluster, Price
from ringside.engine.probing import PROBE, QUICK, Probe, Prober
from ringside.engine.selection_cache import Mode, cache_path, load, store
from ringside.engine.selection_table import LADDER, Table, Timings, candidates, make_table, predicted_at, priced
from ringside.schedule import binomial_broadcast

_log = logging.getLogger(__name__)

STARTUP_S = 0.9
REVISION_S = 1.5
_TIMED = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 256 << 10, 16 << 20)  # in this order, as far as the budget goes
_MOST_TIMED = 4 << 20  # larger tensors go in blocks of this size: their ranking is that of one block
_REPEATS = 3
_MUST_BYTES, _MUST_S = 1 << 20, 0.2  # sizes up to here are timed once even late, unless that takes so long
_NOT_NATIVE = frozenset(DTYPES.index(name) for name in ("int16", "bool"))  # Gloo has no reductions of them
_OTHERWISE = Choice("ring", "hosts")  # with RINGSIDE_SELECTION=off


class _Plan(msgspec.Struct, frozen=True):
    """What rank 0 has all ranks time: choices per size."""

    turns: list[tuple[int, list[str]]]


class Selector:
    """One rank's part in the choice of all-reduces. Every method but the cheap ones below is a collective.

    `choose`, `explain`, `observe` and `due` are local; `start`, `vote` and `revise` must be called by all ranks alike.

    Args:
        across: The group.
        key: What the choice depends on besides hosts and links: versions, wire dtype, settings.
        environ: RINGSIDE_SELECTION (`off`, `fresh` or a table's path), RINGSIDE_CACHE_DIR, XDG_CACHE_HOME.
        clock: Seconds.

    Attributes:
        table: What was decided; None before `start`, and with RINGSIDE_SELECTION=off.
        probe: The links, as last timed; None likewise.
        history: What was changed during the run and why, in words.
    """

    def __init__(
        self,
        across: Across,
        key: Mapping[str, str] | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.table: Table | None = None
        self.probe: Probe | None = None
        self.history: list[str] = []
        self._across, self._clock = across, clock
        self._mode, self._environ = Mode.of_environment(environ), dict(environ)
        self._prober = Prober(across, effort=QUICK, clock=clock)
        self._key = {**_job(across), **(key or {})}
        self._timings: dict[tuple[str, int], float] = {}
        self._prices: dict[str, list[Price]] = {}
        self._first = across.roster.rank == 0
        self._bounds: list[float] = []
        self._choices: tuple[Choice, ...] = (_OTHERWISE,)
        self._plain: tuple[Choice, ...] = (_OTHERWISE,)
        self._drift = Drift(())
        self._asked = 0

    # -------------------------------------------------------------------------------------------- cheap and local

    def choose(self, size_bytes: int, dtype: int = 0, op: int = 0) -> Choice:
        """Return how an all-reduce of this size is carried out; equal on all ranks.

        Args:
            size_bytes: Of the tensor.
            dtype: Code of the element type.
            op: Code of the reduction.
        """
        choices = self._plain if dtype in _NOT_NATIVE else self._choices
        return choices[bisect_left(self._bounds, size_bytes)]

    def explain(self, size_bytes: int) -> Explanation:
        """Return why an all-reduce of this size goes the way it goes; `str` of it is a ranked table."""
        if self.table is None:
            return Explanation(size_bytes, str(self.choose(size_bytes)), "nothing was measured: RINGSIDE_SELECTION=off")
        return Explanation.of(size_bytes, self.table.at(size_bytes), tuple(self.history))

    def observe(self, size_bytes: int, choice: Choice, seconds: float) -> None:
        """Take what an all-reduce took here."""
        if self.table is None:
            return
        expected_s = self.table.expected_s(size_bytes, str(choice))
        self._drift.observe(size_bytes, seconds / expected_s if expected_s else None)

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
        kept = load(path, self._key, self.probe.network) if self._first and self._mode.read else None
        data = self._tell(kept.encode() if kept is not None else b"")
        if not data:
            data = self._measured(STARTUP_S - (self._clock() - began), None)
            if self._first:
                store(path, Table.decode(data))
        self._use(data)
        if self._first:
            where = "kept" if kept is not None else "measured"
            _log.info("selection %s in %.2f s: %s", where, self._clock() - began, self._words())

    def vote(self) -> bool:
        """Tell whether all ranks find that all-reduces take longer than they should."""
        least = -float(self._prober.most(np.array([-self._drift.level]))[0])
        return least > DRIFT

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

    def after(self, size_bytes: int, choice: Choice, seconds: float) -> None:
        """Do all that is to be done after an all-reduce: observe it, and vote and revise where that is due."""
        self.observe(size_bytes, choice, seconds)
        if self.due(size_bytes) and self.vote():
            level = self._drift.level
            self.revise(f"all-reduces of {size_bytes / 1e6:.2g} MB take {level:.1f} times what they took")

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
        table = make_table(self._prices, Timings(self._timings), self._key, topology, before=before)
        return self._tell(table.encode())

    def _plan(self, cluster: Cluster, before: Table | None) -> _Plan:
        """Price the candidates and say which are to be timed, rank 0 only."""
        assert self.probe is not None
        prices = priced(candidates(cluster, self.probe.better_order), cluster)
        if before is None:
            self._prices = prices
            return _Plan([(size, self._best(prices, size, 4 if size < 1 << 20 else 3)) for size in _TIMED])
        used = {rank.winner for rank in before.ranks} - prices.keys()
        prices |= priced((Choice.parse(text) for text in used), cluster)
        self._timings = {
            (choice, size): seconds * predicted_at(size, prices[choice]) / predicted_at(size, self._prices[choice])
            for (choice, size), seconds in self._timings.items()
            if choice in prices and choice in self._prices
        }
        self._prices = prices
        size = min(LADDER[bisect_left(before.bounds(), self._asked)], _MOST_TIMED)
        names = [before.at(self._asked).winner, *self._best(prices, size, 4)]
        return _Plan([(size, list(dict.fromkeys(names)))])

    def _best(self, prices: Mapping[str, Sequence[Price]], size: int, count: int) -> list[str]:
        ranked = sorted(prices, key=lambda choice: predicted_at(size, prices[choice]))
        return [NATIVE, *[choice for choice in ranked if choice != NATIVE][:count]]

    def _time(self, plan: _Plan, deadline: float) -> dict[tuple[str, int], float]:
        """Time what the plan says, in turns, as far as rank 0's clock allows; the medians of the slowest rank."""
        for name in dict.fromkeys(name for _, names in plan.turns for name in names):
            self._prober.warm_up(Choice.parse(name))
        found: dict[tuple[str, int], float] = {}
        for size, names in plan.turns:
            cost_s = sum(predicted_at(size, self._prices[name]) for name in names) if self._first else 0.0
            data = np.zeros(size // 4, dtype=np.float32)
            took = np.full((_REPEATS, len(names)), -1.0)
            for turn in range(_REPEATS):
                least = 1.5 * cost_s * (_REPEATS if turn == 0 else 1)
                must = turn == 0 and (not found or (size <= _MUST_BYTES and cost_s < _MUST_S))
                if not self._agreed(must or self._clock() + least < deadline):
                    break
                for at in np.roll(np.arange(len(names)), -turn).tolist():
                    took[turn, at] = self._prober.time_once(Choice.parse(names[at]), data)
            slowest = self._prober.most(took)
            done = slowest[(slowest >= 0).all(axis=1)]
            if len(done):
                found |= {(name, size): float(np.median(done[:, at])) for at, name in enumerate(names)}
        return found

    # -------------------------------------------------------------------------------------------- told by rank 0

    def _agreed(self, yes: bool) -> bool:
        return self._tell(b"y" if yes else b"") == b"y"

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
        self.table = Table.decode(data)
        self._bounds = self.table.bounds()
        self._choices = tuple(Choice.parse(rank.winner) for rank in self.table.ranks)
        self._plain = tuple(_without_native(choice) for choice in self._choices)
        if not self.history:
            self._drift = Drift(self._bounds)

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


def _without_native(choice: Choice) -> Choice:
    return Choice("ring", choice.over) if choice.algorithm == NATIVE else choice


def _job(across: Across) -> dict[str, str]:
    """Return what a table depends on, as far as the group tells."""
    roster = across.roster
    return {
        "hosts": ",".join(f"{name}:{len(ranks)}" for name, ranks in zip(roster.names, roster.hosts, strict=True)),
        "segment_bytes": str(across.exchange.segment_bytes),
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
