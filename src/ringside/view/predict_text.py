"""The predictor's answers in words: a plan and the answer of a what-if, both with the verdict first.

A plan has 24 lines of 80 columns, and its long tables on demand.
"""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.advice import WORTH_IT, Help, Worth
from ringside.predict.plan.buckets import BACKWARD
from ringside.predict.plan.memory import LINEAR, SQUARE_ROOT, STAGE_WORDS, Fit
from ringside.predict.plan.options import LIBRARY, UNSEEN, simulated_band
from ringside.predict.plan.plan import Bound, Priced, TrainingPlan
from ringside.predict.plan.step import StepTime
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.topology.topology import Topology
from ringside.predict.what_if import Answer, StepChange, work
from ringside.text import counted, digits, duration, giga, percent, signed_percent, size

WIDTH, LINES = 80, 24
BASELINE_NAMES = {"hockney": "Hockney's line", "interpolation": "interpolation", "nccl_constants": "NCCL's constants"}
SWITCHES = "in_network requires switches that reduce (SHARP); it is the answer only with --algorithm in_network."
OPTIMISTIC = "Rows priced by schedule ignore per-message GPU overhead, so they are optimistic."
PLACES = {"inside": "inside hosts", "between": "between hosts"}


def short_plan(plan: TrainingPlan) -> list[str]:
    """Return a plan in at most 24 lines of 80 columns."""
    found: list[str] = []
    for most in (3, 2, 1):  # of each list, as many as there is room for
        lines = [*_answer(plan, most), *_here(plan, most), _crossovers(plan), *_scaling(plan, max(most, 2))]
        found = [part for line in lines for part in wrapped(line)]
        if len(found) <= LINES:
            break
    return found


