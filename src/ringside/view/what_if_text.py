"""The answer of a what-if in words: the difference first, its price, then who is guilty, then what supports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringside.predict.laws.calibrate import Band
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.what_if import Answer, StepChange, work
from ringside.text import digits, duration, percent, signed_percent, size
from ringside.view.plan_text import hardware, wrapped

PARTS = 3  # of the critical path that are named


@dataclass(frozen=True)
class Rates:
    """What a rank costs.

    Args:
        price: Of a rank-hour, in any currency; None: not known.
        watts: Of a rank; None: not known.
    """

    price: float | None = None
    watts: float | None = None


def answer_lines(answer: Answer, change: StepChange, played: Timeline | None, rates: Rates) -> list[str]:
    """Return the answer in lines of 80 columns.

    Args:
        answer: The answer.
        change: What was asked.
        played: The changed step's synchronisation, if it could be played.
        rates: What a rank costs.
    """
    lines = [f"what if {change_text(change)}", f"  on {hardware(answer.before.topology)}", *_delta(answer)]
    hours = answer.rank_hours_per_day
    if hours is None:
        lines.append("  a day: say what a step computes, --compute-seconds S")
    else:
        shown, all_hours = absolute(hours), 24 * answer.after.topology.ranks
        outcome = "saved" if hours.value < 0 else "lost"
        lines.append(f"  a day: {with_band(shown, digits)} rank-hours of {all_hours} {outcome}")
        lines += [f"    {text}" for text in prices(shown, rates)]
    lines += [*critical_path_lines(played), *(f"extrapolated: {why}" for why in answer.extrapolated)]
    return [part for line in lines for part in wrapped(line)]


def change_text(change: StepChange) -> str:
    """Return a change in words: `rank 3 were 12 % slower, the network oversubscribed 2:1`."""
    parts = [
        f"rank {rank} were {percent(abs(more), 1)} {'slower' if more >= 0 else 'faster'}"
        for rank, more in change.slower.items()
    ]
    parts += [f"rank {rank} were as fast as the others" for rank in change.repaired]
    parts += [f"link {src} > {dst} were {digits(times)} x slower" for src, dst, times in change.slow_links]
    parts += [f"host {host} had one rail less" for host in change.lost_rails]
    if change.oversubscription is not None:
        parts.append(f"the network were oversubscribed {digits(change.oversubscription)}:1")
    parts += ["switches reduced (SHARP)"] if change.sharp else []
    if change.bucket_bytes is not None:
        parts.append(f"buckets were {size(change.bucket_bytes)}")
    if change.hosts is not None:
        parts.append("there was one host" if change.hosts == 1 else f"there were {change.hosts} hosts")
    parts += [f"the algorithm were {change.algorithm}"] if change.algorithm else []
    return ", ".join(parts) or "nothing changed"


def _delta(answer: Answer) -> Iterator[str]:
    before, after = answer.step_s
    ratio = f", {signed_percent(after / before - 1)}" if answer.knows_work and before > 0 else ""
    yield difference_text(answer) + ratio
    if answer.knows_work:
        yield f"  step {_change(*answer.steps)}"
        yield f"  own work {_change(work(answer.before), work(answer.after))}"
        yield f"  left of synchronisation {_change(*(left.seconds for left in answer.left))}"
    changed, (first, second) = answer.after, (left.bucket for left in answer.left)
    if first is not None and second is not None:
        buckets = f"{changed.buckets} bucket{'s' * (changed.buckets > 1)} of {size(changed.bucket_bytes)}"
        yield f"  {buckets}, each {_change(first, second)}"


def _change(before: Band, after: Band) -> str:
    """Return a figure before and after: `19.5 ms (18.1 ms to 20.8 ms) -> 25.5 ms (22.9 ms to 28.0 ms)`."""
    return with_band(before) if before == after else f"{with_band(before)} -> {with_band(after)}"


def band_ends(band: Band, unit: Callable[[float], str] = duration) -> str:
    """Return the ends of a band: `18.1 ms to 20.8 ms`, or that the figure was given."""
    return "as given" if band.low == band.high else f"{unit(band.low)} to {unit(band.high)}"


def with_band(band: Band, unit: Callable[[float], str] = duration) -> str:
    """Return a figure with its band, or that it has none because it was given or follows from what was."""
    return f"{unit(band.value)} ({band_ends(band, unit)})"


def difference_text(answer: Answer) -> str:
    """Return the difference: `a step takes 30.0 ms longer (28.1 ms to 33.0 ms)`."""
    delta = answer.delta
    subject = "a step takes" if answer.knows_work else "the synchronisation takes"
    more = "less" if delta.value < 0 else "longer"
    if delta.low < 0 < delta.high:
        ends = f"({duration(-delta.low)} less to {duration(delta.high)} longer)"
        return f"{subject} {duration(abs(delta.value))} {more} {ends}"
    return f"{subject} {with_band(absolute(delta)).replace(' (', f' {more} (', 1)}"


def absolute(band: Band) -> Band:
    """Return a difference as what it is more, or what it is less."""
    return Band(-band.value, -band.high, -band.low) if band.value < 0 else band


def prices(hours: Band, rates: Rates) -> Iterator[str]:
    """Yield what rank-hours cost, in money and energy, where rates are known."""
    if rates.price is not None:
        yield f"{with_band(_scale_band(hours, rates.price), digits)} in money, at {digits(rates.price)} a rank-hour"
    if rates.watts is not None:
        yield f"{with_band(_scale_band(hours, rates.watts / 1e3), digits)} kWh, at {digits(rates.watts)} W a rank"


def _scale_band(band: Band, factor: float) -> Band:
    return Band(*(end * factor for end in band.ends))


def critical_path_lines(played: Timeline | None, text: Callable[[float], str] = duration) -> Iterator[str]:
    """Yield who is guilty, and what the critical path consists of."""
    if played is None:
        yield "critical path: too many ranks, or too few, to play it"
        return
    blamed = "; ".join(map(str, played.blamed[:PARTS]))
    yield f"critical path (played as {played_algorithm(played)}, exact for these figures): {blamed}"
    found = sorted(played.shares.items(), key=lambda item: -item[1])[:PARTS]
    yield "  " + ", ".join(f"{name} {text(seconds)} ({percent(seconds / played.seconds)})" for name, seconds in found)


def played_algorithm(played: Timeline) -> str:
    """Return what was played in words."""
    schedule = played.schedule
    return (
        f"{schedule.name} through a switch" if schedule.switches and schedule.name == "hierarchical" else schedule.name
    )
