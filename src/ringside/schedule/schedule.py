"""A collective algorithm as a value: what every rank sends, to whom, in which round.

The contract, for everything that reads a schedule (verifier, interpreters, simulator, drawing):

1.  **Chunks.** The tensor of E elements is cut into `chunks` parts; chunk i is the elements
    `[i*E//chunks, (i+1)*E//chunks)` (`ringside.schedule.chunk_bounds`), so parts differ by at most one element and may
    be empty.
2.  **Snapshot.** A transfer of a round carries the value that its source chunk had at the *start* of that round.
    Whoever stores into a chunk that is read in the same round waits until it has been read.
3.  **Reduce.** All reducing transfers of one round into the same chunk of the same destination are combined with the
    destination's own value in *one left fold in ascending rank order*, the destination's own value taking its own
    rank's place. Three ranks that all hand x to rank 1 give `(x0 + x1) + x2` there. So the result depends neither on
    arrival order nor on timing.
4.  **Overwrite.** A transfer that does not reduce replaces the destination's chunk. In its round nothing else may write
    that chunk.
5.  **Order.** Every rank runs the rounds in order; there is no barrier between rounds. Within a round all of a rank's
    sends are under way at once, and the messages arriving at one rank are taken in array order.

6.  **Switches.** Vertices `ranks` to `ranks + switches - 1` are switches. A switch contributes nothing and remembers
    nothing: a reduce at a switch folds only what arrives in that round, in ascending rank order.
7.  **Start and end.** What ranks hold at the start and must hold at the end is the schedule's `collective`.

Ranks, chunks and rounds are numbered from 0.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError
from ringside.schedule.collective import ALL_REDUCE, Collective

Transfer = tuple[int, int, int, bool]


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """One phase of a schedule: its transfers, as four read-only arrays of equal length, shape [transfers].

    Args:
        src: Sending rank of each transfer, int32.
        dst: Receiving rank, int32.
        chunk: The chunk that travels; it has the same number on both sides, int32.
        reduce: True: combine with the destination's value; False: overwrite it. bool.

    Raises:
        UsageError: The arrays are not one-dimensional or differ in length.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    chunk: NDArray[np.int32]
    reduce: NDArray[np.bool_]

    def __post_init__(self) -> None:
        for name in ("src", "dst", "chunk"):
            object.__setattr__(self, name, _read_only(getattr(self, name), np.int32))
        object.__setattr__(self, "reduce", _read_only(self.reduce, np.bool_))
        shapes = {array.shape for array in self._arrays()}
        if len(shapes) != 1 or self.src.ndim != 1:
            raise UsageError(f"a round needs four arrays of one length, not of shapes {sorted(map(str, shapes))}")

    @classmethod
    def of(cls, transfers: Iterable[Sequence[int]]) -> Round:
        """Return the round of the given `(src, dst, chunk, reduce)` rows, in their order."""
        rows = np.array([tuple(row) for row in transfers], dtype=np.int32).reshape(-1, 4)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] != 0)

    def where(self, keep: NDArray[np.bool_]) -> Round:
        """Return the round with only the transfers for which `keep` (bool [transfers]) is true."""
        return Round(self.src[keep], self.dst[keep], self.chunk[keep], self.reduce[keep])

    def arriving(self, vertex: int) -> dict[int, tuple[bool, list[int]]]:
        """Return what arrives at a vertex, (overwrite, sources) by chunk, in order of first appearance."""
        found: dict[int, tuple[bool, list[int]]] = {}
        own = self.dst == vertex
        for src, chunk, reduce in zip(*(a[own].tolist() for a in (self.src, self.chunk, self.reduce)), strict=True):
            found.setdefault(chunk, (not reduce, []))[1].append(src)
        return found

    def checksum(self, before: int) -> int:
        """Return the CRC-32 of the transfers, after that of the rounds before; ranks compare it."""
        for array in self._arrays():
            before = zlib.crc32(array.tobytes(), before)
        return before

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.src, self.dst, self.chunk, self.reduce

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Transfer]:
        """Yield the transfers as `(src, dst, chunk, reduce)` of Python ints and a bool, in array order."""
        return zip(*(array.tolist() for array in self._arrays()), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Round):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self._arrays(), other._arrays(), strict=True))

    def __hash__(self) -> int:
        return hash(tuple(array.tobytes() for array in self._arrays()))


