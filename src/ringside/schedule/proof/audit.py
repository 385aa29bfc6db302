"""What `verify` says about a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from ringside.schedule.collective import Collective
from ringside.schedule.traffic import Traffic

Kind = Literal["missing", "double", "undefined", "order", "deadlock", "malformed"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a schedule.

    Args:
        kind: `missing`: a result lacks a contribution. `double`: a contribution is in it more than once. `undefined`:
            it contains what a vertex had in that place before anything meaningful came there. `order`: ranks add in
            different orders, or two writes into one chunk are unordered. `deadlock`: ranks wait for each other for
            ever. `malformed`: a transfer that cannot be.
        message: What is wrong, naming rank, chunk and round; rounds count from 1 in it, as in drawings.
        rank: Where it goes wrong: the rank that holds, makes or waits for the wrong value.
        chunk: The chunk it is about.
        round: The round in which it happens, from 0; None: that rank's chunk is never written at all.
    """

    kind: Kind
    message: str
    rank: int
    chunk: int
    round: int | None


class Proof(NamedTuple):
    """What a prover has found out about a schedule: the part of an audit that is not the schedule's own.

    Args:
        problems: As of an audit.
        canonical: Whether results are canonical if there are no problems.
        traffic: As of an audit.
        expression: Says how the final value of a chunk is computed on a rank: `expression(chunk, rank)`.
    """

    problems: list[Problem]
    canonical: bool
    traffic: Traffic
    expression: Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Audit:
    """The proof of a schedule, or what is wrong with it, and its costs beside the lower bounds.

    Bytes are fractions of the tensor's size, rounds are counts. The bounds hold for ranks with one port and without a
    switch that computes; an algorithm that uses more ports or a switch may beat them (`beats_bounds`).

    Args:
        name: The schedule's name.
        ranks: Its number of ranks.
        chunks: Its number of chunks.
        rounds: Its number of rounds.
        problems: Everything that is wrong with it; empty when it is proved right.
        buffers: Received but not yet stored messages a rank was allowed to hold.
        switches: Its number of switches.
        collective: What it was proved to be.
        canonical: Whether every result is the left fold in ascending rank order, ((x0+x1)+x2)+...: then it depends
            neither on the algorithm nor on where chunks are cut, which is what a reproducible mode needs.
        by_symmetry: Whether one orbit was looked at instead of all ranks and chunks.
        traffic: What it sends, per vertex and per link.
    """

    name: str
    ranks: int
    chunks: int
    rounds: int
    problems: tuple[Problem, ...]
    buffers: int
    switches: int
    collective: Collective
    canonical: bool
    by_symmetry: bool
    traffic: Traffic = field(repr=False, compare=False)
    _expression: Callable[[int, int], str] = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the schedule is proved right."""
        return not self.problems

    @property
    def max_bytes_sent(self) -> Fraction:
        """What the busiest rank sends."""
        return self.traffic.max_bytes_sent

    @property
    def max_bytes_received(self) -> Fraction:
        """What the busiest rank receives."""
        return self.traffic.max_bytes_received

    @property
    def max_ports(self) -> int:
        """The most distinct peers one rank sends to, or receives from, in one round."""
        return self.traffic.ports

    @property
    def busiest_link(self) -> tuple[int, int] | None:
        """The (src, dst) over which most travels; None when nothing is sent."""
        return self.traffic.busiest_link

    @property
    def lower_bound_rounds(self) -> int:
        """⌈log2 n⌉: with one port, the ranks that can know a value at most double in a round."""
        return (len(self.collective.members(self.ranks)) - 1).bit_length()

    @property
    def lower_bound_bytes(self) -> Fraction:
        """The least the busiest rank sends or receives; 2(n-1)/n for all-reduce (Patarasuk & Yuan 2009, theorem 1)."""
        return self.collective.lower_bound_bytes(self.ranks)

    @property
    def beats_bounds(self) -> str:
        """Say by what means the schedule stays below a lower bound; empty when it does not."""
        fewer_rounds = self.rounds < self.lower_bound_rounds
        fewer_bytes = max(self.max_bytes_sent, self.max_bytes_received) < self.lower_bound_bytes
        if not (fewer_rounds or fewer_bytes):
            return ""
        return "a switch that reduces" if self.switches else f"{self.max_ports} ports"

    def expression(self, chunk: int, rank: int = 0) -> str:
        """Return how the final value of a chunk is computed, such as `((x0+x1)+x2)`; xr is rank r's contribution.

        If the schedule is proved right this is the same on every rank that wants the chunk, but for the order of two
        operands. `?r` is an undefined value.
        """
        return self._expression(chunk, rank)
