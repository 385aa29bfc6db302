"""A plan in words: the verdict first, in 24 lines of 80 columns; the long tables on demand."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from ringside.predict.band_text import Band
from ringside.predict.plan.bound import Bound
from ringside.predict.plan.buckets import BACKWARD
from ringside.predict.plan.memory import LINEAR, SQUARE_ROOT, STAGE_WORDS, Fit
from ringside.predict.plan.options import LIBRARY
from ringside.predict.plan.plan import Scale, TrainingPlan
from ringside.predict.plan.ranking import Priced
from ringside.predict.topology.topology import Topology
from ringside.text import digits, duration, size

WIDTH = 80
SHORT_RANKS = 3
SHORT_SCALES = 3
PLACES = {"inside": "inside hosts", "between": "between hosts"}


def short_plan(plan: TrainingPlan) -> list[str]:
    """Return a plan in at most 24 lines of 80 columns."""
    lines = [*_verdict(plan), *_bound(plan), *_wires(plan), *_memory(plan), *_buckets(plan), *_batch(plan)]
    lines += [*_here(plan, SHORT_RANKS), *_crossovers(plan), *_scaling(plan, SHORT_SCALES)]
    return [part for line in lines for part in wrapped(line)]


def wrapped(line: str) -> list[str]:
    """Return a line as lines of at most 80 columns."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=True) if len(line) > WIDTH else [line]


def full_plan(plan: TrainingPlan) -> list[str]:
    """Return a plan with all its tables."""
    lines = [*_verdict(plan), *_bound(plan), *_wires(plan), *_memory(plan), *_buckets(plan), *_batch(plan)]
    lines += ["", *_here(plan, len(plan.here)), *_crossovers(plan), "", *_by_size(plan), ""]
    lines += [*_scaling(plan, len(plan.scaling)), *_stages(plan), *_bucket_table(plan)]
    return [*lines, "", "learning rate", f"  linear: {LINEAR}", f"  square root: {SQUARE_ROOT}"]


def band_text(one: Band, unit: Callable[[float], str] = duration) -> str:
    """Return a figure with its band: `5.95 ms (2.53 ms to 14.0 ms)`."""
    return f"{unit(one.value)} ({unit(one.low)} to {unit(one.high)})"


# ------------------------------------------------------------------------------------------------ verdict first


def _verdict(plan: TrainingPlan) -> Iterator[str]:
    topology, fit = plan.question.topology, plan.fit
    if fit is not None and fit.refused:
        yield from _refused(plan, fit)
    if_so = "were it to fit: " if fit is not None and fit.refused else ""
    what = f"{if_so}all-reduce of {size(plan.question.size_bytes)} among {topology.ranks} ranks"
    yield f"{what}: {band(plan.priced.seconds)}"
    yield f"  on {hardware(topology)}"
    rounds = f", {plan.rounds} rounds" if plan.rounds is not None else ""
    whose = "a GPU library's" if plan.priced.basis == LIBRARY else "by its schedule"
    yield f"  algorithm {plan.priced.algorithm} ({whose}{rounds}), busbw {band(plan.busbw, _giga)} GB/s"
    if plan.priced.extrapolated:
        yield f"  extrapolated: {plan.priced.extrapolated}"


def hardware(topology: Topology) -> str:
    """Return a topology's name, its hosts and its links, without their rates."""
    per = sorted(set(topology.ranks_per_host))
    links = [
        link.kind
        for link, many in ((topology.inside, per[-1]), (topology.between, topology.hosts))
        if link and many > 1
    ]
    return f"{topology.name}: {topology.hosts} x {'-'.join(map(str, per))} ranks, {' and '.join(links)}"


def _refused(plan: TrainingPlan, fit: Fit) -> Iterator[str]:
    plain, ranks = fit.states[0], plan.question.topology.ranks
    each = plain.total_bytes / fit.parameters
    arithmetic = f"{count(fit.parameters)} parameters x {each:.0f} bytes = {size(plain.total_bytes)}"
    yield "REFUSED in plain data parallel, on every rank:"
    yield f"  {arithmetic} > {size(fit.memory_bytes)}"
    if plan.sharded is None:
        yield f"  nor sharded over {ranks} ranks: {size(fit.states[3].total_bytes)} each"
        yield f"  it takes {fit.least_ranks} ranks: --hosts, or more --memory"
        return
    one = plan.sharded
    gathers = f"{one.gathers} all-gathers" if one.gathers > 1 else "all-gather"
    yield f"  {STAGE_WORDS[one.stage]}: {size(fit.states[one.stage].total_bytes)} a rank; per step"
    yield f"  reduce-scatter + {gathers}: {band(one.total)}" + (", extrapolated" if one.extrapolated else "")
    if one.exposed is not None:
        yield f"  left after computation at best: {band(one.exposed)}"


def _bound(plan: TrainingPlan) -> Iterator[str]:
    if plan.bounds:
        others = ", ".join(f"{one.kind} {one.where} {one.share:.0%}".replace("  ", " ") for one in plan.bounds[1:2])
        yield f"bound by {bound_words(plan.bounds[0])}" + (f"; {others}" if others else "")


def bound_text(one: Bound) -> str:
    """Return what a time follows in words."""
    if not one.where:
        return f"work beside links {one.share:.0%}"
    if one.where == "switch":
        return f"{one.kind} of the switch that reduces ({one.link}) {one.share:.0%}"
    return f"{one.kind} of {one.link} {PLACES[one.where]} {one.share:.0%}"


def _wires(plan: TrainingPlan) -> Iterator[str]:
    wires = plan.wires
    yield f"all ranks send {size(wires.total_bytes)}, each {size(wires.per_rank_bytes)}" + (
        f"; an interface {band(wires.interface_bytes_per_s, _giga)} GB/s" if wires.interface_bytes_per_s else ""
    )


