"""How an all-reduce among several hosts is executed, as a value with a name."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ringside.engine.dtypes import DTYPES
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, Schedule, by_name, verify
from ringside.schedule.combine import pipelined, relabel
from ringside.text import did_you_mean

NATIVE = "native"


@dataclass(frozen=True)
class AlgorithmSpec:
    """How: an algorithm, and what it runs over.

    Written as `ring` (over all ranks, host borders ignored), `hosts/ring` (shared memory inside the hosts, the
    algorithm between them, every local rank carrying a slice), `leaders/ring` (one rank per host carries everything),
    with `native` in place of an algorithm for the process group's own collective; `hosts/tree*8` runs in 8 pipelined
    segments, and `hosts/ring@0,2,1,3` puts the hosts (or ranks) in that order.

    Args:
        algorithm: A name of `ringside.schedule.ALGORITHMS`, or `native`.
        over: `ranks`, `hosts` or `leaders`.
        segments: Pipelined segments of the schedule.
        order: The order of ranks or hosts; empty: as they are.
    """

    algorithm: str
    over: str = "ranks"
    segments: int = 1
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        prefix = "" if self.over == "ranks" else f"{self.over}/"
        suffix = f"*{self.segments}" if self.segments > 1 else ""
        order = "@" + ",".join(map(str, self.order)) if self.order else ""
        return f"{prefix}{self.algorithm}{suffix}{order}"

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> AlgorithmSpec:
        """Return the choice written as `text`; `UsageError` lists what exists."""
        # [over/]name[*segments][@order]
        over, slash, rest = text.rpartition("/")
        rest, _, order = rest.partition("@")
        name, star, segments = rest.partition("*")
        known = {*ALGORITHMS, NATIVE}
        places = order.split(",") if order else []
        fine = (not slash or over in ("hosts", "leaders", "ranks")) and name in known
        if not fine or (star and not segments.isdecimal()) or not all(map(str.isdecimal, places)):
            raise UsageError(
                f"there is no algorithm {text!r}{did_you_mean(name, known)}; there are {', '.join(sorted(known))}, "
                "each also as hosts/NAME and leaders/NAME (shared memory inside a host)"
            )
        return AlgorithmSpec(name, over or "ranks", max(int(segments or 1), 1), tuple(map(int, places)))

    def schedule(self, vertices: int) -> Schedule:
        """Return the schedule that runs among `vertices` ranks or hosts."""
        return _schedule(replace(self, over=""), vertices)  # the same one over ranks, hosts or leaders


@functools.lru_cache(maxsize=256)
def _schedule(choice: AlgorithmSpec, vertices: int) -> Schedule:
    schedule = by_name(choice.algorithm, vertices)
    if choice.order:
        if sorted(choice.order) != list(range(vertices)):
            raise UsageError(f"{choice.order} is not an order of {vertices} vertices")
        schedule = relabel(schedule, choice.order)
    return pipelined(schedule, choice.segments) if choice.segments > 1 else schedule


# -------------------------------------------------------------------------------------------------
# Reproducible mode: which algorithms add up every element as ((x0 + x1) + x2) + ..., whatever the layout.
#
# Floating-point addition does not associate, so a result depends on the order of additions: that of a ring depends on
# which chunk an element falls into, hence on the tensor's size and the bucket layout; that of a hierarchical algorithm
# on who shares a host. An algorithm whose every chunk is the left fold in rank order (`Audit.canonical`, the
# expression that `verify` prints) has none of this. All paths inside a host fold that way.

SMALL_BYTES = 16 << 10
_PROVED_RANKS = 16  # that a schedule is canonical is proved for up to so many ranks, the largest that is quick
_HALVES = ("float16", "bfloat16")


def canonical_choice(size_bytes: int, ranks: int) -> AlgorithmSpec:
    """Return how to reduce a tensor of that size reproducibly: one round for small ones, the fewest bytes else."""
    return AlgorithmSpec("one_shot" if size_bytes * (ranks - 1) <= SMALL_BYTES * 8 else "direct")


def refuse_other_orders(choice: AlgorithmSpec, ranks: int, dtype: int, *, is_rounded: bool = False) -> None:
    """Raise `UsageError` unless a choice gives the same bits as every other canonical one.

    Args:
        choice: How an all-reduce shall be executed.
        ranks: Number of ranks.
        dtype: Code of the element type; those of 16 bits must be added up in one go, or partial sums are rounded.
        is_rounded: So are those that travel rounded.
    """
    names = canonical_algorithms(min(ranks, _PROVED_RANKS))
    in_rank_order = choice.over == "ranks" and choice.algorithm in names and choice.order in ((), tuple(range(ranks)))
    if not in_rank_order or ((is_rounded or DTYPES[dtype] in _HALVES) and choice.algorithm == "chain"):
        raise UsageError(
            f"reproducible mode adds in rank order, and {choice} does not: leave algorithm out, or take one of "
            f"{', '.join(names)}"
        )


@functools.lru_cache(maxsize=64)
def canonical_algorithms(ranks: int) -> tuple[str, ...]:
    """Return the algorithms that `verify` proves to add in rank order for that many ranks."""
    schedules = ((name, by_name(name, ranks)) for name in ALGORITHMS)
    return tuple(name for name, made in schedules if not made.switches and verify(made).canonical)