@dataclass(frozen=True, slots=True)
class Schedule:
    """An algorithm for a given number of ranks; see the module for what it means.

    Rounds are generated when asked for, never stored: making `ring(24_576)` costs nothing. Two schedules are equal
    when they are made by the same function of the same parameters.

    Args:
        name: The algorithm's name, as in `ALGORITHMS`.
        ranks: Number of ranks, at least 1.
        chunks: Number of parts the tensor is cut into, at least 1.
        rounds: Number of rounds, at least 0.
        generate: Pure function: `generate(*parameters, k)` is round k.
        parameters: Its leading arguments; hashable, so that a schedule is a value. A combinator puts the schedules
            that it combines here.
        switches: Vertices that reduce without being ranks, numbered from `ranks` up.
        collective: What it achieves.
        rotational: True: the schedule looks the same from every rank, and `generate` gives only one transfer of each
            *orbit* of the rotation (rank + 1 mod ranks, chunk + chunks/ranks mod chunks); `round` makes the others. So
            the symmetry holds by construction, and `verify` and `traffic` need only look at one rank's share.
        stretches: Lengths of stretches of consecutive rounds that differ only in *which* chunks move: who sends how
            many chunks to whom, and how many of them are added, is the same. So one round of each prices it. Empty:
            not known.

    Raises:
        UsageError: A count is out of range, a rotational schedule has switches or chunks that do not divide, or the
            stretches are not as long as the schedule.
    """

    name: str
    ranks: int
    chunks: int
    rounds: int
    generate: Callable[..., Round] = field(repr=False)
    parameters: tuple[Hashable, ...] = field(default=(), repr=False)
    switches: int = 0
    collective: Collective = ALL_REDUCE
    rotational: bool = field(default=False, repr=False)
    stretches: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for what, least in (("ranks", 1), ("chunks", 1), ("rounds", 0), ("switches", 0)):
            if getattr(self, what) < least:
                plural = what if least != 1 else what.removesuffix("s")
                raise UsageError(f"{self.name} needs at least {least} {plural}, not {getattr(self, what)}")
        if self.rotational and (self.switches or self.chunks % self.ranks):
            raise UsageError(
                f"{self.name} cannot be rotational: {self.chunks} chunks and {self.switches} switches do not rotate "
                f"with {self.ranks} ranks"
            )
        if self.stretches and sum(self.stretches) != self.rounds:
            raise UsageError(f"{self.name} has {self.rounds} rounds, and its stretches {sum(self.stretches)}")

    @property
    def vertices(self) -> int:
        """Ranks and switches together."""
        return self.ranks + self.switches

    def round(self, k: int) -> Round:
        """Return round `k`, 0 ≤ k < `rounds`; raise `UsageError` for any other k."""
        step = self._generated(k)
        if not self.rotational:
            return step
        # All transfers of the orbits: by sender, so that a receiver takes them in rank order.
        n, chunks = self.ranks, self.chunks
        step = _from_rank_0(step, n, chunks)
        turn = np.arange(n, dtype=np.int64)[:, None]
        return Round(
            np.repeat(turn, len(step)),
            ((turn + step.dst) % n).ravel(),
            ((turn * (chunks // n) + step.chunk) % chunks).ravel(),
            np.tile(step.reduce, n),
        )

    def representatives(self, k: int) -> Round:
        """Return of round `k` of a rotational schedule one transfer per orbit, the one that rank 0 sends.

        Raises:
            UsageError: There is no such round, or the schedule is not rotational.
        """
        if not self.rotational:
            raise UsageError(f"{self.name} has no rotational symmetry; read its rounds instead")
        return _from_rank_0(self._generated(k), self.ranks, self.chunks)

    def _generated(self, k: int) -> Round:
        if not 0 <= k < self.rounds:
            raise UsageError(f"{self.name} of {self.ranks} ranks has rounds 0 to {self.rounds - 1}, not {k}")
        return self.generate(*self.parameters, k)


def joined(rounds: Sequence[Round]) -> Round:
    """Return the rounds' transfers in one round, one after the other."""
    if len(rounds) == 1:
        return rounds[0]
    columns = zip(*(step._arrays() for step in rounds or [Round.of([])]), strict=True)
    return Round(*map(np.concatenate, columns))


def _from_rank_0(step: Round, n: int, chunks: int) -> Round:
    """Turn every transfer until rank 0 sends it."""
    if not step.src.any():
        return step
    chunk = (step.chunk - step.src.astype(np.int64) * (chunks // n)) % chunks
    return Round(np.zeros_like(step.src), (step.dst - step.src) % n, chunk.astype(np.int32), step.reduce)


def from_rounds(
    name: str,
    ranks: int,
    chunks: int,
    rounds: Iterable[Round],
    *,
    switches: int = 0,
    collective: Collective = ALL_REDUCE,
) -> Schedule:
    """Return a schedule that is written out: for algorithms of one's own, and for broken ones in tests."""
    stored = tuple(rounds)
    return Schedule(name, ranks, chunks, len(stored), _stored_round, (stored,), switches, collective)


def _stored_round(rounds: tuple[Round, ...], k: int) -> Round:
    return rounds[k]


def _read_only(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array


# -------------------------------------------------------------------------------------------------
# A schedule run in the plainest way there is: the oracle for everything faster.


def chunk_bounds(elements: int, chunks: int) -> NDArray[np.int64]:
    """Return the chunks' offsets, int64 [chunks + 1]: chunk i is the elements `[i*E//C, (i+1)*E//C)`.

    Sizes differ by at most one element; with fewer elements than chunks some are empty.
    """
    return np.arange(chunks + 1, dtype=np.int64) * elements // chunks


def run(
    schedule: Schedule, inputs: NDArray[Any], op: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]] = np.add
) -> NDArray[Any]:
    """Return what every rank holds after `schedule`; only what its collective wants is meaningful.

    Args:
        schedule: The algorithm.
        inputs: Every rank's tensor, [ranks, elements], any dtype; not changed. Elements need not divide by the chunks.
            Where the collective lets a rank hold nothing at the start, its values are there but must not matter.
        op: Combines two arrays elementwise, lower ranks on the left.

    Returns:
        An array of the shape and dtype of `inputs`.

    Raises:
        UsageError: `inputs` has another shape.
    """
    if inputs.ndim != 2 or len(inputs) != schedule.ranks:
        raise UsageError(f"inputs must be [{schedule.ranks}, elements], one row per rank, not {list(inputs.shape)}")
    values: NDArray[Any] = np.concatenate([inputs, np.zeros_like(inputs, shape=(schedule.switches, inputs.shape[1]))])
    bounds = chunk_bounds(inputs.shape[1], schedule.chunks).tolist()
    for k in range(schedule.rounds):
        before = values.copy()
        additions: dict[tuple[int, int], list[int]] = defaultdict(list)
        for src, dst, chunk, reducing in schedule.round(k):
            part = slice(bounds[chunk], bounds[chunk + 1])
            if reducing:
                additions[dst, chunk].append(src)
            else:
                values[dst, part] = before[src, part]
        for (dst, chunk), sources in additions.items():
            part = slice(bounds[chunk], bounds[chunk + 1])
            terms = sources if dst >= schedule.ranks else [*sources, dst]
            values[dst, part] = functools.reduce(op, [before[rank, part] for rank in sorted(terms)])
    return values[: schedule.ranks]


def contributions(schedule: Schedule) -> Iterator[NDArray[np.int64]]:
    """Yield what every chunk contains at the start of each round, and once more at the end.

    Yields:
        int64 [vertices, chunks, ranks], `rounds` + 1 times: how often chunk c on vertex v (ranks, then switches)
        contains the contribution of the rank in the last axis. What is undefined counts as nothing.
    """
    counts = np.zeros((schedule.vertices, schedule.chunks, schedule.ranks), dtype=np.int64)
    rank, chunk = np.nonzero(schedule.collective.holds(schedule.ranks, schedule.chunks))
    counts[rank, chunk, rank] = 1
    yield counts
    for k in range(schedule.rounds):
        step = schedule.round(k)
        copy, add = step.where(~step.reduce), step.where(step.reduce)
        after = counts.copy()
        after[copy.dst, copy.chunk] = counts[copy.src, copy.chunk]
        at_switch = add.where(add.dst >= schedule.ranks)
        after[at_switch.dst, at_switch.chunk] = 0
        np.add.at(after, (add.dst, add.chunk), counts[add.src, add.chunk])
        counts = after
        yield counts
