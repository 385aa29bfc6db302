"""A plan as a page: the verdict, its figures, and the curves over sizes, hosts and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringside.predict.band import Band
from ringside.predict.plan.buckets import BucketSizes
from ringside.predict.plan.memory import STAGE_WORDS
from ringside.predict.plan.options import has_library, option
from ringside.predict.plan.plan import Scale, TrainingPlan, busbw
from ringside.predict.plan.ranking import SIZES, Priced, priced
from ringside.text import digits, duration, size
from ringside.view.html.curves import Axis, Curve, curves
from ringside.view.html.page import footer, page, table, tiles, verdict
from ringside.view.plan_text import band, bound_words, count, hardware
from ringside.view.schedule.svg import asset

MOST_CURVES = 6
DENSE = np.geomspace(min(SIZES), max(SIZES), 43)

NOTE = (
    "Bands hold 95 % of what published clusters show about the same law or schedule. * extrapolated: no published "
    "table supports it. busbw is what nccl-tests calls so: 2(n−1)/n of the tensor by the time; it is no wire's speed."
)


def plan_page(plan: TrainingPlan) -> str:
    """Return the page; one file that needs no other."""
    asked, took = plan.question, plan.priced
    headline = f"{size(asked.size_bytes)} among {asked.topology.ranks} ranks: {duration(took.seconds.value)}"
    body = [
        verdict("all-reduce, predicted", headline, _lines(plan), "bad" if plan.fit and plan.fit.refused else "open"),
        tiles(_tiles(plan)),
        *_over_sizes(plan),
        *_over_hosts(plan.scaling),
        *_over_buckets(plan),
        _ranked(plan),
        _memory(plan),
        footer(NOTE),
    ]
    where = f"{asked.topology.hosts} host{'s' * (asked.topology.hosts > 1)} · {asked.topology.ranks} ranks"
    return page(headline, f"predict · {asked.topology.name}", body, meta=where, js=asset("report.js"))


def _lines(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    took, fit = plan.priced, plan.fit
    if fit is not None and fit.refused:
        each = fit.states[0].total_bytes
        yield "Refused", f"in plain data parallel a rank needs {size(each)}, more than its {size(fit.memory_bytes)}"
    if plan.sharded is not None:
        yield "Instead", f"{STAGE_WORDS[plan.sharded.stage]}: {band(plan.sharded.total)} a step"
    yield "Band", f"{duration(took.seconds.low)} to {duration(took.seconds.high)}, 95 %"
    yield "How", f"{took.algorithm}, {hardware(plan.question.topology)}"
    if plan.bounds:
        yield "Bound by", bound_words(plan.bounds[0])
    yield "Extrapolated", took.extrapolated


def _tiles(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    yield "bus bandwidth", f"{_giga(plan.busbw.value)} GB/s", f"{_giga(plan.busbw.low)} to {_giga(plan.busbw.high)}"
    yield "each rank sends", size(plan.wires.per_rank_bytes), f"all ranks {size(plan.wires.total_bytes)}"
    if plan.buckets:
        best = plan.buckets[0]
        ends, what = map(duration, best.exposed.ends[1:]), f"{best.count} buckets of {size(best.bucket_bytes)}"
        yield "exposed at best", duration(best.exposed.value), f"{' to '.join(ends)}; {what}"
    yield "learning rate", f"x {digits(plan.batch.linear)}", f"SGD; Adam x {digits(plan.batch.square_root)}"
    if plan.fit is not None:
        yield "memory of a rank", size(plan.fit.states[0].total_bytes), f"{count(plan.fit.parameters)} parameters"


# ------------------------------------------------------------------------------------------------ curves


def _over_sizes(plan: TrainingPlan) -> Iterator[str]:
    ranks, chosen = plan.question.topology.ranks, plan.priced.algorithm
    shown = [one.algorithm for one in plan.here if one.algorithm in plan.contenders][:MOST_CURVES]
    shown = [*(name for name in shown[::-1] if name != chosen), *([chosen] if chosen in shown else [])]
    found, sizes = {name: _priced(plan, name) for name in shown}, _sizes(plan)
    times = [
        _curve(i, name, sizes, [one.seconds for one in found[name]], name == chosen) for i, name in enumerate(found)
    ]
    rates = [_curve(i, name, sizes, _rates(found[name], sizes, ranks), name == chosen) for i, name in enumerate(found)]
    yield curves("time", "Time by size", times, Axis(size), Axis(duration), "Both axes are logarithmic.")
    yield curves("busbw", "Bus bandwidth by size, GB/s", rates, Axis(size), Axis(_giga, log=False, low=0.0))


def _rates(row: Sequence[Priced], sizes: np.ndarray, ranks: int) -> list[Band]:
    return [busbw(size_bytes, ranks, one.seconds) for size_bytes, one in zip(sizes.tolist(), row, strict=True)]


def _sizes(plan: TrainingPlan) -> np.ndarray:
    return DENSE if has_library(plan.question.topology) else np.array(list(plan.ranking))


def _priced(plan: TrainingPlan, name: str) -> list[Priced]:
    """Return an algorithm's price at every size; a law costs nothing, a schedule was priced for the ranking."""
    topology = plan.question.topology
    if has_library(topology):
        return priced(option(topology, name), DENSE.tolist())
    return [next(one for one in row if one.algorithm == name) for row in plan.ranking.values()]