def wrapped(line: str) -> list[str]:
    """Return a line as lines of at most 80 columns."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=True) if len(line) > WIDTH else [line]


def full_plan(plan: TrainingPlan) -> list[str]:
    """Return a plan with all its tables."""
    lines = [*_answer(plan), "", *_here(plan, most=len(plan.here)), _crossovers(plan)]
    lines += ["", "by size, the three fastest (* extrapolated)"]
    for nbytes, prices in plan.ranking.items():
        running = [price for price in prices if price.algorithm in plan.contenders][:3]
        best = "; ".join(f"{price.algorithm}{_mark(price).strip()} {band_text(price.seconds)}" for price in running)
        lines.append(f"  {size(nbytes):>8}  {best}")
    lines += ["", *_scaling(plan, most=len(plan.scaling))]
    if plan.worth is not None:
        lines += ["", f"hosts, step, times as fast as half of them (the knee: the last of {WORTH_IT} × or more)"]
        for scale in plan.worth.scales:
            knee = "  knee" if scale.hosts == plan.worth.hosts and plan.worth.next is not None else ""
            doubling = "" if scale.doubling is None else f"  {scale.doubling:.2f} ×"
            lines.append(f"  {scale.hosts:>5}  {band_text(scale.seconds)}{doubling}{knee}")
    if plan.fit is not None:
        lines += ["", f"memory of a rank: weights + gradients + optimizer, {size(plan.fit.memory_bytes)} there"]
        for state in plan.fit.states:
            parts = " + ".join(map(size, (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes)))
            lines.append(f"  {STAGE_WORDS[state.stage]}: {parts} = {size(state.total_bytes)}")
    if plan.buckets:
        lines += ["", f"buckets, size, exposed after a backward that is {percent(BACKWARD)} of the computation"]
        for buckets in sorted(plan.buckets, key=lambda buckets: buckets.count):
            lines.append(f"  {buckets.count:>5} {size(buckets.bucket_bytes):>8}  {band_text(buckets.exposed)}")
    return [*lines, "", "learning rate", f"  linear: {LINEAR}", f"  square root: {SQUARE_ROOT}"]


def band_text(band: Band, unit: Callable[[float], str] = duration, *, least: int = 2) -> str:
    """Return a figure with its band, the unit once where it is the same: `76 ms (37 to 160)`.

    Args:
        band: The figure; one without a width was given, or follows from what was, and says so.
        unit: What makes a text of a number.
        least: Significant digits that the figure has at least, however wide its band is.
    """
    value, ends = band_parts(band, unit, least=least)
    return f"{value} ({ends})"


def about(band: Band) -> str:
    """Return a duration as the answer to a question: `about 80 ms (38 to 160)`."""
    return ("" if band.low == band.high else "about ") + band_text(band, least=1)


def band_parts(band: Band, unit: Callable[[float], str] = duration, *, least: int = 2) -> tuple[str, str]:
    """Return a figure and the ends of its band, with as many digits as are known; arguments as of `band_text`.

    The last digit is the first one that is smaller than a quarter of the way to the nearer end.
    """
    if band.low == band.high:
        return unit(band.value), "input"
    known = least
    half = band.value - band.low or band.high - band.value
    if band.value > 0:
        known = math.floor(math.log10(band.value)) - math.floor(math.log10(half / 4)) + 1
    known = min(max(known, least), 3)
    value, name = _rounded(band.value, known, unit)
    (low, below), (high, above) = (_rounded(end, max(known, 2), unit) for end in (band.low, band.high))
    return value + name, f"{low} to {high}" if below == name == above else f"{low}{below} to {high}{above}"


def _rounded(value: float, known: int, unit: Callable[[float], str]) -> tuple[str, str]:
    """Return a number with so many significant digits, and the unit behind it: `("5.8", " ms")`, `("69", "%")`."""
    text = unit(float(f"{value:.{known}g}"))
    number = text.rstrip(string.ascii_letters + " %µ/")
    name = text.removeprefix(number)
    for _ in range(3 - known):  # units make three digits: cut off the zeros that mean nothing
        if "." in number and number.endswith("0"):
            number = number[:-1].removesuffix(".")
    return number, name


# ------------------------------------------------------------------------------------------------ verdict first


def _answer(plan: TrainingPlan, most: int = 3) -> Iterator[str]:
    """Yield how long it takes, how many hosts are worth it, whether it fits, what bounds it, what would help most."""
    question, fit = plan.question, plan.fit
    indent = ""
    if plan.step is not None:
        step, indent = plan.step, "  "
        yield f"step: {about(step.seconds)}, {duration(question.compute_s or 0.0)} of it computing"
        yield f"  {step_text(step)}"
    what = f"all-reduce of {size(question.size_bytes)} among {question.topology.ranks} ranks"
    yield f"{indent}{what}: {about(plan.priced.seconds)}"
    yield f"  on {hardware(question.topology)}"
    if plan.priced.extrapolated:
        yield f"  extrapolated: {plan.priced.extrapolated}"
    if plan.worth is not None:
        yield f"worth it: {worth_text(plan.worth)}"

    # Whether it fits, and what would where plain data parallel does not: sharded, or on more ranks.
    if fit is not None:
        each = fit.states[0].total_bytes / fit.parameters
        yield fit_text(fit)
        part = "" if fit.parameters == question.parameters else " of a rank's part"
        yield f"  {parameter_count(fit.parameters)} parameters{part} × {each:.0f} bytes (weights, gradients, Adam)"
        asked = question.job.stage if question.job is not None else 0
        if fit.stage is not None and (stage := max(fit.stage, asked)):
            yield f"  {STAGE_WORDS[stage]}: {size(fit.states[stage].total_bytes)} per rank"
        elif fit.refused:
            yield f"  nor sharded over {question.topology.ranks} ranks: {size(fit.states[3].total_bytes)} each"
            yield f"  needs {fit.least_ranks} ranks: --hosts, or more --memory"
        if plan.sharded is not None and plan.step is None:
            sharded = plan.sharded
            gathers = f"{sharded.gathers} all-gathers" if sharded.gathers > 1 else "all-gather"
            extrapolated = ", extrapolated" if sharded.extrapolated else ""
            yield f"  reduce-scatter + {gathers} per step: {band_text(sharded.total)}{extrapolated}"

    # What the time follows, and what travels.
    bounds = " ".join("; ".join(map(bound_text, plan.bounds[:2])).split())
    yield f"why: {bounds or 'nothing travels'}"
    rounds = f", {counted(plan.rounds, 'round')}" if plan.rounds is not None else ""
    whose = "a GPU library's" if plan.priced.basis == LIBRARY else "by its schedule"
    yield f"  algorithm {plan.priced.algorithm} ({whose}{rounds}), busbw {band_text(plan.busbw, giga)} GB/s"
    wires = plan.wires
    sent = f"  {size(wires.per_rank_bytes)} sent per rank ({size(wires.total_bytes)} in total)"
    if wires.interface_bytes_per_s:
        sent += f"; {band_text(wires.interface_bytes_per_s, giga)} GB/s per NIC"
    yield sent

    if plan.helps:
        yield f"would help most: {help_text(plan.helps[0])}"
        if then := plan.helps[1:most]:
            yield f"  then {'; '.join(map(help_text, then))}"

    # Buckets and batch.
    compute = question.compute_s
    if plan.buckets and compute is not None:
        best = plan.buckets[0]
        share = Band(*(exposed / (compute + exposed) for exposed in best.exposed.ends))
        of_step = band_text(share, lambda value: percent(value, 1))
        yield f"best buckets: {best.count} of {size(best.bucket_bytes)}, each {band_text(best.bucket)}"
        yield f"  exposed {band_text(best.exposed)}: {of_step} of a step"
        yield f"  in one piece {band_text(best.whole)}"
        ran = next((buckets for buckets in plan.buckets if buckets.count == question.ran), None)
        if ran is not None:
            yield f"  as it ran: {ran.count} of {size(ran.bucket_bytes)}, exposed {band_text(ran.exposed)}"
    batch = plan.batch
    factors = [str(batch.ranks), *(str(n) for n in (batch.per_rank, batch.accumulated) if n > 1)]
    whole = f" = {batch.effective}" if len(factors) > 1 else " × per-rank batch"
    yield f"global batch: {' × '.join(factors)}{whole}"
    rates = f"× {digits(batch.linear)} (SGD, Goyal 2017), × {digits(batch.square_root)} (Adam, Malladi 2022)"
    yield f"  learning rate usually {rates}"


def step_text(step: StepTime) -> str:
    """Return what a step waits for, and how it is trained: `exposed 60 ms of 130 ms communication: FSDP, 32 layers`."""
    job = step.job
    ways = {0: "data parallel", 3: "FSDP"}
    parts = [ways.get(job.stage, f"ZeRO stage {job.stage}")]
    if job.stage == 3:
        parts.append(f"{counted(job.layers, 'layer')}, {job.prefetch} ahead{'' if job.reshard else ', kept'}")
    parts += [f"tensor {job.tensor}"] if job.tensor > 1 else []
    parts += [f"pipeline {job.pipeline}"] if job.pipeline > 1 else []
    bubble = f", bubble {band_text(step.bubble)}" if job.pipeline > 1 else ""
    exposed = f"exposed {band_text(step.exposed)} of {duration(step.communication.value)} communication"
    return f"{exposed}{bubble}: {', '.join(parts)}"


def worth_text(worth: Worth) -> str:
    """Return how many hosts are worth it: `up to the knee at 8 hosts (64 ranks); the next doubling gives 1.4 ×`."""
    where = f"{counted(worth.hosts, 'host')} ({counted(worth.ranks, 'rank')})"
    if worth.next is None:
        return f"{where} at least: no knee (a doubling below {WORTH_IT} ×)"
    return f"up to the knee at {where}; the next doubling gives {worth.next:.1f} ×"


def help_text(change: Help) -> str:
    """Return what would help: `twice the bandwidth of infiniband between hosts (31 ms less, 9%)`."""
    return f"{change.what} ({duration(change.saved.value)} less, {percent(change.share)})"


def fit_text(fit: Fit) -> str:
    """Return whether a model fits: `does not fit with plain data parallelism: 112 GB > 80 GB per rank`."""
    needed = size(fit.states[0].total_bytes)
    if fit.memory_bytes is None:
        return f"whether it fits is not known without --memory: {needed} per rank"
    fits, of = ("does not fit", ">") if fit.refused else ("fits", "of")
    return f"{fits} with plain data parallelism: {needed} {of} {size(fit.memory_bytes)} per rank"


def hardware(topology: Topology) -> str:
    """Return a topology's name, its hosts and its links, without their rates."""
    per = sorted(set(topology.ranks_per_host))
    links = [
        link.kind
        for link, many in ((topology.inside, per[-1]), (topology.between, topology.hosts))
        if link and many > 1
    ]
    tables = len(topology.measured)
    fitted = f", fitted to {tables} table{'s' * (tables > 1)}" if tables else ""
    return f"{topology.name}: {topology.hosts} × {'-'.join(map(str, per))} ranks, {' and '.join(links)}{fitted}"


