"""A plan in words: the verdict first, in 24 lines of 80 columns; the long tables on demand."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.buckets import BACKWARD
from ringside.predict.plan.memory import LINEAR, SQUARE_ROOT, STAGE_WORDS
from ringside.predict.plan.options import LIBRARY
from ringside.predict.plan.plan import Bound, Priced, TrainingPlan
from ringside.predict.topology.topology import Topology
from ringside.text import digits, duration, giga, percent, size

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
    lines += ["", *_here(plan, len(plan.here)), *_crossovers(plan), "", "by size, the three fastest (* extrapolated)"]
    for nbytes, prices in plan.ranking.items():
        running = [price for price in prices if price.algorithm in plan.contenders][:3]
        best = "; ".join(f"{price.algorithm}{_mark(price).strip()} {band_text(price.seconds)}" for price in running)
        lines.append(f"  {size(nbytes):>8}  {best}")
    lines += ["", *_scaling(plan, len(plan.scaling))]
    if plan.fit is not None:
        lines += ["", f"memory of a rank: weights + gradients + optimizer, {size(plan.fit.memory_bytes)} there"]
        for state in plan.fit.states:
            parts = " + ".join(map(size, (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes)))
            lines.append(f"  {STAGE_WORDS[state.stage]}: {parts} = {size(state.total_bytes)}")
    if plan.buckets:
        lines += ["", f"buckets, size, exposed after a backward that is {percent(BACKWARD)} of the computation"]
        for buckets in sorted(plan.buckets, key=lambda buckets: buckets.count):
            row = f"  {buckets.count:>5} {size(buckets.bucket_bytes):>8}  {band_text(buckets.exposed)}"
            lines.append(row)
    return [*lines, "", "learning rate", f"  linear: {LINEAR}", f"  square root: {SQUARE_ROOT}"]


def band_text(band: Band, unit: Callable[[float], str] = duration) -> str:
    """Return a figure with its band: `5.95 ms (2.53 ms to 14.0 ms)`."""
    return f"{unit(band.value)} ({unit(band.low)} to {unit(band.high)})"


# ------------------------------------------------------------------------------------------------ verdict first


def _verdict(plan: TrainingPlan) -> Iterator[str]:
    topology, fit = plan.question.topology, plan.fit
    refused = fit is not None and fit.refused
    if fit is not None and fit.refused:
        # Why plain data parallel cannot be, and what could: sharded, or on more ranks.
        plain = fit.states[0]
        each = plain.total_bytes / fit.parameters
        needed = f"{parameter_count(fit.parameters)} parameters x {each:.0f} bytes = {size(plain.total_bytes)}"
        yield "REFUSED in plain data parallel, on every rank:"
        yield f"  {needed} > {size(fit.memory_bytes)}"
        if plan.sharded is None:
            yield f"  nor sharded over {topology.ranks} ranks: {size(fit.states[3].total_bytes)} each"
            yield f"  it takes {fit.least_ranks} ranks: --hosts, or more --memory"
        else:
            sharded = plan.sharded
            gathers = f"{sharded.gathers} all-gathers" if sharded.gathers > 1 else "all-gather"
            extrapolated = ", extrapolated" if sharded.extrapolated else ""
            yield f"  {STAGE_WORDS[sharded.stage]}: {size(fit.states[sharded.stage].total_bytes)} a rank; per step"
            yield f"  reduce-scatter + {gathers}: {band_text(sharded.total)}{extrapolated}"
            if sharded.exposed is not None:
                yield f"  left after computation at best: {band_text(sharded.exposed)}"
    if_so = "were it to fit: " if refused else ""
    reduction = f"{if_so}all-reduce of {size(plan.question.size_bytes)} among {topology.ranks} ranks"
    yield f"{reduction}: {band_text(plan.priced.seconds)}"
    yield f"  on {hardware(topology)}"
    rounds = f", {plan.rounds} rounds" if plan.rounds is not None else ""
    whose = "a GPU library's" if plan.priced.basis == LIBRARY else "by its schedule"
    yield f"  algorithm {plan.priced.algorithm} ({whose}{rounds}), busbw {band_text(plan.busbw, giga)} GB/s"
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


def _bound(plan: TrainingPlan) -> Iterator[str]:
    if plan.bounds:
        second = "".join(
            f"{bound.kind} {bound.where} {percent(bound.share)}".replace("  ", " ") for bound in plan.bounds[1:2]
        )
        yield f"bound by {bound_text(plan.bounds[0])}" + (f"; {second}" if second else "")


def bound_text(bound: Bound) -> str:
    """Return what a time follows in words."""
    if not bound.where:
        return f"work beside links {percent(bound.share)}"
    if bound.where == "switch":
        return f"{bound.kind} of the switch that reduces ({bound.link}) {percent(bound.share)}"
    return f"{bound.kind} of {bound.link} {PLACES[bound.where]} {percent(bound.share)}"


def _wires(plan: TrainingPlan) -> Iterator[str]:
    wires = plan.wires
    yield f"all ranks send {size(wires.total_bytes)}, each {size(wires.per_rank_bytes)}" + (
        f"; an interface {band_text(wires.interface_bytes_per_s, giga)} GB/s" if wires.interface_bytes_per_s else ""
    )


def _memory(plan: TrainingPlan) -> Iterator[str]:
    fit = plan.fit
    if fit is None or fit.refused:
        return
    needed = f"weights, gradients, Adam: 16 B x {parameter_count(fit.parameters)} = {size(fit.states[0].total_bytes)}"
    if fit.memory_bytes is None:
        yield f"{needed} a rank; its --memory is not known"
    else:
        yield f"{needed} of {size(fit.memory_bytes)} a rank: fits"


def _buckets(plan: TrainingPlan) -> Iterator[str]:
    if not plan.buckets or plan.question.compute_s is None:
        return
    best, compute = plan.buckets[0], plan.question.compute_s
    share = Band(*(exposed / (compute + exposed) for exposed in best.exposed.ends))
    of_step = band_text(share, lambda value: percent(value, 1))
    yield f"best buckets: {best.count} of {size(best.bucket_bytes)}, each {band_text(best.bucket)}"
    yield f"  exposed {band_text(best.exposed)}: {of_step} of a step"
    yield f"  in one piece {band_text(best.whole)}"
    ran = next((buckets for buckets in plan.buckets if buckets.count == plan.question.ran), None)
    if ran is not None:
        yield f"  as it ran: {ran.count} of {size(ran.bucket_bytes)}, exposed {band_text(ran.exposed)}"


def _batch(plan: TrainingPlan) -> Iterator[str]:
    batch = plan.batch
    parts = [str(batch.ranks), *(str(n) for n in (batch.per_rank, batch.accumulated) if n > 1)]
    yield f"effective batch {' x '.join(parts)}" + (f" = {batch.effective}" if len(parts) > 1 else " x a rank's")
    rates = f"x {digits(batch.linear)} (SGD, Goyal 2017), x {digits(batch.square_root)} (Adam, Malladi 2022)"
    yield f"  learning rate usually {rates}"


# ------------------------------------------------------------------------------------------------ tables


def _here(plan: TrainingPlan, most: int) -> Iterator[str]:
    """Yield the fastest at this size: a library's first, which tables support; schedules alone flatter."""

    def line(price: Priced) -> str:
        return f"  {price.algorithm:<20}{_mark(price)} {band_text(price.seconds)}"

    running = [price for price in plan.here if price.algorithm in plan.contenders]
    others = [price for price in plan.here if price.algorithm not in plan.contenders]
    left = len(plan.here) - most
    more = f"; {left} more: --all" if left > 0 else ""
    yield f"fastest at {size(plan.question.size_bytes)} (* extrapolated{more})"
    yield from map(line, running[:most])
    if others and most > len(running):
        yield "  by their schedules alone, which count no cost per message:"
        yield from map(line, others[: most - len(running)])


