"""How sure a simulation is: the band of clusters that are like its topology."""

from __future__ import annotations

from ringside.predict.band import Band
from ringside.predict.laws.calibrate import expect
from ringside.predict.laws.schedule_curve import Scheduled
from ringside.predict.plan.options import schedule_law
from ringside.predict.simulation.timeline import Timeline
from ringside.text import duration

UNSEEN = "no published table is of a schedule"


def simulated_band(timeline: Timeline) -> Band:
    """Return what a simulation took, with the band of clusters like its topology, seconds; lateness is as given."""
    if timeline.schedule.rounds == 0:
        return Band(timeline.seconds, timeline.seconds, timeline.seconds)
    law = schedule_law(Scheduled(timeline.schedule, timeline.topology))
    predicted = expect(law).predict([max(timeline.size_bytes, 1.0)])
    middle, low, high = (float(end[0]) for end in (predicted.times_s, predicted.low_s, predicted.high_s))
    return Band(timeline.seconds, timeline.seconds + low - middle, timeline.seconds + high - middle)


def in_words(timeline: Timeline) -> str:
    """Return in a line how sure a simulation is: it is exact for its topology's figures, and those are not."""
    ends = simulated_band(timeline)
    if ends.low == ends.high:
        return "nothing is sent: exact"
    band = f"{duration(ends.value)} ({duration(ends.low)} to {duration(ends.high)})"
    return f"exact for these figures; a cluster like it: {band}, 95 %; extrapolated: {UNSEEN}"