def bound_text(bound: Bound) -> str:
    """Return what a time follows in words."""
    if not bound.where:
        return f"work beside links {percent(bound.share)}"
    if bound.where == "switch":
        return f"{bound.kind} of the switch that reduces ({bound.link}) {percent(bound.share)}"
    return f"{bound.kind} of {bound.link} {PLACES[bound.where]} {percent(bound.share)}"


# ------------------------------------------------------------------------------------------------ tables


def _here(plan: TrainingPlan, most: int) -> Iterator[str]:
    """Yield the fastest at this size, `most` of them or all: first those among which the answer was looked for."""

    def line(price: Priced) -> str:
        return f"  {price.algorithm:<20}{_mark(price)} {band_text(price.seconds)}"

    running = [price for price in plan.here if price.algorithm in plan.contenders]
    others = [price for price in plan.here if price.algorithm not in plan.contenders]
    left = len(plan.here) - most
    more = f"; {left} more: --all" if left > 0 else ""
    yield f"fastest at {size(plan.question.size_bytes)} (* extrapolated{more})"
    yield from map(line, running[:most])
    for of_library, heading in ((True, SWITCHES), (False, OPTIMISTIC)):
        rows = [price for price in others[: max(most - len(running), 0)] if (price.basis == LIBRARY) is of_library]
        if rows:
            yield f"  {heading}"
            yield from map(line, rows)


