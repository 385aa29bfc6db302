"""The predictor's answers as pages: a plan, the answer of a what-if, and scores of predictions beside measurements.

Each is one file that needs no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringside.monitor.stats import Floats
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.advice import WORTH_IT
from ringside.predict.plan.memory import STAGE_WORDS
from ringside.predict.plan.options import LIBRARY, has_library, option
from ringside.predict.plan.plan import SIZES, TrainingPlan, busbw, priced
from ringside.predict.score import Score, line_flags, summary
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.tables.table import bus_factor
from ringside.predict.what_if import Answer, StepChange, work
from ringside.text import digits, duration, giga, percent, signed_percent, size
from ringside.view.html.charts import Axis, Curve, curves
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import footer, render_page, table, tiles, verdict_section
from ringside.view.html.simulation import gantt
from ringside.view.predict_text import (
    BASELINE_NAMES,
    OPTIMISTIC,
    PARTS,
    SWITCHES,
    Rates,
    about,
    absolute,
    band_parts,
    band_text,
    bound_text,
    change_text,
    costs_per_day,
    difference_text,
    fit_text,
    hardware,
    help_text,
    parameter_count,
    part_text,
    played_algorithm,
    step_text,
    worth_text,
)
from ringside.view.verdict_text import as_sentence

# -------------------------------------------------------------------------------------------------
# A plan: the verdict, its figures, and the curves over sizes, hosts and buckets.

MOST_CURVES = 6
DENSE = np.geomspace(min(SIZES), max(SIZES), 43)
PLAN_NOTE = (
    "Bands hold 95% of what published clusters show about the same law or schedule. * extrapolated: no published "
    "table supports it. busbw is what nccl-tests calls so: 2(n−1)/n of the tensor by the time; it is no wire's speed."
)


def plan_page(plan: TrainingPlan) -> str:
    """Return the page of a plan."""
    topology, chosen, fit, batch = plan.question.topology, plan.priced, plan.fit, plan.batch
    subject = size(plan.question.size_bytes)
    reduced = f"{subject} among {topology.ranks} ranks: {about(chosen.seconds)}"
    headline = reduced if plan.step is None else f"a step takes {about(plan.step.seconds)}"
    # How long, how many hosts are worth it, whether it fits, what bounds it, what would help: as in the terminal.
    sharded = plan.sharded
    lines = [
        ("Step", step_text(plan.step) if plan.step else ""),
        ("All-reduce", reduced if plan.step else ""),
        ("Worth it", worth_text(plan.worth) if plan.worth else ""),
        ("Memory", fit_text(fit) if fit else ""),
        ("Instead", f"{STAGE_WORDS[sharded.stage]}: {band_text(sharded.total)} a step" if sharded else ""),
        ("Why", "; ".join(map(bound_text, plan.bounds[:2]))),
        ("Would help most", "; ".join(map(help_text, plan.helps[:3]))),
        ("How", f"{chosen.algorithm}, {hardware(topology)}"),
        ("Extrapolated", chosen.extrapolated),
    ]
    rate, rates = band_parts(plan.busbw, giga)
    figures = [
        ("bus bandwidth", f"{rate} GB/s", rates),
        ("sent per rank", size(plan.wires.per_rank_bytes), f"{size(plan.wires.total_bytes)} in total"),
    ]
    if plan.buckets:
        best = plan.buckets[0]
        exposed, ends = band_parts(best.exposed)
        figures.append(("exposed at best", exposed, f"{ends}; {best.count} buckets of {size(best.bucket_bytes)}"))
    figures.append(("learning rate", f"× {digits(batch.linear)}", f"SGD; Adam × {digits(batch.square_root)}"))
    priced_rows = [
        (f"{row.algorithm}{'*' * bool(row.extrapolated)}", *band_parts(row.seconds), row.basis) for row in plan.here
    ]
    # Why the first row may not be the answer.
    aside = {row.basis == LIBRARY for row in plan.here if row.algorithm not in plan.contenders}
    caveats = [words for words, of_library in ((SWITCHES, True), (OPTIMISTIC, False)) if of_library in aside]
    sections = [
        *_worth_curve(plan),
        *_curves_over_sizes(plan),
        *_curves_over_hosts_and_buckets(plan),
        table(
            f"Every algorithm at {subject} (* extrapolated)",
            ("algorithm", "time", "band", "basis"),
            priced_rows,
            " ".join(caveats),
        ),
    ]
    if fit is not None:
        parameters = f"{parameter_count(fit.parameters)} parameters"
        figures.append(("memory of a rank", size(fit.states[0].total_bytes), parameters))
        memory = [
            (
                STAGE_WORDS[state.stage],
                *map(size, (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes, state.total_bytes)),
            )
            for state in fit.states
        ]
        sections.append(table("Memory of a rank", ("", "weights", "gradients", "optimizer", "together"), memory))
    kind = "bad" if fit and fit.refused and not sharded else "open"
    verdict = verdict_section("all-reduce, predicted", headline, lines, kind=kind)
    where = f"{topology.hosts} host{'s' * (topology.hosts > 1)} · {topology.ranks} ranks"
    sections = [verdict, tiles(figures), *sections, footer(PLAN_NOTE)]
    return render_page(headline, f"predict · {topology.name}", where, sections, scripts=("report.js",))


def _worth_curve(plan: TrainingPlan) -> Iterator[Markup]:
    """Yield how fast it trains by hosts, in units of the fewest, and in the note where the knee is."""
    if plan.worth is None:
        return
    scales = plan.worth.scales
    first, hosts = scales[0], np.array([float(scale.hosts) for scale in scales])
    paces = [
        scale.seconds.falling(lambda s, scale=scale: scale.ranks / first.ranks * first.seconds.value / s)  # type: ignore[misc]
        for scale in scales
    ]
    line = _band_curve(0, "samples per second", hosts, paces, True)
    whole = Axis(lambda value: f"{value:.0f}", marks=tuple(hosts.tolist()))
    note = f"Same work per rank. Worth it: {worth_text(plan.worth)}. The knee: the last host count to which every "
    note += f"doubling trains at least {WORTH_IT} times as fast."
    yield curves("worth", "How many times as fast it trains, by hosts", [line], whole, Axis(digits), note)


def _curves_over_sizes(plan: TrainingPlan) -> list[Markup]:
    topology, chosen = plan.question.topology, plan.priced.algorithm
    names = [row.algorithm for row in plan.here if row.algorithm in plan.contenders][:MOST_CURVES]
    # The chosen one is drawn last, on top of the others.
    names = [*(name for name in names[::-1] if name != chosen), *([chosen] if chosen in names else [])]
    # A law is priced anywhere at no cost; a schedule only where it was for the ranking.
    is_law = has_library(topology)
    sizes = DENSE if is_law else np.array(list(plan.ranking))
    times, rates = [], []
    for index, name in enumerate(names):
        if is_law:
            row = priced(option(topology, name), sizes.tolist())
        else:
            row = [next(price for price in prices if price.algorithm == name) for prices in plan.ranking.values()]
        seconds = [price.seconds for price in row]
        speeds = [busbw(nbytes, topology.ranks, band) for nbytes, band in zip(sizes.tolist(), seconds, strict=True)]
        times.append(_band_curve(index, name, sizes, seconds, name == chosen))
        rates.append(_band_curve(index, name, sizes, speeds, name == chosen))
    return [
        curves("time", "Time by size", times, Axis(size), Axis(duration), "Both axes are logarithmic."),
        curves("busbw", "Bus bandwidth by size, GB/s", rates, Axis(size), Axis(giga, log=False, low=0.0)),
    ]


def _curves_over_hosts_and_buckets(plan: TrainingPlan) -> Iterator[Markup]:
    known = [(scale.hosts, scale.efficiency) for scale in plan.scaling if scale.efficiency is not None]
    if len(known) > 1:
        hosts = np.array([float(hosts) for hosts, _ in known])
        efficiencies = [efficiency for _, efficiency in known]
        line = _band_curve(0, "computation by computation and what is exposed", hosts, efficiencies, True)
        share = Axis(lambda value: percent(value, 1), log=False, low=1.0)
        whole = Axis(lambda value: f"{value:.0f}", marks=tuple(hosts.tolist()))
        yield curves("hosts", "Efficiency of a step by hosts", [line], whole, share)
    if len(plan.buckets) > 1:
        ordered = sorted(plan.buckets, key=lambda buckets: buckets.bucket_bytes)
        sizes = np.array([buckets.bucket_bytes for buckets in ordered])
        line = _band_curve(0, "exposed", sizes, [buckets.exposed for buckets in ordered], True)
        best = plan.buckets[0]
        note = f"Best over the whole band: {best.count} of {size(best.bucket_bytes)}, {band_text(best.exposed)}."
        title = "Left exposed after backward, by bucket size"
        yield curves("buckets", title, [line], Axis(size), Axis(duration), note)


def _band_curve(index: int, name: str, x: np.ndarray, bands: Sequence[Band], chosen: bool) -> Curve:
    """A line of its own colour; the chosen one has its band around it."""
    value, low, high = (np.array(ends) for ends in zip(*(band.ends for band in bands), strict=True))
    ends = (low, high) if chosen else (None, None)
    return Curve(name, x, value, "s0" if chosen else f"s{1 + index}", *ends)


# -------------------------------------------------------------------------------------------------
# The answer of a what-if: the difference, what it costs, and both steps drawn on the same time axis.

WHAT_IF_NOTE = (
    "Own work waits for the slowest rank. The pictures show one bucket's all-reduce from when the first rank has come "
    "until the last is done, each rank as late as its own work is longer. A GPU library's algorithm is drawn as the "
    "schedule that is like it; what it costs follows the library's law. What is played is exact for the topology's "
    "figures and has no band; what a step takes has one."
)
TOO_SHORT = 12  # times shorter than the other picture: it would be a line
Pair = tuple[Timeline | None, Timeline | None]


def what_if_page(answer: Answer, change: StepChange, played: Pair, rates: Rates) -> str:
    """Return the page of an answer.

    Args:
        answer: The answer.
        change: What was asked.
        played: The synchronisation before and after, where it could be played.
        rates: What a rank costs.
    """
    headline = difference_text(answer)
    changed, ranks = change_text(change), answer.before.topology.ranks
    before, after = answer.step_s
    # What a step of two digits would not show is neither good nor bad.
    longer = answer.delta.value if abs(after - before) > 1e-3 * before else 0.0
    kind = "bad" if longer > 0 else "well" if longer < 0 else "open"
    steps = " → ".join(map(band_text, answer.steps)) + (f", {signed_percent(after / before - 1)}" if before else "")
    then = played[1]
    lines = [
        ("Step", steps),
        ("Bottleneck", "; ".join(map(str, then.blamed[:PARTS])) if then is not None else ""),
        ("Where", hardware(answer.before.topology)),
        *(("Extrapolated", why) for why in answer.extrapolated),
        *(("Not seen", what) for what in answer.unseen),
    ]

    figures: list[tuple[str, str, str]] = []
    hours = answer.rank_hours_per_day
    if hours is not None:
        word = "saved" if hours.value < 0 else "lost"
        value, ends = band_parts(absolute(hours), digits)
        figures.append((f"rank-hours {word} per day", value, f"{ends}, of {24 * answer.after.topology.ranks}"))
        for what, cost, unit, rate in costs_per_day(absolute(hours), rates):
            value, ends = band_parts(cost, unit)
            figures.append((what, value, f"{ends}; {rate}"))
        figures.append(("own work", *_before_and_after(work(answer.before), work(answer.after))))
    figures.append(("exposed communication", *_before_and_after(*(left.seconds for left in answer.left))))
    bucket_before, bucket_after = (left.bucket for left in answer.left)
    if bucket_before is not None and bucket_after is not None:
        figures.append(("one bucket", *_before_and_after(bucket_before, bucket_after)))

    pictures = []
    longest = max((timeline.seconds for timeline in played if timeline is not None), default=0.0)
    for timeline, title in zip(played, ("Before", "After"), strict=True):
        if timeline is not None:
            alike = timeline.seconds * TOO_SHORT > longest
            who = f"{played_algorithm(timeline)} among {timeline.schedule.ranks} ranks"
            note = f"Bottleneck: {timeline.guilty}." + ("" if alike else " On a time axis of its own.")
            caption = f"{title}: {duration(timeline.seconds)}, {who}"
            pictures.append(gantt(timeline, caption, longest if alike else None, note))
    parts = [timeline.shares if timeline is not None else {} for timeline in played]
    names = sorted({*parts[0], *parts[1]}, key=lambda name: -parts[1].get(name, 0.0))
    if names:
        rows = [(part_text(name), *(duration(part.get(name, 0.0)) for part in parts)) for name in names]
        pictures.append(table("What the critical path consists of", ("", "before", "after"), rows))
    verdict = verdict_section(f"what if {changed}", as_sentence(headline), lines, kind=kind)
    sections = [verdict, tiles(figures), *pictures, footer(WHAT_IF_NOTE)]
    return render_page(f"What if {changed}", "what if", f"{ranks} ranks", sections, scripts=("report.js",))


def _before_and_after(before: Band, after: Band) -> tuple[str, str]:
    """Return the value of a tile, and its band and what was before."""
    value, ends = band_parts(after)
    was, its_ends = band_parts(before)
    return value, ends if before == after else f"{ends}; before: {was}, {its_ends}"


# -------------------------------------------------------------------------------------------------
# Scores: what was measured beside what was predicted, in time and bandwidth, and by how much it is off.

MOST_TABLES = 24
MODES = {
    "hold-out": "rows 0, 2, 4, ... fitted, 1, 3, 5, ... scored",
    "larger sizes": "small sizes fitted, larger ones scored",
    "other scale": "another scale of the cluster fitted",
    "preset": "nothing fitted",
}
SCORE_NOTE = (
    "Dots are rows that had no part in the fit; rows that failed the checks are not shown. The band is to hold 95% of "
    "them. Off by: measured over predicted, less one; what lies above 0 took longer than predicted."
)


def score_page(scores: Sequence[Score]) -> str:
    """Return the page of scores. Of more than 24 tables the first have curves."""
    total = summary(scores)
    scored = [(score, score.errors) for score in scores if score.errors is not None]
    headline = "No table could be scored."
    if total.mape is not None:
        headline = f"{percent(total.mape, 1)} off"
        headline += f", the median of {len(scored)} tables" if len(scored) > 1 else ""
    mode = next((MODES.get(score.mode, score.mode) for score, _ in scored), "")
    baselines = [f"{BASELINE_NAMES[name]} {percent(value, 1)}" for name, value in total.baselines.items() if value]
    lines = [
        ("How", mode),
        ("Band", f"holds {percent(total.band_coverage, 1)} of {total.rows} rows; it is to hold 95%"),
        ("Baselines", ", ".join(baselines)),
    ]
    figures = [
        ("mean error", percent(total.mape, 1), "median over tables"),
        ("from 1 MiB up", percent(total.mape_large, 1), "median over tables"),
        ("bias", signed_percent(total.bias), "below 0: predicted too fast"),
        ("rows not used", str(sum(len(line_flags(score.table)) for score in scores)), "they fail the checks"),
    ]
    overview = [
        (
            score.table.name,
            str(score.table.ranks or "?"),
            str(len(score.scored)),
            *(percent(share, 1) for share in (errors.mape, errors.mape_large, score.band_coverage)),
            size(errors.worst_size_bytes),
        )
        for score, errors in scored
    ]
    columns = ("table", "ranks", "rows scored", "off", "from 1 MiB", "in band", "worst at")
    unused = [(score.table.name, score.refused) for score in scores if score.refused]
    unused += [
        (f"{score.table.name}, line {flag.line}", flag.reason) for score in scores for flag in line_flags(score.table)
    ]
    sections = [
        verdict_section("predictions against measurements", headline, lines),
        tiles(figures),
        table("Every table", columns, overview) if overview else NOTHING,
        *(_table_curves(score, index) for index, (score, _) in enumerate(scored[:MOST_TABLES])),
        table("Not used", ("what", "why"), unused) if unused else NOTHING,
        footer(SCORE_NOTE),
    ]
    return render_page("Predictions against measurements", "predict score", mode, sections, scripts=("report.js",))


def _table_curves(score: Score, index: int) -> Markup:
    """Return time, bandwidth and error of one table over its sizes; `index` keeps the figures' ids apart."""
    prediction, table = score.prediction, score.table
    if prediction is None or not len(score.scored):
        return NOTHING
    measured = np.array([row.time_s for row in score.scored])
    factor = bus_factor(table.collective, table.ranks) if table.ranks > 1 else 1.0
    noun = "bus bandwidth" if table.ranks > 1 else "bandwidth"
    sizes, low, high = prediction.sizes, prediction.low_s, prediction.high_s
    moved = factor * sizes
    times = _beside_measured(sizes, prediction.times_s, low, high, measured)
    # The shortest time is the highest rate.
    rates = _beside_measured(sizes, moved / prediction.times_s, moved / high, moved / low, moved / measured)
    error = np.stack([low, high, measured]) / prediction.times_s - 1
    errors = _beside_measured(sizes, np.zeros_like(sizes), *error)
    rate_axis = Axis(giga, log=False, low=0.0)
    error_axis = Axis(lambda value: percent(value, 1), log=False, low=0.0)
    return fill(
        '<div class="pair">{}{}</div>{}',
        curves(f"time-{index}", f"{table.name}: time", times, Axis(size), Axis(duration), score.words),
        curves(f"rate-{index}", f"{table.name}: {noun}, GB/s", rates, Axis(size), rate_axis),
        curves(f"off-{index}", f"{table.name}: off by", errors, Axis(size), error_axis),
    )


def _beside_measured(sizes: Floats, predicted: Floats, low: Floats, high: Floats, measured: Floats) -> list[Curve]:
    """A line with its band, and dots."""
    line = Curve("predicted, 95% band", sizes, predicted, "s0", low, high)
    return [line, Curve("measured", sizes, measured, "culprit", dots=True)]