def _memory(plan: TrainingPlan) -> Iterator[str]:
    fit = plan.fit
    if fit is None or fit.refused:
        return
    needed = f"weights, gradients, Adam: 16 B x {count(fit.parameters)} = {size(fit.states[0].total_bytes)}"
    if fit.memory_bytes is None:
        yield f"{needed} a rank; its --memory is not known"
    else:
        yield f"{needed} of {size(fit.memory_bytes)} a rank: fits"


def _buckets(plan: TrainingPlan) -> Iterator[str]:
    if not plan.buckets or plan.question.compute_s is None:
        return
    best, compute = plan.buckets[0], plan.question.compute_s
    share = Band(*(100 * one / (compute + one) for one in best.exposed.ends))
    yield f"best buckets: {best.count} of {size(best.bucket_bytes)}, each {band(best.bucket)}"
    yield f"  exposed {band(best.exposed)}: {band(share, _percent)} of a step"
    yield f"  in one piece {band(best.whole)}"
    ran = next((one for one in plan.buckets if one.parameter_count == plan.question.ran), None)
    if ran is not None:
        yield f"  as it ran: {ran.count} of {size(ran.bucket_bytes)}, exposed {band(ran.exposed)}"


def _batch(plan: TrainingPlan) -> Iterator[str]:
    one = plan.batch
    parts = [str(one.ranks), *(str(n) for n in (one.per_rank, one.accumulated) if n > 1)]
    yield f"effective batch {' x '.join(parts)}" + (f" = {one.effective}" if len(parts) > 1 else " x a rank's")
    rates = f"x {digits(one.linear)} (SGD, Goyal 2017), x {digits(one.square_root)} (Adam, Malladi 2022)"
    yield f"  learning rate usually {rates}"


# ------------------------------------------------------------------------------------------------ tables


def _here(plan: TrainingPlan, most: int) -> Iterator[str]:
    """Say who is fastest at this size: a library's ways first, which tables support; schedules alone flatter."""
    running = [one for one in plan.here if one.algorithm in plan.contenders]
    others = [one for one in plan.here if one.algorithm not in plan.contenders]
    left = len(plan.here) - most
    more = f"; {left} more: --all" if left > 0 else ""
    yield f"fastest at {size(plan.question.size_bytes)} (* extrapolated{more})"
    yield from (_ranked(one) for one in running[:most])
    if others and most > len(running):
        yield "  by their schedules alone, which count no cost per message:"
        yield from (_ranked(one) for one in others[: most - len(running)])


def _ranked(one: Priced) -> str:
    return f"  {one.algorithm:<20}{_mark(one)} {band(one.seconds)}"


def _mark(one: Priced) -> str:
    return "*" if one.extrapolated else " "


def _crossovers(plan: TrainingPlan) -> Iterator[str]:
    first = next(one for one in plan.ranking[min(plan.ranking)] if one.algorithm in plan.contenders)
    words = [first.algorithm, *(f"{one.after} from {band(one.band, size)}" for one in plan.crossovers)]
    yield f"by size: {', '.join(words)}"


def _by_size(plan: TrainingPlan) -> Iterator[str]:
    yield "by size, the three fastest (* extrapolated)"
    for at, found in plan.ranking.items():
        running = [one for one in found if one.algorithm in plan.contenders][:3]
        best = "; ".join(f"{one.algorithm}{_mark(one).strip()} {band(one.seconds)}" for one in running)
        yield f"  {size(at):>8}  {best}"


def _scaling(plan: TrainingPlan, most: int) -> Iterator[str]:
    if not plan.scaling:
        return
    step = ", efficiency of a step" if any(one.efficiency for one in plan.scaling) else ""
    yield f"hosts, time, busbw in GB/s{step} (* extrapolated)"
    shown = plan.scaling if len(plan.scaling) <= most else (plan.scaling[0], *plan.scaling[1 - most :])
    for one in shown:
        yield _scale(one)


def _scale(one: Scale) -> str:
    if one.seconds is None or one.busbw is None:
        return f"  {one.hosts:>5}   nothing to send"
    mark = "*" if one.extrapolated else " "
    words = f"  {one.hosts:>5}{mark} {band(one.seconds)}  {band(one.busbw, _giga)}"
    return words + (f"  {_percents(one.efficiency)}" if one.efficiency else "")


def _stages(plan: TrainingPlan) -> Iterator[str]:
    if plan.fit is None:
        return
    yield ""
    yield f"memory of a rank: weights + gradients + optimizer, {size(plan.fit.memory_bytes)} there"
    for one in plan.fit.states:
        parts = " + ".join(size(part) for part in (one.weights_bytes, one.gradients_bytes, one.optimizer_bytes))
        yield f"  {STAGE_WORDS[one.stage]}: {parts} = {size(one.total_bytes)}"


def _bucket_table(plan: TrainingPlan) -> Iterator[str]:
    if not plan.buckets:
        return
    yield ""
    yield f"buckets, size, exposed after a backward that is {BACKWARD:.0%} of the computation"
    for one in sorted(plan.buckets, key=lambda bucket: bucket.parameter_count):
        yield f"  {one.count:>5} {size(one.bucket_bytes):>8}  {band(one.exposed)}"


# ------------------------------------------------------------------------------------------------ figures


def parameter_count(number: float) -> str:
    """Return a number of parameters: `70B`, `350M`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.4g}{unit}"
    return f"{number:.4g}"


def _giga(value: float) -> str:
    return digits(value / 1e9)


def _percent(value: float) -> str:
    return f"{digits(value)} %"


def _percents(one: Band) -> str:
    return f"{one.value:.0%} ({one.low:.0%}-{one.high:.0%})"