def _mark(price: Priced) -> str:
    return "*" if price.extrapolated else " "


def _crossovers(plan: TrainingPlan) -> str:
    first = next(price for price in plan.ranking[min(plan.ranking)] if price.algorithm in plan.contenders)
    later = [f"{crossover.after} from {band_text(crossover.band, size)}" for crossover in plan.crossovers]
    return f"by size: {', '.join([first.algorithm, *later])}"


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


# ------------------------------------------------------------------------------------------------ a what-if

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
    (step_before, step_after), topology = answer.step_s, answer.before.topology
    ratio = f", {signed_percent(step_after / step_before - 1)}" if answer.knows_work and step_before > 0 else ""
    lines = [f"what if {change_text(change)}", f"  on {hardware(topology)}", difference_text(answer) + ratio]
    if answer.knows_work:
        lines.append(f"  step {_change(*answer.steps)}")
        lines.append(f"  own work {_change(work(answer.before), work(answer.after))}")
        lines.append(f"  exposed communication {_change(*(left.seconds for left in answer.left))}")
    changed, (before, after) = answer.after, (left.bucket for left in answer.left)
    if before is not None and after is not None:
        buckets = f"{changed.buckets} bucket{'s' * (changed.buckets > 1)} of {size(changed.bucket_bytes)}"
        lines.append(f"  {buckets}, each {_change(before, after)}")
    hours = answer.rank_hours_per_day
    if hours is None:
        lines.append("  per day: give what a step computes, --compute-seconds S")
    else:
        shown, all_hours = absolute(hours), 24 * changed.topology.ranks
        outcome = "saved" if hours.value < 0 else "lost"
        lines.append(f"  {outcome} per day: {band_text(shown, digits)} of {all_hours} rank-hours")
        lines += [
            f"  {what}: {band_text(cost, unit)}, {rate}" for what, cost, unit, rate in costs_per_day(shown, rates)
        ]

    # Who is guilty, and what the critical path consists of.
    if played is None:
        lines.append("critical path: too many ranks, or too few, to play it")
    else:
        blamed = "; ".join(map(str, played.blamed[:PARTS]))
        lines.append(f"critical path (played as {played_algorithm(played)}, exact for these figures): {blamed}")
        found = sorted(played.shares.items(), key=lambda item: -item[1])[:PARTS]
        shares = (f"{part_text(name)} {duration(part)} ({percent(part / played.seconds)})" for name, part in found)
        lines.append("  " + ", ".join(shares))
    lines += [f"extrapolated: {why}" for why in answer.extrapolated]
    lines += [f"not seen: {what}" for what in answer.unseen]
    return [part for line in lines for part in wrapped(line)]


