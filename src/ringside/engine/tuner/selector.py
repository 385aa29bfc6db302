"""Chooses how all-reduces between hosts are carried out: by measurement, alike on all ranks, and says why.

At start-up links are timed, every candidate is priced, the best few are timed beside the group's own collective, and
rank 0 decides; the table it makes reaches all ranks byte for byte. During training every rank compares what
all-reduces take with what they should take; every few collectives the ranks vote, and if all of them find that the
network has changed, they time and decide anew. See docs/design/0006-selection.md.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.probe.prober import QUICK, Probe, Prober
from ringside.engine.tuner.cache import Mode, cache_path, load, store
from ringside.engine.tuner.drift import DRIFT, DRIFT_SMALL, EVERY_NOTED, LARGE_BYTES, Drift
from ringside.engine.tuner.explain import AlgorithmChange, Explanation, difference
from ringside.engine.tuner.table import LADDER, Rank, TimingTable
from ringside.engine.tuner.timing import First, StartupTiming
from ringside.engine.tuner.trials import OnlineTrials, audition_of, settled

_log = logging.getLogger(__name__)

STARTUP_S = 0.9
PROBE_S = 0.35  # of it, or of a revision's, for the links
REVISION_S = 1.5
_NOT_NATIVE = frozenset(DTYPES.index(name) for name in ("int16", "bool"))  # Gloo has no reductions of them
_NOT_NATIVE_OPS = frozenset(OP_CODES[name] for name in ("min", "max"))  # Gloo's may lose a NaN, ours never
_FLOAT32 = DTYPES.index("float32")
_MOST_EXPECTED = 1024
_OTHERWISE = AlgorithmSpec("ring", "hosts")  # with RINGSIDE_SELECTION=off


class Tuner:
    """One rank's part in the choice of all-reduces. Every method but the cheap ones below is a collective.

    `choose`, `explain`, `observe`, `tries` and `due` are local; `start`, `assemble`, `vote` and `revise` must be called
    by all ranks alike.

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
        listeners: Called with every revision on the thread that carries all-reduces, on all ranks.
        version: Grows with every change of the choices in use.
        startup_s: What `start` took, seconds.
        calls: How many small all-reduces there were, by class of sizes, once that class is settled.
    """

    def __init__(
        self,
        across: HierarchicalEngine,
        key: Mapping[str, str] | None = None,
        *,
        wire: WireCompression | None = None,
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
        self._first = First(across)
        self._measuring = StartupTiming(across.rank_map, self._first, self._prober, clock)
        self.key = {**_job(across), **{name: str(value) for name, value in (key or {}).items()}}
        self._bounds: list[float] = []
        self._choices: tuple[AlgorithmSpec, ...] = (_OTHERWISE,)
        self._plain: tuple[AlgorithmSpec, ...] = (_OTHERWISE,)
        self._drift = Drift(())
        self._asked = 0
        self._auditions: dict[int, OnlineTrials] = {}
        self.calls: Counter[int] = Counter()
        self._path: Path | None = None
        self._expected: dict[tuple[int, AlgorithmSpec], float | None] = {}

    # -------------------------------------------------------------------------------------------- cheap and local

    def choose(self, size_bytes: int, dtype: int = 0, op: int = 0) -> AlgorithmSpec:
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
            return AlgorithmSpec.parse(self._auditions[at].current)
        return self._choices[at]

    def explain(self, size_bytes: int) -> Explanation:
        """Return why an all-reduce of this size goes the way it goes; `str` of it is a ranked table."""
        if self.table is None:
            return Explanation(size_bytes, str(self.choose(size_bytes)), "nothing was measured: RINGSIDE_SELECTION=off")
        return Explanation.of(size_bytes, self.table.at(size_bytes), tuple(self.history))

    @property
    def history(self) -> list[str]:
        """What was decided anew during the run and why, in words."""
        return [revision.words for revision in self.revisions]

    def settled(self, size_bytes: int) -> bool:
        """Tell whether the choice for this size has been tried out in the job's own all-reduces."""
        return bisect_left(self._bounds, size_bytes) not in self._auditions

    def tries(self, size_bytes: int, choice: AlgorithmSpec, dtype: int = _FLOAT32) -> bool:
        """Tell whether a large all-reduce is a turn of its choice; then all begin together (`assemble`)."""
        at = bisect_left(self._bounds, size_bytes)
        if self.table is None or at not in self._auditions or dtype != _FLOAT32:
            return False
        return self.table.ranks[at].size_bytes >= LARGE_BYTES and str(choice) == self._auditions[at].current

    def size_class(self, size_bytes: int) -> int:
        """Return the class of sizes that are chosen for together: the place in `calls`."""
        return bisect_left(self._bounds, size_bytes)

    def observe(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int = _FLOAT32) -> None:
        """Take what an all-reduce took here; with a wire dtype what was timed says nothing of other than float32."""
        if self.table is None:
            return
        known = self._wire is None or dtype == _FLOAT32
        expected_s = self._expected_s(size_bytes, choice) if known else None
        self._drift.observe(size_bytes, seconds / expected_s if expected_s else None)

    def _expected_s(self, size_bytes: int, choice: AlgorithmSpec) -> float | None:
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
        self.probe = self._time_links()
        path = self._mode.path or cache_path(self.key, self._environ)
        kept = self._kept(path)
        data = self._first.tell(kept.encode() if kept is not None else b"")
        if not data:
            data = self._measuring.table(self.probe, STARTUP_S - (self._clock() - began), self.key, None, self._asked)
            if self._first.here:
                self._store(path, TimingTable.decode(data))
        self._path = path if kept is None and self._mode.path is None else None
        self.use(data)
        self._drift = Drift(self._bounds)
        self.startup_s = self._clock() - began
        if self._first.here:
            where = "kept" if kept is not None else "measured"
            _log.info("selection %s in %.2f s: %s", where, self.startup_s, self._words())

    def _time_links(self) -> Probe:
        """Time the links; how large messages are depends on what they carry (`exchange.message_size`)."""
        found = self._prober.probe()
        self._across.exchange.bytes_per_s = found.usual_rate
        return found

    def _kept(self, path: Path) -> TimingTable | None:
        """Return the table that was decided before, if it holds now, and go on from its figures; rank 0 only."""
        if not self._first.here or not self._mode.read:
            return None
        assert self.probe is not None
        level = logging.INFO if self._mode.path is None else logging.WARNING
        kept = load(path, self.key, self.probe.network, level=level)
        if kept is not None and tuple(rank.size_bytes for rank in kept.ranks) == LADDER:
            self._measuring.go_on_from(kept)
        return kept

    def _store(self, path: Path, table: TimingTable) -> None:
        if self._mode.path is not None and path.exists():
            _log.warning("%s was not used and stays as it is: this run measures; move it away to keep its table", path)
        else:
            store(path, table)

    def assemble(self) -> None:
        """Return when all ranks are here: what one takes that came early, or went on late, is no choice's doing."""
        self._prober.most(np.zeros(1))

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
        self.probe = self._time_links()
        left_s = REVISION_S - (self._clock() - began)
        self.use(self._measuring.table(self.probe, left_s, self.key, before, self._asked))
        assert self.table is not None
        old, new = before.at(self._asked).winner, self.table.at(self._asked).winner
        changed = [rank.winner for rank in before.ranks] != [rank.winner for rank in self.table.ranks]
        others = old == new and changed
        found = difference(previous, self.probe, self._across.rank_map.names)
        slow, took_s = tuple(self.probe.slow), self._clock() - began
        expected_s = self._expected_s(self._asked, AlgorithmSpec.parse(new))
        self._drift.revised(changed=changed, cost=took_s / expected_s if expected_s else 0.0)
        revision = AlgorithmChange(self._asked, old, new, others, reason, slow, found, took_s)
        self.revisions.append(revision)
        if self._first.here:
            _log.warning("selection revised in %.2f s: %s", took_s, revision.words)
        for listener in self.listeners:
            listener(revision)

    def after(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int = _FLOAT32) -> None:
        """Do all that is to be done after an all-reduce: observe it, and vote and revise where that is due."""
        if not self._passed_over(size_bytes) and not self._heard(size_bytes, choice, seconds, dtype):
            self.note(size_bytes, choice, seconds, dtype)

    def note(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> None:
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

    def _heard(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> bool:
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
            if audition.odds > (DRIFT if size_bytes >= LARGE_BYTES else DRIFT_SMALL):
                self._asked = size_bytes
                self.revise(f"the network changed while choices for {size_bytes / 1e6:.2g} MB were tried out")
        return True

    def _settle(self, at: int, rank: Rank, heard: Mapping[str, float]) -> None:
        """Use what an audition found, and remember it."""
        assert self.table is not None
        self._drift.tried(rank.size_bytes)
        ranks = (*self.table.ranks[:at], rank, *self.table.ranks[at + 1 :])
        self._take_over(TimingTable(self.table.key, self.table.topology, ranks))
        if self._first.here:
            self._measuring.timings.update({(name, rank.size_bytes): seconds for name, seconds in heard.items()})
            _log.info("all-reduces of about %.3g MB: %s", rank.size_bytes / 1e6, rank.why)
            if self._path is not None:
                store(self._path, self.table)

    # -------------------------------------------------------------------------------------------- the table in use

    def use(self, data: bytes) -> None:
        """Choose by a table from now on, and try its promising choices out; every rank must be given the same.

        Args:
            data: The table, encoded.
        """
        self._take_over(TimingTable.decode(data))
        assert self.table is not None
        pieces_from = self._across.pieces_from_bytes(self._wire)
        auditions = {at: audition_of(rank, pieces_from) for at, rank in enumerate(self.table.ranks)}
        self._auditions = {at: audition for at, audition in auditions.items() if audition is not None}

    def _take_over(self, table: TimingTable) -> None:
        self.table = table
        self.version += 1
        self._expected.clear()
        self._bounds = self.table.bounds()
        self._choices = tuple(AlgorithmSpec.parse(rank.winner) for rank in self.table.ranks)
        self._plain = tuple(_without_native(rank) for rank in self.table.ranks)

    def _words(self) -> str:
        assert self.table is not None
        words: list[str] = []
        for rank in self.table.ranks:
            if not words or not words[-1].endswith(f" {rank.winner}"):
                words.append(f"from {rank.size_bytes} B {rank.winner}")
        return ", ".join(words)


def _without_native(rank: Rank) -> AlgorithmSpec:
    """Return what is chosen where native cannot be: the choice itself, or the fastest expected of ours."""
    names = [rank.winner, *(row.choice for row in rank.rows)]
    ours = (choice for choice in map(AlgorithmSpec.parse, names) if choice.algorithm != NATIVE)
    return next(ours, AlgorithmSpec("ring", AlgorithmSpec.parse(rank.winner).over))


def _job(across: HierarchicalEngine) -> dict[str, str]:
    """Return what a table depends on, as far as the group tells."""
    roster = across.rank_map
    return {
        "hosts": ",".join(f"{name}:{len(ranks)}" for name, ranks in zip(roster.names, roster.hosts, strict=True)),
        "message_bytes": str(across.exchange.segment_bytes),
        "window": str(across.exchange.window),
        "block_bytes": str(across.block_bytes),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
