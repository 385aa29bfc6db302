"""What to make of a plan: how many hosts are worth it, and what would help most.

**The knee**: the most hosts to which every doubling trains at least `WORTH_IT` times as fast, in samples per second
with the same work per rank. Powers of two are tried, from one host up to `FURTHER` times those that were asked for.

**What would help**: one thing at a time is changed and the step, or where computation is not known the all-reduce, is
priced again, as `plan.bounds` does for small changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.step import MOST_ACTIONS, Job
from ringside.predict.topology.topology import LinkClass, Topology

WORTH_IT = 1.6  # of the 2 that a doubling could give
FURTHER = 4
MOST_RANKS = 1 << 14
LEAST_GAIN = 0.01  # of the time: what saves less is not named


@dataclass(frozen=True)
class Grown:
    """The step on so many hosts.

    Args:
        hosts: How many.
        ranks: How many.
        seconds: Of a step, with the same work per rank.
        doubling: How many times as fast it trains as on half as many hosts; None: that was not tried.
    """

    hosts: int
    ranks: int
    seconds: Band
    doubling: float | None


@dataclass(frozen=True)
class Worth:
    """How many hosts are worth it.

    Args:
        hosts: The knee.
        ranks: Its ranks.
        next: How many times as fast one more doubling trains, which is not worth it; None: the knee is at least here.
        scales: What was tried, ascending.
    """

    hosts: int
    ranks: int
    next: float | None
    scales: tuple[Grown, ...]


def worth(topology: Topology, seconds: Callable[[Topology], Band]) -> Worth | None:
    """Return the knee; None where nothing can be doubled: hosts of several sizes, or a single scale.

    Args:
        topology: Of as many hosts as were asked for.
        seconds: Of a step on a topology, which may refuse it with a `UsageError`.
    """
    if len(set(topology.ranks_per_host)) > 1:
        return None
    most = max(topology.ranks, MOST_RANKS)
    scales: list[Grown] = []
    for hosts in (1 << power for power in range((FURTHER * topology.hosts).bit_length())):
        here = hosts == topology.hosts
        if not here and (topology.between is None or hosts * topology.ranks_per_host[0] > most):
            continue
        sized = topology if here else topology.sized(hosts)
        try:
            band = seconds(sized)
        except UsageError:  # too few for how the model is divided
            continue
        before = scales[-1] if scales and 2 * scales[-1].hosts == hosts else None
        faster = None if before is None else 2 * before.seconds.value / band.value
        scales.append(Grown(hosts, sized.ranks, band, faster))
    if len(scales) < 2:
        return None
    at = next((i for i, scale in enumerate(scales) if i and (scale.doubling or 0.0) < WORTH_IT), len(scales))
    knee, poor = scales[at - 1], scales[at].doubling if at < len(scales) else None
    return Worth(knee.hosts, knee.ranks, poor, tuple(scales))


@dataclass(frozen=True)
class Help:
    """One change, and what it would save.

    Args:
        what: In words.
        saved: Of a step, or of the all-reduce where computation is not known, seconds.
        share: Of that time.
    """

    what: str
    saved: Band
    share: float


@dataclass(frozen=True)
class Situation:
    """What a time is a function of.

    Args:
        topology: What it runs over.
        size_bytes: Of all gradients.
        compute_s: Of a step; None: not known, and only the all-reduce counts.
        job: How it is trained.
        algorithm: A name of `options.names`, or `auto`.
    """

    topology: Topology
    size_bytes: float
    compute_s: float | None
    job: Job
    algorithm: str


def helps(now: Situation, seconds: Callable[[Situation], Band], fastest: str, buckets: int | None) -> tuple[Help, ...]:
    """Return what would help, the most first.

    Args:
        now: As it is.
        seconds: What it takes.
        fastest: The fastest algorithm at this size; empty: another than that of `now` is no choice.
        buckets: The best number of buckets; None: there are none.
    """
    # Rows measured on today's links say nothing of others: both sides are of the law alone.
    now = replace(now, topology=replace(now.topology, measured=()))
    before = seconds(now)
    found = []
    for what, then, parts in _changes(now, fastest, buckets):
        # Both times are wrong together: ends belong to ends.
        pairs = zip(before.ends, seconds(then).ends, strict=True)
        value, *others = (was - is_ / parts for was, is_ in pairs)
        found.append(Help(what, Band(value, min(value, *others), max(value, *others)), value / before.value))
    return tuple(sorted((one for one in found if one.share >= LEAST_GAIN), key=lambda one: -one.share))


def _changes(now: Situation, fastest: str, buckets: int | None) -> Iterator[tuple[str, Situation, float]]:
    """Yield (in words, the changed situation, how many of today's steps one of it is)."""
    for words, topology in _better(now.topology):
        yield words, replace(now, topology=topology), 1.0
    yield "half the bytes on the wire", replace(now, size_bytes=now.size_bytes / 2), 1.0
    if fastest and fastest != now.algorithm:
        yield f"--algorithm {fastest}", replace(now, algorithm=fastest), 1.0
    if now.compute_s is None:
        return
    if 2 * now.job.actions < MOST_ACTIONS:
        twice = replace(now.job, micro_batches=2 * now.job.micro_batches)
        yield f"--accumulate {twice.micro_batches}", replace(now, job=twice, compute_s=2 * now.compute_s), 2.0
    if buckets and buckets != now.job.buckets:
        yield f"{buckets} buckets", replace(now, job=replace(now.job, buckets=buckets)), 1.0
    if now.job.stage == 3:
        deeper = now.job.prefetch + 1
        yield f"--prefetch {deeper}", replace(now, job=replace(now.job, prefetch=deeper)), 1.0
        if now.job.reshard:
            yield "--no-reshard", replace(now, job=replace(now.job, reshard=False)), 1.0


def _better(topology: Topology) -> Iterator[tuple[str, Topology]]:
    for kind, where, link, better in slower_figures(topology, 0.5):
        words = "twice the bandwidth" if kind == "bandwidth" else "half the latency"
        if where != "switch":
            yield f"{words} of {link} {where} hosts", better
        elif (kind, link) == ("bandwidth", "nvls"):
            yield f"{words} of the switch that reduces", better


def slower_figures(topology: Topology, times: float) -> Iterator[tuple[str, str, str, Topology]]:
    """Yield what a message's time follows, one figure of the topology after the other.

    Args:
        topology: Whose.
        times: How many times longer what the figure stands for takes; below 1: it is better.

    Yields:
        `latency` or `bandwidth`; `inside`, `between` or `switch`; the link class, `nvls` or `sharp`; the topology with
        that figure changed.
    """
    several = {"inside": topology.largest_host > 1, "between": topology.hosts > 1}
    for where in ("inside", "between"):
        link: LinkClass | None = getattr(topology, where)
        if link is None or not several[where]:
            continue
        yield "latency", where, link.kind, _with_link(topology, where, replace(link, alpha_s=link.alpha_s * times))
        shared = link.host_bytes_per_s and link.host_bytes_per_s / times
        rate = replace(link, bytes_per_s=link.bytes_per_s / times, host_bytes_per_s=shared)
        yield "bandwidth", where, link.kind, _with_link(topology, where, rate)
    for name in ("nvls", "sharp"):
        switch = getattr(topology, name)
        if switch is not None:
            late, slow = replace(switch, alpha_s=switch.alpha_s * times), switch.bytes_per_s / times
            yield "latency", "switch", name, replace(topology, **{name: late})
            yield "bandwidth", "switch", name, replace(topology, **{name: replace(switch, bytes_per_s=slow)})


def _with_link(topology: Topology, where: str, link: LinkClass) -> Topology:
    """Return it with another link class, and the links and interfaces of their own changed alike."""
    before: LinkClass = getattr(topology, where)
    if where == "inside":
        return replace(topology, inside=link)
    rate = link.bytes_per_s / before.bytes_per_s
    delay = link.alpha_s / before.alpha_s if before.alpha_s else 1.0
    own = []
    for each in topology.overrides:
        alpha_s, bytes_per_s = each.alpha_s and each.alpha_s * delay, each.bytes_per_s and each.bytes_per_s * rate
        own.append(replace(each, alpha_s=alpha_s, bytes_per_s=bytes_per_s))
    rates = tuple((out * rate, into * rate) for out, into in topology.host_rates)
    return replace(topology, between=link, overrides=tuple(own), host_rates=rates)
