"""A plan as a page: the verdict, its figures, and the curves over sizes, hosts and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.buckets import BucketSizes
from ringside.predict.plan.memory import STAGE_WORDS
from ringside.predict.plan.options import has_library, option
from ringside.predict.plan.plan import SIZES, TrainingPlan, busbw, priced
from ringside.text import digits, duration, giga, percent, size
from ringside.view.html.curves import Axis, Curve, curves
from ringside.view.html.markup import Markup
from ringside.view.html.page import footer, render_page, table, tiles, verdict_section
from ringside.view.plan_text import band_text, bound_text, hardware, parameter_count

MOST_CURVES = 6
DENSE = np.geomspace(min(SIZES), max(SIZES), 43)

NOTE = (
    "Bands hold 95 % of what published clusters show about the same law or schedule. * extrapolated: no published "
    "table supports it. busbw is what nccl-tests calls so: 2(n−1)/n of the tensor by the time; it is no wire's speed."
)


def plan_page(plan: TrainingPlan) -> str:
    """Return the page; one file that needs no other."""
    topology, chosen, fit = plan.question.topology, plan.priced, plan.fit
    headline = f"{size(plan.question.size_bytes)} among {topology.ranks} ranks: {duration(chosen.seconds.value)}"
    kind = "bad" if fit and fit.refused else "open"
    sections = [
        verdict_section("all-reduce, predicted", headline, _verdict_lines(plan), kind=kind),
        tiles(_figures(plan)),
        *_curves_over_sizes(plan),
        *_curves_over_hosts_and_buckets(plan),
        table(
            f"Every algorithm at {size(plan.question.size_bytes)} (* extrapolated)",
            ("algorithm", "time", "from", "to", "priced by"),
            [
                (f"{row.algorithm}{'*' * bool(row.extrapolated)}", *map(duration, row.seconds.ends), row.basis)
                for row in plan.here
            ],
            "By their schedules alone messages cost nothing beside links: on GPUs that flatters them.",
        ),
    ]
    if fit is not None:
        memory = [
            (
                STAGE_WORDS[state.stage],
                *map(size, (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes, state.total_bytes)),
            )
            for state in fit.states
        ]
        sections.append(table("Memory of a rank", ("", "weights", "gradients", "optimizer", "together"), memory))
    where = f"{topology.hosts} host{'s' * (topology.hosts > 1)} · {topology.ranks} ranks"
    return render_page(headline, f"predict · {topology.name}", where, [*sections, footer(NOTE)], scripts=("report.js",))


def _verdict_lines(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    chosen, fit = plan.priced, plan.fit
    if fit is not None and fit.refused:
        each = fit.states[0].total_bytes
        yield "Refused", f"in plain data parallel a rank needs {size(each)}, more than its {size(fit.memory_bytes)}"
    if plan.sharded is not None:
        yield "Instead", f"{STAGE_WORDS[plan.sharded.stage]}: {band_text(plan.sharded.total)} a step"
    yield "Band", f"{duration(chosen.seconds.low)} to {duration(chosen.seconds.high)}, 95 %"
    yield "How", f"{chosen.algorithm}, {hardware(plan.question.topology)}"
    if plan.bounds:
        yield "Bound by", bound_text(plan.bounds[0])
    yield "Extrapolated", chosen.extrapolated


def _figures(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of every tile."""
    rate = plan.busbw
    yield "bus bandwidth", f"{giga(rate.value)} GB/s", f"{giga(rate.low)} to {giga(rate.high)}"
    yield "each rank sends", size(plan.wires.per_rank_bytes), f"all ranks {size(plan.wires.total_bytes)}"
    if plan.buckets:
        best = plan.buckets[0]
        low, high = map(duration, best.exposed.ends[1:])
        buckets = f"{best.count} buckets of {size(best.bucket_bytes)}"
        yield "exposed at best", duration(best.exposed.value), f"{low} to {high}; {buckets}"
    yield "learning rate", f"x {digits(plan.batch.linear)}", f"SGD; Adam x {digits(plan.batch.square_root)}"
    if plan.fit is not None:
        yield (
            "memory of a rank",
            size(plan.fit.states[0].total_bytes),
            f"{parameter_count(plan.fit.parameters)} parameters",
        )


# ------------------------------------------------------------------------------------------------ curves


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
        ordered: list[BucketSizes] = sorted(plan.buckets, key=lambda buckets: buckets.bucket_bytes)
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
    return Curve(name, x, value, "s0" if chosen else f"s{1 + index % 7}", *ends)
