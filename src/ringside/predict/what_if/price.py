"""What is left of a step's synchronisation, priced: by a law, by a schedule, and by a law moved as its schedule moves.

A library's laws know no single link. With links of their own the law is that of the topology without them, times what
the same algorithm's schedule takes with them by what it takes without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ringside.errors import UsageError
from ringside.predict.band import Band
from ringside.predict.plan.buckets import BACKWARD, exposed_s
from ringside.predict.plan.options import Option, has_library, schedule_for
from ringside.predict.plan.plan import choose_option
from ringside.predict.simulation.simulate import price, simulate
from ringside.predict.topology.topology import Topology

MOST_RANKS = 512  # of larger schedules no message is looked up
BY_SCHEDULE = "no published table has a slow link: its effect is simulated"


@dataclass(frozen=True)
class Exposed:
    """What is left of a step's synchronisation.

    Args:
        bucket: What one bucket's all-reduce takes, seconds; None: it was not priced.
        seconds: What is left of all after the work, seconds.
        why: Why it is extrapolated; empty where tables support it.
    """

    bucket: Band | None
    seconds: Band
    why: str


def chosen(topology: Topology, algorithm: str, bucket_bytes: float) -> Option | None:
    """Return the way a bucket is reduced, on the topology that laws apply to; None: one rank has nobody to reduce with.

    Args:
        topology: What it runs over.
        algorithm: As for `plan.choose_option`.
        bucket_bytes: Of one bucket.

    Raises:
        UsageError: No such algorithm here.
    """
    return None if topology.ranks < 2 else choose_option(lawful(topology), bucket_bytes, algorithm)


def exposed(option: Option | None, topology: Topology, bucket_bytes: float, buckets: int, work_s: float) -> Exposed:
    """Return what is left of the synchronisation after a step's work.

    Args:
        option: How buckets are reduced, of `chosen`.
        topology: What it runs over.
        bucket_bytes: Of one bucket.
        buckets: How many.
        work_s: Of the slowest rank; `BACKWARD` of it hides buckets. 0: nothing does.
    """
    if option is None:
        return Exposed(Band(0.0, 0.0, 0.0), Band(0.0, 0.0, 0.0), "")
    predicted = option.predict([bucket_bytes])
    plain, ratio, why = lawful(topology), 1.0, option.why_extrapolated(bucket_bytes)
    if plain is not topology:
        schedule, why = schedule_for(plain, option.name), why or BY_SCHEDULE
        ratio = price(schedule, topology, bucket_bytes) / price(schedule, plain, bucket_bytes)
    bucket = Band(*(float(end[0]) * ratio for end in (predicted.times_s, predicted.low_s, predicted.high_s)))
    left = Band(*(exposed_s(buckets, end, BACKWARD * work_s) for end in bucket.ends))
    return Exposed(bucket, left, why)


def lawful(topology: Topology) -> Topology:
    """Return the topology that a library's laws apply to: without links of their own, where that makes one."""
    plain = replace(topology, overrides=())
    return plain if topology.overrides and has_library(plain) else topology


def _ratio(topology: Topology, plain: Topology, option: Option, size_bytes: float) -> float:
    schedule = schedule_for(plain, option.name)
    return price(schedule, topology, size_bytes) / price(schedule, plain, size_bytes)


def slowed(topology: Topology, algorithm: str, bucket_bytes: float, link: tuple[int, int, float]) -> Topology:
    """Return the topology with a link that carries its messages so many times slower than it carries them now.

    Between hosts a message may have a share of several interfaces: what it gets of them is what becomes less.

    Args:
        topology: What is run over.
        algorithm: As for `plan.choose_option`.
        bucket_bytes: Of one all-reduce.
        link: Sender, receiver, times.

    Raises:
        UsageError: There is no such link, the algorithm sends nothing over it, or it cannot be so many times slower.
    """
    src, dst, times = link
    found = topology.with_slow_link(src, dst, times)
    if topology.ranks > MOST_RANKS:
        return found
    # The best rate that a message over the link gets now, and to whom else its sender sends.
    name = choose_option(lawful(topology), bucket_bytes, algorithm).name
    timeline = simulate(schedule_for(lawful(topology), name), topology, bucket_bytes)
    best, others = 0.0, set[int]()
    for sent in timeline.sent():
        others |= set(sent.dst[sent.src == src].tolist())
        here = (sent.src == src) & (sent.dst == dst) & (sent.size_bytes > 0)
        took = (sent.leave_s - sent.begin_s)[here]
        best = max([best, *(sent.size_bytes[here] / took.clip(1e-15)).tolist()])
    if not best:
        kind = topology.class_of(src, dst)
        order = sorted(others, key=lambda other: (topology.class_of(src, other) != kind, abs(other - dst)))
        used = "".join(f", such as {src}:{other}" for other in order[:1])
        raise UsageError(f"{name} sends nothing from rank {src} to rank {dst}: take a link it uses{used}")
    return topology.with_slow_link(src, dst, times * topology.rate_of(src, dst) / best) if best < math.inf else found
