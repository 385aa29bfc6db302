"""A training step, what may be different about it, and the step that it would be then."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.predict.plan.options import AUTO, IN_NETWORK, option
from ringside.predict.topology.topology import Topology
from ringside.predict.what_if.price import lawful, slowed

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PredictedStep:
    """Training steps as they are.

    Args:
        topology: What they run over.
        size_bytes: Of all gradients.
        own_s: Own times, float64 [steps, ranks], seconds; a single row of zeros: computation is not known.
        buckets: In how many pieces gradients are reduced.
        algorithm: A name of `options.names`, or `auto`.
        exposed_s: What was measured to be left of the synchronisation, by step, float64 [steps]; None: it is priced.
        measured: Sizes of buckets and what they took, bytes and seconds.
    """

    topology: Topology
    size_bytes: float
    own_s: Floats
    buckets: int = 1
    algorithm: str = AUTO
    exposed_s: Floats | None = None
    measured: tuple[tuple[float, float], ...] = ()

    @property
    def recorded(self) -> bool:
        """Whether it was seen, not described."""
        return self.exposed_s is not None

    @property
    def bucket_bytes(self) -> float:
        """Of one bucket."""
        return self.size_bytes / self.buckets

    @property
    def work_s(self) -> float:
        """The slowest rank's own time, mean over steps, seconds."""
        return float(self.own_s.max(axis=1).mean())


@dataclass(frozen=True)
class StepChange:
    """What is different; everything that is given changes at once.

    Args:
        slower: By rank, the share by which its own time grows: 0.12 is 12 %.
        repaired: Ranks that are as fast as the others' median.
        slow_links: (sender, receiver, times): ranks, and how many times slower it carries what it is given.
        lost_rails: Hosts that lose one network interface each.
        oversubscription: Of the network among leaves: 2 for 2:1.
        sharp: Switches between hosts (or inside the only one) reduce.
        bucket_bytes: Of one bucket.
        hosts: How many.
        algorithm: Another one.
    """

    slower: dict[int, float] = field(default_factory=dict)
    repaired: tuple[int, ...] = ()
    slow_links: tuple[tuple[int, int, float], ...] = ()
    lost_rails: tuple[int, ...] = ()
    oversubscription: float | None = None
    sharp: bool = False
    bucket_bytes: float | None = None
    hosts: int | None = None
    algorithm: str | None = None

    @property
    def of_work(self) -> bool:
        """Whether it changes nothing but own times."""
        return self == StepChange(slower=self.slower, repaired=self.repaired)


def changed(step: PredictedStep, change: StepChange) -> PredictedStep:
    """Return the step as it would be; raise `UsageError` where it cannot be: no such rank, link, rail, algorithm."""
    # What it runs over.
    topology, buckets = step.topology, step.buckets
    if change.hosts is not None:
        topology = topology.sized(change.hosts)
    if change.oversubscription is not None:
        if topology.hosts == 1:
            raise UsageError(f"{topology.name} is one host: there is no network to oversubscribe; give --hosts")
        topology = replace(topology, oversubscription=change.oversubscription)
    for host in change.lost_rails:
        topology = topology.without_rail(host)
    if change.bucket_bytes is not None:
        if not (math.isfinite(change.bucket_bytes) and change.bucket_bytes > 0):
            raise UsageError(f"a bucket of {change.bucket_bytes:g} bytes: more than 0, such as 25MB")
        buckets = max(math.ceil(step.size_bytes / change.bucket_bytes - 1e-9), 1)
    # How buckets are reduced: a requested algorithm must be possible there.
    algorithm = step.algorithm
    if change.algorithm is not None or change.sharp:
        inside = "nvls" if topology.hosts == 1 and topology.nvls is not None else IN_NETWORK
        algorithm = change.algorithm or inside
        option(lawful(topology), algorithm)
    for link in change.slow_links:
        topology = slowed(topology, algorithm, step.size_bytes / buckets, link)
    # What every rank works.
    own = _own_times(step, change)
    if topology.ranks != step.topology.ranks:  # on other hosts the same work, rank for rank
        own = own[:, np.arange(topology.ranks) % own.shape[1]]
    return replace(step, topology=topology, own_s=own, buckets=buckets, algorithm=algorithm)


def _own_times(step: PredictedStep, change: StepChange) -> Floats:
    """Return own times with ranks slowed and repaired, float64 [steps, ranks], seconds."""
    own: Floats = step.own_s.copy()
    ranks = own.shape[1]
    for rank in (*change.slower, *change.repaired):
        if not 0 <= rank < ranks:
            raise UsageError(f"there is no rank {rank}: ranks are 0 to {ranks - 1}")
    if change.slower and not step.work_s:
        raise UsageError("a rank that is slower by a share: of what? Say what a step computes: --compute-seconds 0.25")
    for rank, share in change.slower.items():
        if not (math.isfinite(share) and share > -1):
            raise UsageError(f"rank {rank} cannot be {100 * share:g} % slower: more than -100 %")
        own[:, rank] *= 1.0 + share
    # Repaired ranks are in no step slower than the others' median, as it was recorded.
    others = np.delete(step.own_s, change.repaired, axis=1)
    if change.repaired and not others.shape[1]:
        raise UsageError("repair some of the ranks: what they are repaired to is the others' median")
    for rank in change.repaired:
        own[:, rank] = np.minimum(own[:, rank], np.median(others, axis=1))
    return own
