"""What synchronising gradients would cost on a topology: `plan(PlanQuestion(...))` returns a `TrainingPlan`.

Every duration has its band, and a note where no published table supports it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.advice import Help, Situation, Worth, helps, slower_figures, worth
from ringside.predict.plan.buckets import COUNTS, BucketSizes, best_buckets
from ringside.predict.plan.memory import Batch, Fit, Sharded, batch, fit, sharded
from ringside.predict.plan.options import (
    AUTO,
    IN_NETWORK,
    LIBRARY,
    Option,
    has_library,
    moved,
    names,
    option,
    options,
    with_measured,
)
from ringside.predict.plan.step import Job, StepTime, default_blocking, step_time
from ringside.predict.tables.table import ALL_REDUCE, bus_factor
from ringside.predict.topology.topology import Topology

MOST_BYTES = 1e18
MOST_RANKS = 1 << 18  # schedules of more take minutes to price


@dataclass(frozen=True)
class PlanQuestion:
    """What to plan.

    Args:
        topology: What it runs over.
        size_bytes: Of all gradients of a step, more than 0, at most 1e18.
        algorithm: A name of `options.names`, or `auto`: the library's choice, or the fastest where there is none.
        parameters: Of the model; None: only bytes are known.
        dtype: Of weights and gradients.
        memory_bytes: Of a rank's device; None: not known.
        compute_s: Forward and backward of a step, seconds; None: not known.
        batch_per_rank: Samples per rank and micro-step.
        accumulated: Micro-steps per synchronisation.
        base_batch: With which the learning rate was found; None: one rank's.
        measured: Sizes of buckets and what they took in a run, bytes and seconds.
        ran: Into how many buckets the run cut its gradients; None: there was no run.
        job: How the model is trained; None: with data parallelism alone, of the least stage of ZeRO that fits.
    """

    topology: Topology
    size_bytes: float
    algorithm: str = AUTO
    parameters: float | None = None
    dtype: str = "bf16"
    memory_bytes: float | None = None
    compute_s: float | None = None
    batch_per_rank: int = 1
    accumulated: int = 1
    base_batch: int | None = None
    measured: tuple[tuple[float, float], ...] = ()
    ran: int | None = None
    job: Job | None = None


@dataclass(frozen=True)
class PlannedWires:
    """What travels, which is not busbw's bytes.

    Args:
        total_bytes: All that ranks send together.
        per_rank_bytes: Its mean over ranks.
        host_bytes: What the busiest host sends into the network; None: not known, or one host.
        interface_bytes_per_s: What each of its interfaces carries meanwhile, with its band; None likewise.
    """

    total_bytes: float
    per_rank_bytes: float
    host_bytes: float | None
    interface_bytes_per_s: Band | None


@dataclass(frozen=True)
class Scale:
    """The same on so many hosts.

    Args:
        hosts: How many.
        ranks: How many.
        seconds: Of the all-reduce; None for one rank.
        busbw: Bytes per second; None for one rank.
        efficiency: Of a step: computation by computation and what is exposed; None: computation is not known.
        extrapolated: Why; empty where tables support it.
    """

    hosts: int
    ranks: int
    seconds: Band | None
    busbw: Band | None
    efficiency: Band | None
    extrapolated: str


@dataclass(frozen=True)
class TrainingPlan:
    """What it would cost.

    Args:
        question: What was planned.
        priced: The all-reduce of all gradients in one piece.
        rounds: Rounds one after the other; None: a library's, which pipelines.
        busbw: As nccl-tests has it: 2(n-1)/n · S/t, bytes per second.
        bounds: What the time follows.
        wires: What travels.
        here: All algorithms at this size, the fastest first.
        ranking: The same by size, bytes.
        contenders: The names of those that `crossovers` is about.
        crossovers: Where the fastest changes.
        scaling: From one host up to those of the topology.
        batch: And the learning rate.
        fit: Whether the model fits; None without a model.
        sharded: What sharded data parallel costs, where plain does not fit and it does.
        buckets: Best first; empty where computation is not known, or plain data parallel does not fit.
        step: How long a step takes; None: computation is not known.
        worth: How many hosts are worth it; None: likewise, or hosts of several sizes.
        helps: What would help, the most first.
    """

    question: PlanQuestion
    priced: Priced
    rounds: int | None
    busbw: Band
    bounds: tuple[Bound, ...]
    wires: PlannedWires
    here: tuple[Priced, ...]
    ranking: dict[float, tuple[Priced, ...]]
    contenders: tuple[str, ...]
    crossovers: tuple[Crossover, ...]
    scaling: tuple[Scale, ...]
    batch: Batch
    fit: Fit | None
    sharded: Sharded | None
    buckets: tuple[BucketSizes, ...]
    step: StepTime | None
    worth: Worth | None
    helps: tuple[Help, ...]


def plan(question: PlanQuestion) -> TrainingPlan:
    """Return what it would cost.

    Raises:
        UsageError: The size cannot be, there is one rank only, or more than `MOST_RANKS`, or no such algorithm.
    """
    topology, size = question.topology, float(question.size_bytes)
    if topology.ranks > MOST_RANKS:
        raise UsageError(f"{topology.name}: {topology.ranks} ranks; a plan is of at most {MOST_RANKS}: fewer --hosts")
    if not (math.isfinite(size) and 0 < size <= MOST_BYTES):
        raise UsageError(f"{size:g} bytes of gradients: more than 0 and at most {MOST_BYTES:g}, such as --bytes 1GB")

    # The requested algorithm, or the fastest; what a run measured of it moves all the others alike.
    library = question.algorithm == AUTO and has_library(topology)
    named = option(topology, question.algorithm) if library or question.algorithm != AUTO else None
    every, sizes = options(topology), sorted({*SIZES, size})
    for way in every:  # all sizes at once: a schedule's rounds are made but once
        way.predict(sizes)
    chosen = named or fastest_option(every, size)
    name = AUTO if library else chosen.name
    seen = with_measured(chosen, question.measured)
    every = [moved(other, seen) for other in every]

    def reduction(there: Topology, nbytes: float, algorithm: str = name) -> Option:
        """Return how another topology, or a part of this one, reduces."""
        as_seen = there is topology and algorithm == name
        return seen if as_seen else moved(choose_option(there, nbytes, algorithm), seen)

    # By size: who is fastest, and from where on. At this size the row of what was measured is the measured one.
    running = contenders(every)
    table = ranking(every, sizes)
    (price,) = priced(seen, [size])
    here = tuple(price if seen.measured is not None and row.algorithm == seen.name else row for row in table[size])

    # Whether a rank's part of the model fits; where it does not, sharded data parallel is priced, and no buckets are.
    job, memory = _trained(question)
    unfit = memory if memory is not None and memory.refused else None
    buckets: tuple[BucketSizes, ...] = ()
    if unfit is None and job.parts == 1 and question.compute_s is not None:
        buckets = best_buckets(seen, size, question.compute_s, sorted({*COUNTS, question.ran or 1}))

    # A step, of as many pieces as are best, and what would be of it on other hosts and with other links.
    best = buckets[0].count if buckets and job.stage == 0 else None
    job = replace(job, buckets=question.ran or best) if best else job

    def step_of(there: Situation) -> StepTime:
        assert there.compute_s is not None
        reduce = partial(reduction, algorithm=there.algorithm)
        return step_time(there.topology, there.size_bytes, there.compute_s, there.job, reduce)

    def seconds_of(there: Situation) -> Band:
        if there.compute_s is not None:
            return step_of(there).seconds
        return reduction(there.topology, there.size_bytes, there.algorithm).predict([there.size_bytes]).bands[0]

    now = Situation(topology, size, question.compute_s, job, name)
    step = None if question.compute_s is None else step_of(now)
    quickest = next(row.algorithm for row in here if row.algorithm in {one.name for one in running})
    fastest = quickest if job.stage == 0 and quickest != chosen.name else ""
    return TrainingPlan(
        question=question,
        priced=price,
        rounds=chosen.rounds,
        busbw=busbw(size, topology.ranks, price.seconds),
        bounds=bounds(topology, name, size),
        wires=_wires(question, chosen, price.seconds),
        here=here,
        ranking=table,
        contenders=tuple(contender.name for contender in running),
        crossovers=crossovers(running, sizes),
        scaling=_scaling(topology, size, None if unfit else question.compute_s, reduction),
        batch=batch(topology.ranks, question.batch_per_rank, question.accumulated, question.base_batch),
        fit=memory,
        sharded=sharded(topology, unfit, question.dtype, question.compute_s) if unfit and job.parts == 1 else None,
        buckets=buckets,
        step=step,
        worth=None if step is None else worth(topology, lambda sized: step_of(replace(now, topology=sized)).seconds),
        helps=helps(now, seconds_of, fastest, best),
    )


def _trained(question: PlanQuestion) -> tuple[Job, Fit | None]:
    """Return how the model is trained: as asked, or with the least stage of ZeRO that fits; and whether it fits."""
    job = question.job or Job(micro_batches=question.accumulated)
    memory = part_fit(question, job)
    if question.job is None and memory is not None:
        job = replace(job, stage=memory.stage or 0)
    if job.stage == 3 and not job.blocking:
        job = replace(job, blocking=default_blocking(question.topology))
    return job, memory


def part_fit(question: PlanQuestion, job: Job) -> Fit | None:
    """Return whether a rank's part of the model fits; None without a model."""
    if question.parameters is None:
        return None
    sharing = max(question.topology.ranks // job.parts, 1)
    return fit(question.parameters / job.parts, sharing, question.memory_bytes, question.dtype)


def choose_option(topology: Topology, size_bytes: float, algorithm: str = AUTO) -> Option:
    """Return the requested option; `auto` without a library is the fastest at this size.

    Args:
        topology: Of two ranks or more.
        size_bytes: More than 0.
        algorithm: As of `PlanQuestion`; one that this topology does not allow counts as `auto`, `nvls_tree` as `nvls`.
    """
    requested = "nvls" if algorithm == "nvls_tree" and topology.hosts == 1 else algorithm
    if requested in names(topology) or has_library(topology):
        return option(topology, requested if requested in names(topology) else AUTO)
    return fastest_option(options(topology), size_bytes)


def fastest_option(options: Sequence[Option], size_bytes: float) -> Option:
    """Return the one that takes least at a size, by the middle of its band."""
    return min(options, key=lambda option: float(option.predict([size_bytes]).times_s[0]))


def busbw(size_bytes: float, ranks: int, seconds: Band) -> Band:
    """Return the bus bandwidth of an all-reduce, bytes per second, with its band."""
    moved = bus_factor(ALL_REDUCE, ranks) * size_bytes
    return seconds.falling(lambda taken: moved / taken)


def _wires(question: PlanQuestion, chosen: Option, seconds: Band) -> PlannedWires:
    """Return what travels meanwhile: all of it, and through each interface of the busiest host."""
    topology, total = question.topology, chosen.sent * question.size_bytes
    if chosen.host_sent is None:
        return PlannedWires(total, total / topology.ranks, None, None)
    host = chosen.host_sent * question.size_bytes
    per_nic = host / topology.nics
    return PlannedWires(total, total / topology.ranks, host, seconds.falling(lambda taken: per_nic / taken))


def _scaling(
    topology: Topology, size: float, compute_s: float | None, reduction: Callable[[Topology, float], Option]
) -> tuple[Scale, ...]:
    """Return it on 1, 2, 4, ... hosts up to those of the topology, with the same algorithm.

    Hosts of different sizes are not taken apart.
    """
    if len(set(topology.ranks_per_host)) > 1:
        return ()
    counts = sorted({1 << power for power in range(topology.hosts.bit_length())} | {topology.hosts})
    scales = []
    for hosts in counts:
        sized = topology if hosts == topology.hosts else topology.sized(hosts)
        if sized.ranks < 2:
            scales.append(Scale(hosts, sized.ranks, None, None, Band(1.0, 1.0, 1.0) if compute_s else None, ""))
            continue
        chosen = reduction(sized, size)
        (price,) = priced(chosen, [size])
        rate = busbw(size, sized.ranks, price.seconds)
        efficiency = None
        if compute_s is not None:
            left = best_buckets(chosen, size, compute_s)[0].exposed
            efficiency = left.falling(lambda seconds: compute_s / (compute_s + seconds))
        scales.append(Scale(hosts, sized.ranks, price.seconds, rate, efficiency, price.extrapolated))
    return tuple(scales)


# -------------------------------------------------------------------------------------------------
# Which algorithm is fastest at which size, and where one overtakes another.

SIZES = tuple(10.0**power for power in range(3, 11))
CERTAIN = 1.96  # standard deviations, for 95%
HALVINGS = 10  # of the interval between two sizes, in the logarithm


@dataclass(frozen=True)
class Priced:
    """One algorithm at one size.

    Args:
        algorithm: Its name.
        basis: As of `options.Option`.
        seconds: With its band.
        extrapolated: Why; empty where tables support it.
    """

    algorithm: str
    basis: str
    seconds: Band
    extrapolated: str


@dataclass(frozen=True)
class Crossover:
    """A size from which another algorithm is the fastest, by the middle of the bands.

    Args:
        size_bytes: Where.
        before: Fastest below it.
        after: Fastest above it.
        band: Where it may be: more latency moves it up, faster wires do, too.
    """

    size_bytes: float
    before: str
    after: str
    band: Band


def priced(option: Option, sizes: Sequence[float]) -> list[Priced]:
    """Return an option at each of several sizes, bytes, more than 0."""
    bands = zip(sizes, option.predict(sizes).bands, strict=True)
    return [Priced(option.name, option.basis, band, option.why_extrapolated(size)) for size, band in bands]


def ranking(options: Sequence[Option], sizes: Sequence[float] = SIZES) -> dict[float, tuple[Priced, ...]]:
    """Return for every size the algorithms, the fastest first."""
    columns = [priced(option, sizes) for option in options]
    return {
        size: tuple(sorted((column[i] for column in columns), key=lambda row: row.seconds.value))
        for i, size in enumerate(sizes)
    }


def contenders(options: Sequence[Option]) -> list[Option]:
    """Return those among which to look for the fastest: a library's where there is one, else all.

    Schedules on a GPU fabric's figures count no cost per message: next to laws held against tables that flatters them.
    Switches between hosts that reduce are not everybody's.
    """
    library = [option for option in options if option.basis == LIBRARY and option.name != IN_NETWORK]
    return library or list(options)


def crossovers(options: Sequence[Option], sizes: Sequence[float] = SIZES) -> tuple[Crossover, ...]:
    """Return where the fastest changes between the first and the last of `sizes`, ascending."""
    by_name = {option.name: option for option in options}
    order = sorted(sizes)
    table = ranking(options, order)
    found = []
    for low, high in itertools.pairwise(order):
        before, after = table[low][0].algorithm, table[high][0].algorithm
        if before != after:
            first, then = by_name[before], by_name[after]
            for _ in range(HALVINGS):
                middle = math.sqrt(low * high)
                if first.predict([middle]).times_s[0] < then.predict([middle]).times_s[0]:
                    low = middle
                else:
                    high = middle
            size = math.sqrt(low * high)
            # It is latency saved per byte more, and neither of the two figures is sure.
            factor = math.exp(CERTAIN * math.hypot(first.law.spread[0], first.law.spread[-1]))
            found.append(Crossover(size, before, after, Band(size, size / factor, size * factor)))
    return tuple(found)


# -------------------------------------------------------------------------------------------------
# What bounds a collective: which figure of the topology its time follows, latency or bandwidth, of which links.
#
# Each figure is made a hundredth worse, the price taken again; the share by which the time follows is the figure's.
# Shares add up to about one where one path decides; where two paths are equally long both count.

WORSE = 1.01


@dataclass(frozen=True)
class Bound:
    """One figure that a time follows.

    Args:
        kind: `latency`, `bandwidth`, or `work` for what is spent beside links.
        where: `inside` hosts, `between` them, `switch`; empty for work.
        link: The link class, such as `infiniband`.
        share: By how much the time follows it: 1 is all.
    """

    kind: str
    where: str
    link: str
    share: float


def bounds(topology: Topology, algorithm: str, size_bytes: float) -> tuple[Bound, ...]:
    """Return what an all-reduce's time follows, the largest share first; shares under 1% left out.

    Args:
        topology: What it runs over.
        algorithm: As for `options.option`.
        size_bytes: More than 0.
    """
    now = float(option(topology, algorithm).predict([size_bytes]).times_s[0])
    found = []
    for kind, where, link, worse in slower_figures(topology, WORSE):
        then = float(option(worse, algorithm).predict([size_bytes]).times_s[0])
        share = (then / now - 1.0) / (WORSE - 1.0)
        found.append(Bound(kind, where, link, min(max(share, 0.0), 1.0)))
    found.append(Bound("work", "", "", max(0.0, 1.0 - sum(bound.share for bound in found))))
    return tuple(sorted((bound for bound in found if bound.share >= 0.01), key=lambda bound: -bound.share))
