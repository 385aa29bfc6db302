"""What `verify` says about a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from ringside.schedule.expressions import Expressions, Ids

Kind = Literal["missing", "double", "order", "deadlock", "malformed"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a schedule.

    Args:
        kind: `missing`: a result lacks a contribution. `double`: a contribution is in it more than once. `order`: ranks
            add in different orders, or two writes into one chunk are unordered. `deadlock`: ranks wait for each other
            for ever. `malformed`: a transfer that cannot be.
        message: What is wrong, naming rank, chunk and round.
        rank: Where it goes wrong: the rank that holds, makes or waits for the wrong value.
        chunk: The chunk it is about.
        round: The round in which it happens; None: that rank's chunk is never written at all.
    """

    kind: Kind
    message: str
    rank: int
    chunk: int
    round: int | None


@dataclass(frozen=True, slots=True)
class Audit:
    """The proof of a schedule, or what is wrong with it, and its costs beside the lower bounds.

    Bytes are fractions of the tensor's size, rounds are counts. The bounds hold for ranks with one port and without a
    switch that computes; an algorithm that uses more ports may beat them.

    Args:
        name: The schedule's name.
        ranks: Its number of ranks.
        chunks: Its number of chunks.
        rounds: Its number of rounds.
        problems: Everything that is wrong with it; empty when it is proved right.
        max_bytes_sent: What the busiest sender sends.
        max_bytes_received: What the busiest receiver receives.
        max_ports: The most distinct peers one rank sends to, or receives from, in one round.
        buffers: Received but not yet stored messages a rank was allowed to hold.
    """

    name: str
    ranks: int
    chunks: int
    rounds: int
    problems: tuple[Problem, ...]
    max_bytes_sent: Fraction
    max_bytes_received: Fraction
    max_ports: int
    buffers: int
    _pool: Expressions = field(repr=False, compare=False)
    _final: Ids = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the schedule is proved right."""
        return not self.problems

    @property
    def lower_bound_rounds(self) -> int:
        """⌈log2 n⌉: with one port, the ranks that can know a value at most double in a round."""
        return (self.ranks - 1).bit_length()

    @property
    def lower_bound_bytes(self) -> Fraction:
        """2(n-1)/n of the tensor, sent and received per rank (Patarasuk & Yuan 2009, theorem 1)."""
        return Fraction(2 * (self.ranks - 1), self.ranks)

    def expression(self, chunk: int, rank: int = 0) -> str:
        """Return how the final value of a chunk is computed, such as `((x0+x1)+x2)`; xr is rank r's contribution.

        If the schedule is proved right this is the same on every rank, but for the order of two operands.
        """
        return self._pool.text(int(self._final[rank, chunk]))
