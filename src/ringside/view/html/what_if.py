"""The answer of a what-if as a page: the difference, what it costs, and both steps drawn on the same time axis."""

from __future__ import annotations

from collections.abc import Iterator

from ringside.predict.laws.calibrate import Band
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.what_if import Answer, StepChange, work
from ringside.text import digits, duration, signed_percent
from ringside.view.html.gantt import gantt
from ringside.view.html.markup import Markup
from ringside.view.html.page import footer, render_page, table, tiles, verdict_section
from ringside.view.plan_text import hardware
from ringside.view.what_if_text import (
    PARTS,
    Rates,
    absolute,
    band_ends,
    change_text,
    difference_text,
    played_algorithm,
    prices,
    with_band,
)

NOTE = (
    "Own work waits for the slowest rank. The pictures show one bucket's all-reduce from when the first rank has come "
    "until the last is done, each rank as late as its own work is longer. A GPU library's algorithm is drawn as the "
    "schedule that is like it; what it costs follows the library's law. What is played is exact for the topology's "
    "figures and has no band; what a step takes has one."
)
TOO_SHORT = 12  # times shorter than the other picture: it would be a line
Pair = tuple[Timeline | None, Timeline | None]


def what_if_page(answer: Answer, change: StepChange, played: Pair, rates: Rates) -> str:
    """Return the page; one file that needs no other.

    Args:
        answer: The answer.
        change: What was asked.
        played: The synchronisation before and after, where it could be played.
        rates: What a rank costs.
    """
    longer = answer.delta.value
    kind = "bad" if longer > 0 else "well" if longer < 0 else "open"
    headline = difference_text(answer)
    before, after = answer.step_s
    steps = " → ".join(map(with_band, answer.steps)) + (f", {signed_percent(after / before - 1)}" if before else "")
    then = played[1]
    lines = [
        ("Step", steps),
        ("Guilty", "; ".join(map(str, then.blamed[:PARTS])) if then is not None else ""),
        ("Where", hardware(answer.before.topology)),
        *(("Extrapolated", why) for why in answer.extrapolated),
    ]
    parts = [timeline.shares if timeline is not None else {} for timeline in played]
    names = sorted({*parts[0], *parts[1]}, key=lambda name: -parts[1].get(name, 0.0))
    rows = [(name, *(duration(part.get(name, 0.0)) for part in parts)) for name in names]
    shares = [table("What the critical path consists of", ("", "before", "after"), rows)] if rows else []
    sections = [
        verdict_section(f"what if {change_text(change)}", headline[:1].upper() + headline[1:] + ".", lines, kind=kind),
        tiles(_figures(answer, rates)),
        *_pictures(played),
        *shares,
        footer(NOTE),
    ]
    ranks = answer.before.topology.ranks
    return render_page(f"What if {change_text(change)}", "what if", f"{ranks} ranks", sections, scripts=("report.js",))


def _figures(answer: Answer, rates: Rates) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of every tile."""
    hours = answer.rank_hours_per_day
    if hours is not None:
        word = "saved" if hours.value < 0 else "lost"
        most = f"of {24 * answer.after.topology.ranks}"
        yield f"rank-hours a day {word}", digits(abs(hours.value)), f"{band_ends(absolute(hours), digits)}, {most}"
        for text in prices(absolute(hours), rates):
            value, _, more = text.partition(" (")
            yield "price a day", value, more.replace(")", ",", 1)
        yield "own work", *_change(work(answer.before), work(answer.after))
    yield "left of synchronisation", *_change(*(left.seconds for left in answer.left))
    before, after = (left.bucket for left in answer.left)
    if before is not None and after is not None:
        yield "one bucket", *_change(before, after)


def _change(before: Band, after: Band) -> tuple[str, str]:
    """Return the value of a tile, and its band and what was before."""
    return duration(after.value), f"{band_ends(after)}; before {duration(before.value)}, {band_ends(before)}"


def _pictures(played: Pair) -> Iterator[Markup]:
    longest = max((timeline.seconds for timeline in played if timeline is not None), default=0.0)
    for timeline, title in zip(played, ("Before", "After"), strict=True):
        if timeline is not None:
            alike = timeline.seconds * TOO_SHORT > longest
            ranks = f"{played_algorithm(timeline)} among {timeline.schedule.ranks} ranks"
            text = f"{title}: {duration(timeline.seconds)}, {ranks}"
            note = f"Guilty: {timeline.guilty}." + ("" if alike else " On a time axis of its own.")
            yield gantt(timeline, text, longest if alike else None, note)
