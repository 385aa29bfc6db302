"""Chooses the algorithm of all-reduces between hosts: by measurement, alike on all ranks, and with the reason.

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
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ringside._core.enums import DType, ReduceOp
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import USUAL_WINDOW
from ringside.engine.net.exchange.in_flight import connection_bytes, connections_allowed, in_flight
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction
from ringside.engine.probe.prober import QUICK, Probe, Prober
from ringside.engine.tuner.cache import Mode, cache_path, load_table, store_table
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES, Drift
from ringside.engine.tuner.explain import AlgorithmChange, Explanation, difference
from ringside.engine.tuner.table import LADDER, Rank, TimingTable
from ringside.engine.tuner.timing import Rank0Broadcast, StartupTiming
from ringside.engine.tuner.trials import OnlineTrials, settled_rank, trials_for
from ringside.text import size

_log = logging.getLogger(__name__)

STARTUP_S = 0.9
PROBE_S = 0.35  # of it, or of a revision's, for the links
REVISION_S = 1.5
_NOT_NATIVE = frozenset((DType.int16, DType.bool))  # Gloo has no reductions of them
_NOT_NATIVE_OPS = frozenset((ReduceOp.min, ReduceOp.max))  # Gloo's may lose a NaN, ours never
_FLOAT32 = int(DType.float32)
_MOST_EXPECTED = 1024
_OTHERWISE = AlgorithmSpec("ring", "hosts")  # with RINGSIDE_SELECTION=off


class Tuner:
    """One rank's part in the choice of all-reduces. Every method but the cheap ones below is a collective.

    `choose`, `explain`, `observe`, `is_trial_due` and `due` are local; `start`, `begin_trial`, `vote` and `revise` must
    be called by all ranks alike.

    Args:
        across: The group.
        key: What the choice depends on besides hosts and links: `ringside` and `torch` (versions), `wire_dtype`,
            `settings`.
        wire: How float32 elements travel between hosts; None: as they are.
        environ: RINGSIDE_SELECTION (`measured`, `off`, `fresh` or a table's path), RINGSIDE_CACHE_DIR, XDG_CACHE_HOME.
        clock: Seconds.
        prober: Times links and choices; None: by messages of the group.

    Attributes:
        key: What the choice depends on, hosts and links included.
        table: What was decided; None before `start`, and with RINGSIDE_SELECTION=off.
        probe: The links, as last timed; None likewise.
        revisions: What was decided anew during the run and why, oldest first.
        listeners: Called with every revision on the thread that executes all-reduces, on all ranks.
        version: Grows with every change of the choices in use.
        startup_s: What `start` took, seconds.
        calls: How many all-reduces there were, by class of sizes.
        trial_at: With which of them a trial may begin, by class; only where there are choices to be tried.
    """

    def __init__(
        self,
        across: HierarchicalEngine,
        key: Mapping[str, str] | None = None,
        *,
        wire: Wire | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.perf_counter,
        prober: Prober | None = None,
    ) -> None:
        self.table: TimingTable | None = None
        self.probe: Probe | None = None
        self.revisions: list[AlgorithmChange] = []
        self.listeners: list[Callable[[AlgorithmChange], object]] = []
        self.version = 0
        self.startup_s = 0.0
        self._across, self._clock = across, clock
        self._mode, self._environ = Mode.of_environment(environ), dict(environ)
        self._wire = wire
        effort = replace(QUICK, budget_s=PROBE_S)
        self._prober = prober or Prober(across, effort=effort, clock=clock, wire=wire)
        self._rank0 = Rank0Broadcast(across)
        self._startup = StartupTiming(across.rank_map, self._rank0, self._prober, clock)
        self.key = {**_job(across), **{name: str(value) for name, value in (key or {}).items()}}
        # Of each class of sizes: where it ends, what is chosen, and what where native cannot be.
        self._bounds: list[float] = []
        self._choices: tuple[AlgorithmSpec, ...] = (_OTHERWISE,)
        self._choices_without_native: tuple[AlgorithmSpec, ...] = (_OTHERWISE,)
        self._trials: dict[int, OnlineTrials] = {}  # by class; only while they last
        self.trial_at: dict[int, float] = {}
        self._trial_besides_s = self._vote_s = 0.0  # of the trial under way, and of the vote after the last one
        self._drift = Drift(())
        self._due_bytes = 0  # the size of the last all-reduce, which a vote is about
        self.calls: Counter[int] = Counter()
        self._path: Path | None = None
        self._expected: dict[tuple[int, AlgorithmSpec], float | None] = {}

    # -------------------------------------------------------------------------------------------- cheap and local

    def choose(self, size_bytes: int, dtype: int = 0, op: int = 0) -> AlgorithmSpec:
        """Return how an all-reduce of this size is executed; equal on all ranks.

        Now and then the next promising choice is tried beside the one in use.

        Args:
            size_bytes: Of the tensor.
            dtype: Code of the element type.
            op: Code of the reduction.
        """
        size_class = bisect_left(self._bounds, size_bytes)
        if dtype in _NOT_NATIVE or op in _NOT_NATIVE_OPS:
            return self._choices_without_native[size_class]
        if size_class in self._trials and dtype == _FLOAT32:
            return AlgorithmSpec.parse(self._trials[size_class].current)
        return self._choices[size_class]

    def explain(self, size_bytes: int) -> Explanation:
        """Return why an all-reduce of this size goes the way it goes; `str` of it is a ranked table."""
        if self.table is None:
            return Explanation(size_bytes, str(self.choose(size_bytes)), "nothing was measured: RINGSIDE_SELECTION=off")
        rank, trials = self.table.at(size_bytes), self._trials.get(self.size_class(size_bytes))
        if trials is not None and trials.using != rank.winner:
            rank = settled_rank(rank, trials)
        return Explanation.of(size_bytes, rank, tuple(self.history))

    @property
    def history(self) -> list[str]:
        """What was decided anew during the run and why, a line each."""
        return [revision.describe() for revision in self.revisions]

    def settled(self, size_bytes: int) -> bool:
        """Return whether the choice for this size has been tried out in the job's own all-reduces."""
        return bisect_left(self._bounds, size_bytes) not in self._trials

    def is_trial_due(self, size_bytes: int, dtype: int = 0, op: int = 0) -> bool:
        """Return whether the next all-reduce is one of a trial, as those of float32 are but for min and max.

        Args:
            size_bytes: Of the tensor.
            dtype: Code of the element type.
            op: Code of the reduction.
        """
        if dtype != _FLOAT32 or op in _NOT_NATIVE_OPS:
            return False
        size_class = bisect_left(self._bounds, size_bytes)
        return self.calls[size_class] + 1 >= self.trial_at.get(size_class, math.inf)

    def size_class(self, size_bytes: int) -> int:
        """Return the class of sizes that are chosen for together: the place in `calls`."""
        return bisect_left(self._bounds, size_bytes)

    def observe(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int = _FLOAT32) -> None:
        """Record what an all-reduce took here; with a wire dtype the timings hold for float32 alone."""
        if self.table is None:
            return
        known = self._wire is None or dtype == _FLOAT32
        expected_s = self._expected_s(size_bytes, choice) if known else None
        self._drift.observe(size_bytes, seconds / expected_s if expected_s else None)

    def _expected_s(self, size_bytes: int, choice: AlgorithmSpec) -> float | None:
        """Return the table's expectation, looked up once for the sizes in use: small all-reduces take a millisecond."""
        assert self.table is not None
        key = (size_bytes, choice)
        if key not in self._expected:
            if len(self._expected) >= _MOST_EXPECTED:
                self._expected.clear()
            self._expected[key] = self.table.expected_s(size_bytes, str(choice))
        return self._expected[key]

    def due(self, size_bytes: int) -> bool:
        """Return whether the ranks should vote now; call it once after each all-reduce, alike on all ranks."""
        if self.table is None:
            return False
        self._due_bytes = size_bytes
        return self._drift.due(size_bytes)

    # -------------------------------------------------------------------------------------------- collectives

    def start(self) -> None:
        """Measure and decide, or use a table that was kept under the same conditions.

        Takes under a second, on long links some dozens of round trips.
        """
        if not self._mode.measure:
            return
        began = self._clock()
        self.probe = self._time_links()
        # Rank 0: a table that was kept, if it holds now; go on from its figures.
        path = self._mode.path or cache_path(self.key, self._environ)
        kept = None
        if self._rank0.is_here and self._mode.read:
            level = logging.INFO if self._mode.path is None else logging.WARNING
            kept = load_table(path, self.key, self.probe.network, level=level)
            if kept is not None and tuple(rank.size_bytes for rank in kept.ranks) == LADDER:
                self._startup.resume(kept)
        data = self._rank0.broadcast(kept.encode() if kept is not None else b"")
        # Else measure in the time that is left, and keep the result.
        if not data:
            left_s = STARTUP_S - (self._clock() - began)
            data = self._startup.make_table(self.probe, left_s, self.key, None, self._due_bytes)
            if self._rank0.is_here and self._mode.path is not None and path.exists():
                _log.warning(
                    "%s was not used and stays as it is: this run measures; move it away to keep its table", path
                )
            elif self._rank0.is_here:
                store_table(path, TimingTable.decode(data))
        self._path = path if kept is None and self._mode.path is None else None
        self.use(data)
        self._drift = Drift(self._bounds)
        self.startup_s = self._clock() - began
        if self._rank0.is_here and self.table is not None:
            choices: list[str] = []  # a choice is named once, with the smallest size that it is for
            for rank in self.table.ranks:
                if not choices or not choices[-1].endswith(f" {rank.winner}"):
                    choices.append(f"from {rank.size_bytes} B {rank.winner}")
            source = "kept" if kept is not None else "measured"
            _log.info("selection %s in %.2f s: %s", source, self.startup_s, ", ".join(choices))

    def _time_links(self) -> Probe:
        """Time the links: from what they carry follows how large messages are, and how many are on their way."""
        probe = self._prober.probe()
        across = self._across
        across.exchange.bytes_per_s = probe.usual_rate
        if held := probe.round_trip_bytes:
            # As many connections for all as the host with the smallest buffers needs, if all have room for them.
            own = [connection_bytes(), connections_allowed(across.rank_map.size - 1)]
            buffer_bytes, most = (-self._prober.most(-np.array(own, dtype=np.float64))).tolist()
            across.widen(in_flight(held, across.exchange.segment_bytes, buffer_bytes, most))
            if self._rank0.is_here:
                sent = across.exchange
                _log.info("links hold %s: messages %d, connections %d", size(held), sent.window, sent.connections)
        return probe

    def begin_trial(self, elements: int, reduction: Reduction, choice: AlgorithmSpec) -> bool:
        """Prepare an all-reduce that is about to begin if it is one of a trial, and return whether it is.

        Of a large tensor nothing else is on the links, buffers and connections are there, and all ranks are here: that
        a rank came early, or went on late, is not to count for a choice.
        """
        size_bytes = elements * ITEM_BYTES[reduction.dtype]
        trials = self._trials.get(self.size_class(size_bytes))
        if trials is None or str(choice) != trials.current:
            return False
        if not self.is_trial_due(size_bytes, reduction.dtype, reduction.op):
            return False
        if size_bytes >= LARGE_BYTES:
            began = self._clock()
            while self._across.pending:
                self._across.pending[0].wait()
            self._across.rehearse(elements, reduction, choice)
            self._prober.most(np.zeros(1))
            self._trial_besides_s += self._clock() - began
        trials.under_way = str(choice) == trials.current
        return trials.under_way

    def vote(self) -> bool:
        """Return whether all ranks find that all-reduces take longer than they should."""
        # The least of all levels, as the largest of the negative ones.
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
        self.probe = self._time_links()
        left_s = REVISION_S - (self._clock() - began)
        self.use(self._startup.make_table(self.probe, left_s, self.key, before, self._due_bytes), revised=True)
        assert self.table is not None
        old, new = before.at(self._due_bytes).winner, self.table.at(self._due_bytes).winner
        changed = [rank.winner for rank in before.ranks] != [rank.winner for rank in self.table.ranks]
        others = old == new and changed
        found = difference(previous, self.probe, self._across.rank_map.names)
        slow, took_s = tuple(self.probe.slow), self._clock() - began
        expected_s = self._expected_s(self._due_bytes, AlgorithmSpec.parse(new))
        self._drift.revised(changed=changed, cost=took_s / expected_s if expected_s else 0.0)
        revision = AlgorithmChange(self._due_bytes, old, new, others, reason, slow, found, took_s)
        self.revisions.append(revision)
        if self._rank0.is_here:
            _log.warning("selection revised in %.2f s: %s", took_s, revision.describe())
        for listener in self.listeners:
            listener(revision)

    def after(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int = _FLOAT32) -> None:
        """Observe an all-reduce, and vote and revise where that is due; alike on all ranks."""
        size_class = bisect_left(self._bounds, size_bytes)
        self.calls[size_class] += 1
        if self._note_trial(size_bytes, choice, seconds, dtype):
            return
        # Most of the small ones are only counted: to note what one takes costs a tenth of what the smallest take.
        if size_bytes >= LARGE_BYTES or self.calls[size_class] % EVERY_NOTED == 0:
            self.note(size_bytes, choice, seconds, dtype)

    def note(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> None:
        """Observe, vote and revise, for an all-reduce that is not only counted; arguments as for `after`."""
        self.observe(size_bytes, choice, seconds, dtype)
        if self.due(size_bytes) and self.vote():
            level = self._drift.level
            self.revise(f"all-reduces of {size(size_bytes)} take {level:.1f} times what they took")

    def _note_trial(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> bool:
        """Return whether an all-reduce was one of a trial; after its last one judge it, and use what follows."""
        size_class = bisect_left(self._bounds, size_bytes)
        trials = self._trials.get(size_class)
        if self.table is None or trials is None or not trials.under_way:
            return False
        # Scale the time to the size that stands for the class.
        rank = self.table.ranks[size_class]
        expected = [self.table.expected_s(size, str(choice)) for size in (rank.size_bytes, size_bytes)]
        trials.took(seconds * (expected[0] / expected[1] if expected[0] and expected[1] else 1.0))
        if not trials.complete:
            return True
        # Agree on the slowest rank's times, and on what the last rank to come spent on it besides.
        began, used = self._clock(), trials.using
        besides_s = self._trial_besides_s + self._vote_s
        *slowest, least_s = self._prober.most(np.array([*trials.times, -besides_s])).tolist()
        trials.judge(slowest, -least_s)
        self._trial_besides_s, self._vote_s = 0.0, self._clock() - began
        self.trial_at[size_class] = trials.paid_at
        # The class's row of the table is replaced.
        if trials.using != used or trials.over:
            rank, medians = settled_rank(rank, trials), trials.result()
            ranks = (*self.table.ranks[:size_class], rank, *self.table.ranks[size_class + 1 :])
            self._set_table(TimingTable(self.table.key, self.table.topology, ranks))
            if self._rank0.is_here:
                self._startup.timings.update({(name, rank.size_bytes): took_s for name, took_s in medians.items()})
                _log.info("all-reduces of about %s: %s", size(rank.size_bytes), rank.why)
                if self._path is not None:
                    store_table(self._path, self.table)
        if trials.over:
            del self._trials[size_class], self.trial_at[size_class]
            self._drift.tried(rank.size_bytes)
        return True

    # -------------------------------------------------------------------------------------------- the table in use

    def use(self, data: bytes, *, revised: bool = False) -> None:
        """Choose by a table from now on, and try its promising choices out; every rank must be given the same.

        Args:
            data: The table, encoded.
            revised: It takes another one's place.
        """
        table = TimingTable.decode(data)
        pieces_from = self._across.pieces_from_bytes(self._wire)
        long = self._across.exchange.window > USUAL_WINDOW
        trials = {
            at: trials_for(rank, pieces_from, revised=revised, calls_before=self.calls[at], long=long)
            for at, rank in enumerate(table.ranks)
        }
        self._trials = {at: own for at, own in trials.items() if own is not None}
        if long:
            # What is safe to begin with is so for all types, though only float32 has trials.
            begin = {at: own for at, own in self._trials.items() if table.ranks[at].size_bytes >= LARGE_BYTES}
            ranks = [settled_rank(rank, begin[at]) if at in begin else rank for at, rank in enumerate(table.ranks)]
            table = TimingTable(table.key, table.topology, tuple(ranks))
        self._set_table(table)
        self.trial_at = {at: own.paid_at for at, own in self._trials.items()}

    def _set_table(self, table: TimingTable) -> None:
        self.table = table
        self.version += 1
        self._expected.clear()
        self._bounds = self.table.bounds()
        self._choices = tuple(AlgorithmSpec.parse(rank.winner) for rank in self.table.ranks)
        self._choices_without_native = tuple(_without_native(rank) for rank in self.table.ranks)


def _without_native(rank: Rank) -> AlgorithmSpec:
    """Return what is chosen where native cannot be: the choice itself, or the fastest expected of ours."""
    names = [rank.winner, *(row.choice for row in rank.rows)]
    ours = (choice for choice in map(AlgorithmSpec.parse, names) if choice.algorithm != NATIVE)
    return next(ours, AlgorithmSpec("ring", AlgorithmSpec.parse(rank.winner).over))


def _job(across: HierarchicalEngine) -> dict[str, str]:
    """Return the part of a table's key that the group determines."""
    roster = across.rank_map
    return {
        "hosts": ",".join(f"{name}:{len(ranks)}" for name, ranks in zip(roster.names, roster.hosts, strict=True)),
        "message_bytes": str(across.exchange.segment_bytes),
        "window": str(across.exchange.window),
        "block_bytes": str(across.block_bytes),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