def _curve(at: int, name: str, x: np.ndarray, bands: Sequence[Band], chosen: bool) -> Curve:
    value, low, high = (np.array(ends) for ends in zip(*(one.ends for one in bands), strict=True))
    ends = (low, high) if chosen else (None, None)
    return Curve(name, x, value, "s0" if chosen else f"s{1 + at % 7}", *ends)


def _over_hosts(scaling: Sequence[Scale]) -> Iterator[str]:
    told = [(one.hosts, one.efficiency) for one in scaling if one.efficiency is not None]
    if len(told) > 1:
        x, bands = np.array([float(hosts) for hosts, _ in told]), [one for _, one in told]
        line = _curve(0, "computation by computation and what is exposed", x, bands, True)
        share = Axis(_share, log=False, low=1.0)
        yield curves("hosts", "Efficiency of a step by hosts", [line], Axis(_whole, marks=tuple(x.tolist())), share)


def _over_buckets(plan: TrainingPlan) -> Iterator[str]:
    ordered: list[BucketSizes] = sorted(plan.buckets, key=lambda one: one.bucket_bytes)
    if len(ordered) > 1:
        x = np.array([one.bucket_bytes for one in ordered])
        line = _curve(0, "exposed", x, [one.exposed for one in ordered], True)
        best = plan.buckets[0]
        said = f"Best over the whole band: {best.count} of {size(best.bucket_bytes)}, {band(best.exposed)}."
        yield curves("buckets", "Left exposed after backward, by bucket size", [line], Axis(size), Axis(duration), said)


# ------------------------------------------------------------------------------------------------ tables


def _ranked(plan: TrainingPlan) -> str:
    rows = [
        (f"{one.algorithm}{'*' * bool(one.extrapolated)}", *map(duration, one.seconds.ends), one.basis)
        for one in plan.here
    ]
    said = "By their schedules alone messages cost nothing beside links: on GPUs that flatters them."
    title = f"Every algorithm at {size(plan.question.size_bytes)} (* extrapolated)"
    return table(title, ("algorithm", "time", "from", "to", "priced by"), rows, said)


def _memory(plan: TrainingPlan) -> str:
    if plan.fit is None:
        return ""
    rows = [
        (
            STAGE_WORDS[one.stage],
            *map(size, (one.weights_bytes, one.gradients_bytes, one.optimizer_bytes, one.total_bytes)),
        )
        for one in plan.fit.states
    ]
    return table("Memory of a rank", ("", "weights", "gradients", "optimizer", "together"), rows)


def _giga(value: float) -> str:
    return digits(value / 1e9)


def _share(value: float) -> str:
    return f"{digits(100 * value)} %"


def _whole(value: float) -> str:
    return f"{value:.0f}"