def change_text(change: StepChange) -> str:
    """Return a change in words: `rank 3 were 12% slower, the network oversubscribed 2:1`."""
    parts = [
        f"rank {rank} were {percent(abs(more), 1)} {'slower' if more >= 0 else 'faster'}"
        for rank, more in change.slower.items()
    ]
    parts += [f"rank {rank} were as fast as the others" for rank in change.repaired]
    parts += [f"link {src} → {dst} were {digits(times)} × slower" for src, dst, times in change.slow_links]
    parts += [f"host {host} had one rail less" for host in change.lost_rails]
    if change.oversubscription is not None:
        parts.append(f"the network were oversubscribed {digits(change.oversubscription)}:1")
    parts += ["switches reduced (SHARP)"] if change.sharp else []
    if change.bucket_bytes is not None:
        parts.append(f"buckets were {size(change.bucket_bytes)}")
    if change.hosts is not None:
        parts.append("there was one host" if change.hosts == 1 else f"there were {change.hosts} hosts")
    if change.link_rate is not None:
        parts.append(f"links between hosts carried {digits(change.link_rate)} × as much")
    parts += [f"gradients were {change.wire_dtype} between hosts"] if change.wire_dtype else []
    parts += [f"the algorithm were {change.algorithm}"] if change.algorithm else []
    return ", ".join(parts) or "nothing changed"


def _change(before: Band, after: Band) -> str:
    """Return a figure before and after: `19.5 ms (18.1 to 20.8) → 25.5 ms (22.9 to 28.0)`."""
    return band_text(before) if before == after else f"{band_text(before)} → {band_text(after)}"


def difference_text(answer: Answer) -> str:
    """Return the difference: `a step takes 30.0 ms longer (28.1 to 33.0)`."""
    delta = answer.delta
    subject = "a step takes" if answer.knows_work else "the synchronisation takes"
    more = "less" if delta.value < 0 else "longer"
    if delta.low < 0 < delta.high:
        ends = f"({duration(-delta.low)} less to {duration(delta.high)} longer)"
        return f"{subject} {duration(abs(delta.value))} {more} {ends}"
    return f"{subject} {band_text(absolute(delta)).replace(' (', f' {more} (', 1)}"


def absolute(band: Band) -> Band:
    """Return a difference as what it is more, or what it is less."""
    return Band(-band.value, -band.high, -band.low) if band.value < 0 else band


def costs_per_day(hours: Band, rates: Rates) -> Iterator[tuple[str, Band, Callable[[float], str], str]]:
    """Yield what rank-hours cost, in money and energy, where rates are known: what, how much, its unit, the rate."""
    if rates.price is not None:
        money = Band(*(end * rates.price for end in hours.ends))
        yield "cost per day", money, digits, f"{digits(rates.price)} per rank-hour"
    if rates.watts is not None:
        energy = Band(*(end * (rates.watts / 1e3) for end in hours.ends))
        yield "energy per day", energy, lambda value: f"{digits(value)} kWh", f"{digits(rates.watts)} W per rank"


def part_text(name: str) -> str:
    """Return a part of the critical path in words: `latency of nvswitch`, `transfer over infiniband`, `late ranks`."""
    kind, _, where = name.replace("_", " ").partition(" ")
    return {"alpha": f"latency of {where}", "wire": f"transfer over {where}", "late": "late ranks"}.get(kind, name)


def simulation_text(timeline: Timeline) -> str:
    """Return in a line how sure a simulation is: it is exact for its topology's figures, and those are not."""
    band = simulated_band(timeline)
    if band.low == band.high:
        return "nothing is sent: exact"
    return f"exact for these figures; on clusters like it {about(band)}, 95%; extrapolated: {UNSEEN}"


def played_algorithm(played: Timeline) -> str:
    """Return what was played in words."""
    schedule = played.schedule
    through = " through a switch" if schedule.switches and schedule.name == "hierarchical" else ""
    return schedule.name + through
