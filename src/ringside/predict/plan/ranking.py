"""Which algorithm is fastest at which size, and where one overtakes another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.options import IN_NETWORK, LIBRARY, Option

SIZES = tuple(10.0**power for power in range(3, 11))
CERTAIN = 1.96  # standard deviations, for 95 %
HALVINGS = 10  # of the interval between two sizes, in the logarithm


@dataclass(frozen=True)
class Priced:
    """One algorithm at one size.

    Args:
        algorithm: Its name.
        basis: As of `options.Option`.
        seconds: With its band.
        extrapolated: Why; empty where tables support it.
    """

    algorithm: str
    basis: str
    seconds: Band
    extrapolated: str


@dataclass(frozen=True)
class Crossover:
    """A size from which another algorithm is the fastest, by the middle of the bands.

    Args:
        size_bytes: Where.
        before: Fastest below it.
        after: Fastest above it.
        band: Where it may be: more latency moves it up, faster wires do, too.
    """

    size_bytes: float
    before: str
    after: str
    band: Band


def priced(option: Option, sizes: Sequence[float]) -> list[Priced]:
    """Return an option at each of several sizes, bytes, more than 0."""
    bands = option.predict(sizes).bands
    return [
        Priced(option.name, option.basis, band, option.why_extrapolated(size))
        for size, band in zip(sizes, bands, strict=True)
    ]


def ranking(options: Sequence[Option], sizes: Sequence[float] = SIZES) -> dict[float, tuple[Priced, ...]]:
    """Return for every size the algorithms, the fastest first."""
    columns = [priced(option, sizes) for option in options]
    return {
        size: tuple(sorted((column[i] for column in columns), key=lambda row: row.seconds.value))
        for i, size in enumerate(sizes)
    }


def contenders(options: Sequence[Option]) -> list[Option]:
    """Return those among which to look for the fastest: a library's where there is one, else all.

    Schedules on a GPU fabric's figures count no cost per message: next to laws held against tables that flatters them.
    Switches between hosts that reduce are not everybody's.
    """
    library = [option for option in options if option.basis == LIBRARY and option.name != IN_NETWORK]
    return library or list(options)


def crossovers(options: Sequence[Option], sizes: Sequence[float] = SIZES) -> tuple[Crossover, ...]:
    """Return where the fastest changes between the first and the last of `sizes`, ascending."""
    by_name = {option.name: option for option in options}
    order = sorted(sizes)
    table = ranking(options, order)
    found = []
    for low, high in itertools.pairwise(order):
        before, after = table[low][0].algorithm, table[high][0].algorithm
        if before != after:
            first, then = by_name[before], by_name[after]
            for _ in range(HALVINGS):
                middle = math.sqrt(low * high)
                if first.predict([middle]).times_s[0] < then.predict([middle]).times_s[0]:
                    low = middle
                else:
                    high = middle
            size = math.sqrt(low * high)
            # It is latency saved per byte more, and neither of the two figures is sure.
            factor = math.exp(CERTAIN * math.hypot(first.law.spread[0], first.law.spread[-1]))
            found.append(Crossover(size, before, after, Band(size, size / factor, size * factor)))
    return tuple(found)
