"""What a run measured moves what is expected of the same hardware: all of its ways, alike.

One size shows how much slower everything is than its law predicts, not whether latency or wire is to blame: first the
whole law takes that pace, then what several sizes show moves its figures (`calibrate.fit`). What was seen counts more
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


def with_measured(option: Option, points: Sequence[tuple[float, float]]) -> Option:
    """Return an option that was measured on the very hardware: what was seen there counts more than the law.

    Args:
        option: What was run.
        points: Sizes in bytes and what they took, seconds; none: it stays as it is.
    """
    if not points:
        return option
    sizes, times = zip(*points, strict=True)
    pace = math.exp(float(np.mean(np.log(times) - np.log(option.predict(sizes).times_s))))
    law = paced(option.law, pace)
    # A run's figure is a median: little noise is left.
    law = replace(law, spread=np.maximum(law.spread, OPEN), noise=1.0)
    return replace(option, law=law, measured=fit(sizes, times, law), pace=pace)


def moved(option: Option, seen: Option | None) -> Option:
    """Return an option with what another was measured to have beside its law: all on one hardware are moved alike.

    Args:
        option: What was not run.
        seen: What `with_measured` returned; only its pace is taken over where the two laws have other figures.
    """
    if seen is None or seen.measured is None:
        return option
    law = paced(option.law, seen.pace)
    return replace(option, law=transfer([seen.measured], law) if len(seen.law.mean) == len(law.mean) else law)


def paced(law: Law, pace: float) -> Law:
    """Return a law of which everything, latency and wire, takes `pace` times as long: one size shows no more."""
    return _shifted(law, math.log(pace), math.log(pace))


def tilted(option: Option, share: float) -> Option:
    """Return an option whose latency takes longer and whose wires less, by `share` of what either is not known.

    Args:
        option: What is run.
        share: In standard deviations; below 0: the other way round.
    """
    first, last = float(option.law.spread[0]), float(option.law.spread[-1])
    return replace(option, law=_shifted(option.law, share * first, -share * last), measured=None)


def _shifted(law: Law, latency: float, wire: float) -> Law:
    """Return a law with so much more latency and time on wires, in logarithms."""
    mean = law.mean.copy()
    mean[0] += latency
    mean[-1] += -wire if isinstance(law.backbone, PipelineLaw) else wire  # a pipeline's last figure is a rate
    return replace(law, mean=mean)
