"""What a run measured moves what is expected of the same hardware: all of its ways, alike.

One size tells how much slower everything is than its law says, not whether latency or wire is to blame: first the
whole law takes that pace, then what several sizes tell moves its figures (`calibrate.fit`). What was seen counts more
than a law that was not made for the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringside.predict.laws.calibrate import fit
from ringside.predict.laws.curve import PipelineLaw
from ringside.predict.laws.fabric import Law
from ringside.predict.laws.transfer import transfer
from ringside.predict.plan.options import Option

OPEN = 1.0  # standard deviation of a figure's logarithm beside a law that was not made for the hardware


def with_measured(one: Option, points: Sequence[tuple[float, float]]) -> Option:
    """Return an option that was measured on the very hardware: what was seen there counts more than the law.

    Args:
        one: The option.
        points: Sizes in bytes and what they took, seconds; none: it stays as it is.
    """
    if not points:
        return one
    sizes, times = zip(*points, strict=True)
    pace = math.exp(float(np.mean(np.log(times) - np.log(one.predict(sizes).times_s))))
    law = paced(one.law, pace)
    law = replace(
        law, spread=np.maximum(law.spread, OPEN), noise=1.0
    )  # a run's figure is a median: little noise is left
    return replace(one, law=law, measured=fit(sizes, times, law), pace=pace)


def moved(one: Option, seen: Option | None) -> Option:
    """Return a way with what another was measured to have beside its law: all on one hardware are moved alike.

    Args:
        one: The way.
        seen: The one of `with_measured`; of its law only the pace is known to `one` if theirs have other figures.
    """
    if seen is None or seen.measured is None:
        return one
    law = paced(one.law, seen.pace)
    return replace(one, law=transfer([seen.measured], law) if len(seen.law.mean) == len(law.mean) else law)


def paced(law: Law, pace: float) -> Law:
    """Return a law of which everything, latency and wire, takes `pace` times as long: one size tells no more."""
    return _shifted(law, math.log(pace), math.log(pace))


def tilted(one: Option, share: float) -> Option:
    """Return a way whose latency takes longer and whose wires less, by `share` of what either is not known.

    Args:
        one: The way.
        share: In standard deviations; below 0: the other way round.
    """
    first, last = float(one.law.spread[0]), float(one.law.spread[-1])
    return replace(one, law=_shifted(one.law, share * first, -share * last), measured=None)


def _shifted(law: Law, latency: float, wire: float) -> Law:
    """Return a law with so much more latency and time on wires, in logarithms."""
    mean = law.mean.copy()
    mean[0] += latency
    mean[-1] += -wire if isinstance(law.backbone, PipelineLaw) else wire  # a pipeline's last figure is a rate
    return replace(law, mean=mean)