def _mark(price: Priced) -> str:
    return "*" if price.extrapolated else " "


def _crossovers(plan: TrainingPlan) -> Iterator[str]:
    first = next(price for price in plan.ranking[min(plan.ranking)] if price.algorithm in plan.contenders)
    later = [f"{crossover.after} from {band_text(crossover.band, size)}" for crossover in plan.crossovers]
    yield f"by size: {', '.join([first.algorithm, *later])}"


def _scaling(plan: TrainingPlan, most: int) -> Iterator[str]:
    if not plan.scaling:
        return
    step = ", efficiency of a step" if any(scale.efficiency for scale in plan.scaling) else ""
    yield f"hosts, time, busbw in GB/s{step} (* extrapolated)"
    # Of many, the first and the last ones.
    shown = plan.scaling if len(plan.scaling) <= most else (plan.scaling[0], *plan.scaling[1 - most :])
    for scale in shown:
        if scale.seconds is None or scale.busbw is None:
            yield f"  {scale.hosts:>5}   nothing to send"
            continue
        mark, share = "*" if scale.extrapolated else " ", scale.efficiency
        efficiency = f"  {band_text(share, percent)}" if share else ""
        yield f"  {scale.hosts:>5}{mark} {band_text(scale.seconds)}  {band_text(scale.busbw, giga)}{efficiency}"


# ------------------------------------------------------------------------------------------------ figures


def parameter_count(number: float) -> str:
    """Return a number of parameters: `70B`, `350M`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.4g}{unit}"
    return f"{number:.4g}"
