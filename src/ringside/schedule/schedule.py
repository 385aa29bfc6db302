"""An all-reduce algorithm as a value: what every rank sends, to whom, in which round.

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

Ranks, chunks and rounds are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError

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

    Raises:
        UsageError: A count is out of range.
    """

    name: str
    ranks: int
    chunks: int
    rounds: int
    generate: Callable[..., Round] = field(repr=False)
    parameters: tuple[Hashable, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for what, least in (("ranks", 1), ("chunks", 1), ("rounds", 0)):
            if getattr(self, what) < least:
                raise UsageError(f"{self.name} needs at least {least} {what}, not {getattr(self, what)}")

    def round(self, k: int) -> Round:
        """Return round `k`, 0 ≤ k < `rounds`; raise `UsageError` for any other k."""
        if not 0 <= k < self.rounds:
            raise UsageError(f"{self.name} of {self.ranks} ranks has rounds 0 to {self.rounds - 1}, not {k}")
        return self.generate(*self.parameters, k)


def from_rounds(name: str, ranks: int, chunks: int, rounds: Iterable[Round]) -> Schedule:
    """Return a schedule that is written out: for algorithms of one's own, and for broken ones in tests."""
    stored = tuple(rounds)
    return Schedule(name, ranks, chunks, len(stored), _stored_round, (stored,))


def _stored_round(rounds: tuple[Round, ...], k: int) -> Round:
    return rounds[k]


def _read_only(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array
