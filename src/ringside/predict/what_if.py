"""What would change in a training step if one thing about it were different: `what_if(step, change)` -> `Answer`.

A step is work and what is left of the synchronisation after it. All ranks wait for the slowest, so work is the mean
over steps of the longest own time: recorded own times are replayed, as the monitor's prices are. What is left of the
synchronisation follows from one bucket's price and from when every rank has its buckets ready (`left_s`). Both ends of
a difference are priced with the same figures, which are wrong together: the band of the difference is that of the
figures, not of two prices side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.predict.laws.bumps import Floats
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.buckets import BACKWARD
from ringside.predict.plan.options import (
    AUTO,
    IN_NETWORK,
    TREES,
    Option,
    has_library,
    moved,
    option,
    paced,
    schedule_for,
    tilted,
    with_measured,
)
from ringside.predict.plan.plan import CERTAIN, choose_option
from ringside.predict.simulation.simulate import price, prices, simulate
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.topology.topology import Topology

# -------------------------------------------------------------------------------------------------
# What is left of a step's synchronisation, priced: by a law, by a schedule, and by a law moved as its schedule moves.
#
# A library's laws know no single link. With links of their own the law is that of the topology without them, times what
# the same algorithm's schedule takes with them by what it takes without.

MOST_LOOKED_UP = 512  # of larger schedules no message is looked up
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


def lawful(topology: Topology) -> Topology:
    """Return the topology that a library's laws apply to: without links of their own, where that makes one."""
    plain = replace(topology, overrides=())
    return plain if topology.overrides and has_library(plain) else topology


def _slowed(topology: Topology, algorithm: str, bucket_bytes: float, link: tuple[int, int, float]) -> Topology:
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
    if topology.ranks > MOST_LOOKED_UP:
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
    return topology.with_slow_link(src, dst, times * topology.rate_of(src, dst) / best)


# -------------------------------------------------------------------------------------------------
# A training step, what may be different about it, and the step that it would be then.


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
        backward_s: Backward's part of own times, [steps, ranks]; None: `BACKWARD` of them.
        wire_dtype: As what float32 gradients travel between hosts: a key of `WIRE_BYTES`.
        has_own_links: The topology's figures are those that the run recorded of its links and buckets.
        link_share: Which share of a message's time its link takes; the rest is the ranks', whatever the link.
        unseen: What the run did not show, and what is taken in its place, a line each.
    """

    topology: Topology
    size_bytes: float
    own_s: Floats
    buckets: int = 1
    algorithm: str = AUTO
    exposed_s: Floats | None = None
    measured: tuple[tuple[float, float], ...] = ()
    backward_s: Floats | None = None
    wire_dtype: str = "float32"
    has_own_links: bool = False
    link_share: float = 1.0
    unseen: tuple[str, ...] = ()

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

    def left_s(self, bucket_s: float) -> Floats:
        """Return what is left of the synchronisation after the slowest rank's own time, by step, float64 [steps].

        `buckets.exposed_s` of several ranks: a bucket is reduced once the last rank has it ready, and buckets one after
        the other. Backward fills them evenly, so the end is decided by the first one or by the last.

        Args:
            bucket_s: What one bucket's all-reduce takes, seconds.
        """
        own, count = self.own_s, self.buckets
        backward = BACKWARD * own if self.backward_s is None else self.backward_s
        first = own - backward * (1.0 - 1.0 / count) + count * bucket_s
        found: Floats = np.maximum(first, own + bucket_s).max(axis=1) - own.max(axis=1)
        return found


@dataclass(frozen=True)
class StepChange:
    """What is different; everything that is given changes at once.

    Args:
        slower: By rank, the share by which its own time grows: 0.12 is 12%.
        repaired: Ranks that are as fast as the others' median.
        slow_links: (sender, receiver, times): ranks, and how many times slower it carries what it is given.
        lost_rails: Hosts that lose one network interface each.
        oversubscription: Of the network among leaves: 2 for 2:1.
        sharp: Switches between hosts (or inside the only one) reduce.
        bucket_bytes: Of one bucket.
        hosts: How many.
        algorithm: Another one.
        link_rate: How many times as many bytes per second links between hosts carry.
        wire_dtype: As what float32 gradients travel between hosts: a key of `WIRE_BYTES`.
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
    link_rate: float | None = None
    wire_dtype: str | None = None

    @property
    def of_work(self) -> bool:
        """Whether it changes nothing but own times."""
        return self == StepChange(slower=self.slower, repaired=self.repaired)

    @property
    def of_run(self) -> bool:
        """Whether a run answers it by itself, without its network: own times and buckets."""
        return replace(self, bucket_bytes=None).of_work


HALVINGS = 40
_BLOCKS = 1.0 + 1.0 / 32.0  # a byte of scale for 32 elements: `engine/net/exchange/block_scaling.py`
WIRE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": _BLOCKS, "fp8_e4m3": _BLOCKS}
"""What a float32 element is between hosts, by the dtype that it travels as."""


def _changed(step: PredictedStep, change: StepChange) -> PredictedStep:
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
    wire_dtype = change.wire_dtype or step.wire_dtype
    if wire_dtype not in WIRE_BYTES:
        raise UsageError(f"gradients cannot travel as {wire_dtype!r}; there are {', '.join(WIRE_BYTES)}")
    if change.link_rate is not None or change.wire_dtype is not None:
        # Links carry as many more elements as these have fewer bytes; a message feels both at once.
        times = 1.0 if change.link_rate is None else change.link_rate
        times *= WIRE_BYTES[step.wire_dtype] / WIRE_BYTES[wire_dtype]
        topology = topology.with_link_rate(_felt(times, step.link_share))
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
        topology = _slowed(topology, algorithm, step.size_bytes / buckets, link)
    # What every rank works.
    own = _own_times(step, change)
    backward = step.backward_s
    if backward is not None:  # as much more or less as the rest
        backward = backward * np.divide(own, step.own_s, out=np.ones_like(own), where=step.own_s > 0)
    if topology.ranks != step.topology.ranks:
        rows, columns = _of_more_ranks(own, topology.ranks)
        own, backward = own[rows, columns], backward if backward is None else backward[rows, columns]
    return replace(
        step,
        topology=topology,
        own_s=own,
        backward_s=backward,
        buckets=buckets,
        algorithm=algorithm,
        wire_dtype=wire_dtype,
    )


def _felt(times: float, share: float) -> float:
    """Return how many times as fast messages are whose links, which take a share of their time, are `times` as fast."""
    return 1.0 / (share / times + 1.0 - share) if 0 < times < math.inf else times


def _of_more_ranks(own: Floats, ranks: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return whose recorded step is each rank's, as steps [steps, ranks] and ranks [ranks].

    Ranks beyond the recorded ones do what these did in other steps: with more ranks some rank is slow more often.
    """
    steps, recorded = own.shape
    number = np.arange(ranks)
    copies = -(-ranks // recorded)
    return (np.arange(steps)[:, None] + number // recorded * steps // copies) % steps, number % recorded


def _own_times(step: PredictedStep, change: StepChange) -> Floats:
    """Return own times with ranks slowed and repaired, float64 [steps, ranks], seconds."""
    own: Floats = step.own_s.copy()
    ranks = own.shape[1]
    for rank in (*change.slower, *change.repaired):
        if not 0 <= rank < ranks:
            raise UsageError(f"there is no rank {rank}: ranks are 0 to {ranks - 1}")
    if change.slower and not step.work_s:
        raise UsageError("a rank that is slower by a share: of what? Give what a step computes: --compute-seconds 0.25")
    for rank, share in change.slower.items():
        if not (math.isfinite(share) and share > -1):
            raise UsageError(f"rank {rank} cannot be {100 * share:g}% slower: more than -100%")
        own[:, rank] *= 1.0 + share
    # Repaired ranks are in no step slower than the others' median, as it was recorded.
    others = np.delete(step.own_s, change.repaired, axis=1)
    if change.repaired and not others.shape[1]:
        raise UsageError("repair some of the ranks: what they are repaired to is the others' median")
    for rank in change.repaired:
        own[:, rank] = np.minimum(own[:, rank], np.median(others, axis=1))
    return own


# -------------------------------------------------------------------------------------------------
# What a recorded run shows of its network.

OWN_LINKS = 1.2  # times what a changed bucket is said to take, either way, on links that the run recorded: by judgement


def as_measured(topology: Topology, algorithm: str, measured: Sequence[tuple[float, float]]) -> tuple[Topology, float]:
    """Return the topology over which an all-reduce takes what was measured, and which share of it links take.

    What a collective takes beyond its bytes at the links' recorded rate is latency of its rounds: ranks that are woken.
    Where its latency was measured, the rest is the ranks', too, but grows with bytes: copying and adding up. No faster
    link shortens either.

    Args:
        topology: With the links' recorded rates.
        algorithm: What was run: a name of `options.names`.
        measured: As of `PredictedStep`, the size of a bucket last.
    """
    assert topology.between is not None
    (size_bytes, seconds), *smaller = reversed(measured)
    latency_s, whole_s = prices(schedule_for(topology, algorithm), topology, [0.0, size_bytes])
    wire_s = whole_s - latency_s
    seen_s = smaller[0][1] if smaller else max(seconds - wire_s, 0.0)
    between = replace(topology.between, alpha_s=topology.between.alpha_s * seen_s / latency_s)
    times = wire_s / (seconds - seen_s)
    return replace(topology, between=between).with_link_rate(times), min(times, 1.0)


def bucket_seconds(step: PredictedStep) -> float:
    """Return what one bucket's all-reduce takes in a recorded step, seconds: as long as leaves what was left, in sum.

    For runs whose buckets were not timed, as where the process group's own collective reduces them.
    """
    assert step.exposed_s is not None
    left = float(step.exposed_s.mean())
    low, high = 0.0, left  # the last bucket is left whole
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if step.left_s(middle).mean() < left else (low, middle)
    return high


# -------------------------------------------------------------------------------------------------
# The difference that a change makes.

DAY_S = 86_400.0
TILT = CERTAIN / math.sqrt(2.0)  # two figures that go apart have the square root of two of one's spread
NOTHING = Band(0.0, 0.0, 0.0)
Options = tuple[Option | None, Option | None]
"""How buckets are reduced before and after; None: there is one rank."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The difference.

    Args:
        before: The step as it is.
        after: As it would be.
        delta: What a step takes longer, seconds, with its band; below 0: less.
        work_delta: Of that, own work.
        left: What is left of the synchronisation, before and after.
        extrapolated: Why no data supports it; empty where data does.
        unseen: What the run did not show, a line each.
    """

    before: PredictedStep
    after: PredictedStep
    delta: Band
    work_delta: Band
    left: tuple[Exposed, Exposed]
    extrapolated: tuple[str, ...]
    unseen: tuple[str, ...] = ()

    @property
    def step_s(self) -> tuple[float, float]:
        """What a step takes before and after, seconds."""
        return self.before.work_s + self.left[0].seconds.value, self.after.work_s + self.left[1].seconds.value

    @property
    def steps(self) -> tuple[Band, Band]:
        """The same with bands: those of the scatter of recorded work, and of what is left of the synchronisation."""
        return work(self.before) + self.left[0].seconds, work(self.after) + self.left[1].seconds

    @property
    def knows_work(self) -> bool:
        """Whether computation is known; where it is not, nothing follows for a day."""
        return self.before.work_s > 0

    @property
    def rank_hours_per_day(self) -> Band | None:
        """Rank-hours that a day of the slower of the two spends on the difference; below 0: that it could save.

        None: computation is not known.
        """
        if not self.knows_work:
            return None
        whole, faster = self.after.topology.ranks * DAY_S / 3600.0, min(self.step_s)
        return self.delta.map(lambda delta: whole * delta / (faster + abs(delta)))


def what_if(step: PredictedStep, change: StepChange) -> Answer:
    """Return what a change would do to a step.

    Raises:
        UsageError: The change cannot be: no such rank, link, rail, algorithm; the line names it.
    """
    after = _changed(step, change)
    first, second, grows = _remaining(step, after, change)
    longer = _mean(after.own_s.max(axis=1) - step.own_s.max(axis=1))
    why = () if change.of_work and step.recorded else tuple(dict.fromkeys(filter(None, (first.why, second.why))))
    return Answer(step, after, longer + grows, longer, (first, second), why, _unseen(step, change))


def _unseen(step: PredictedStep, change: StepChange) -> tuple[str, ...]:
    """Return what a recorded run did not show of a change, a line each."""
    if not step.recorded:
        return ()
    found = () if change.of_work else step.unseen
    if change.hosts is not None and change.hosts > step.topology.hosts:
        found += ("own times of the hosts added: theirs are those of the recorded ones in other steps",)
    if change.wire_dtype is not None and change.wire_dtype != step.wire_dtype:
        found += (f"what rounding to {change.wire_dtype} takes on a rank, and what it does to training",)
    return found


def _remaining(before: PredictedStep, after: PredictedStep, change: StepChange) -> tuple[Exposed, Exposed, Band]:
    """Return what is left of the synchronisation, and by how much that grows.

    Of a recorded run it is what was seen and what the prices grow by, which its measurements moved; never less than 0.
    """
    seen = None
    if before.exposed_s is not None:
        mean = _mean(before.exposed_s)
        seen = Band(mean.value, max(mean.low, 0.0), mean.high)
        if change.of_work:
            grows = NOTHING
            if before.measured:  # backward that takes longer hides more, or the last bucket comes later
                bucket_s = before.measured[-1][1]
                more = after.left_s(bucket_s) - before.left_s(bucket_s)
                grows = _mean(more) if np.abs(more).max() > 1e-9 else NOTHING  # no clock shows less
            return Exposed(None, seen, ""), Exposed(None, _not_negative(seen + grows), ""), grows
    # What was measured before moves how buckets are priced on both sides.
    old, new = (
        choose_option(lawful(step.topology), step.bucket_bytes, step.algorithm) if step.topology.ranks > 1 else None
        for step in (before, after)
    )
    if before.has_own_links:
        pace = _pace(old, before)
        options = _paced(old, pace), _paced(new, pace)
    else:
        run = None if old is None else with_measured(old, before.measured)
        options = old and moved(old, run), new and moved(new, run)
    first, second = (_exposed(step, option) for step, option in zip((before, after), options, strict=True))
    if seen is None:
        return first, second, _ordered(*(b - a for a, b in zip(first.seconds.ends, second.seconds.ends, strict=True)))
    grows = _growth(before, after, options, seen)
    then = _not_negative(seen + grows)
    why = second.why or "the run measured only what it had; the change is priced on its topology"
    return Exposed(first.bucket, seen, ""), Exposed(second.bucket, then, why), grows


def _paced(option: Option | None, pace: float) -> Option | None:
    return option and replace(option, law=paced(option.law, pace))


def _pace(ran: Option | None, run: PredictedStep) -> float:
    """Return how many times longer a run's buckets took than what was run is priced."""
    size, seconds = run.measured[-1]
    return 1.0 if ran is None else seconds / float(ran.predict([size]).times_s[0])


def _not_negative(band: Band) -> Band:
    return band.map(lambda seconds: max(seconds, 0.0))


def _ordered(value: float, *others: float) -> Band:
    """Return a value with the least and the most of all as its band."""
    return Band(value, min(value, *others), max(value, *others))


def _growth(before: PredictedStep, after: PredictedStep, options: Options, seen: Band) -> Band:
    """Return by how much a recorded run would have more left of its synchronisation.

    The same messages over other links are wrong together on both sides; what a change does to them then hangs on how
    much of their time is latency and how much is wire, and on how steady the run was. Other messages are as sure as
    their own price is.
    """
    alike = [(step.buckets, step.algorithm, step.topology.ranks) for step in (before, after)]
    if alike[0] == alike[1] and not before.has_own_links:  # there links and ranks are told apart
        tilts = []  # growth if latency is more of a message's time by so many standard deviations, seconds
        for share in (0.0, -TILT, TILT):
            pair = [option and tilted(option, share) for option in options]
            left = [_exposed(step, option).seconds for step, option in zip((before, after), pair, strict=True)]
            tilts.append(left[1].value - left[0].value)
        ends = [more * end / seen.value for more in tilts for end in seen.ends] if seen.value > 0 else tilts
        found = _ordered(tilts[0], *ends)
    else:
        first, second = (_exposed(step, option).seconds for step, option in zip((before, after), options, strict=True))
        found = second.map(lambda seconds: seconds - first.value)
    return found.map(lambda seconds: max(seconds, -seen.value))


def _exposed(step: PredictedStep, option: Option | None) -> Exposed:
    """Return what is left of the synchronisation after a step's work, mean over steps."""
    if option is None:
        return Exposed(NOTHING, NOTHING, "")
    topology, size = step.topology, step.bucket_bytes
    plain, ratio, why = lawful(topology), 1.0, option.why_extrapolated(size)
    if plain is not topology:
        schedule, why = schedule_for(plain, option.name), why or BY_SCHEDULE
        ratio = price(schedule, topology, size) / price(schedule, plain, size)
    bucket = option.predict([size]).bands[0].map(lambda seconds: seconds * ratio)
    if step.has_own_links:
        bucket = Band(bucket.value, bucket.value / OWN_LINKS, bucket.value * OWN_LINKS)
    left = bucket.map(lambda seconds: float(step.left_s(seconds).mean()))
    return Exposed(bucket, left, why)


def work(step: PredictedStep) -> Band:
    """Return the slowest rank's own time, with the band that the steps' scatter leaves; a single step has none."""
    return _mean(step.own_s.max(axis=1))


def _mean(values: Sequence[float] | Floats) -> Band:
    """Return the mean of what single steps took, with its 95% band."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    error = CERTAIN * float(found.std(ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return Band(mean, mean - error, mean + error)


# -------------------------------------------------------------------------------------------------
# A step's synchronisation played: who is guilty, and the times for a picture before and after.

MOST_RANKS = 4096  # a larger simulation takes seconds
SEGMENTS = 8  # of what is pipelined: a tree, a tensor through a switch


def played(step: PredictedStep) -> Timeline | None:
    """Return one bucket's all-reduce, each rank as late as its own work is longer than the shortest.

    A library's algorithm is played by the schedule that is like it (`options.schedule_for`).

    Returns:
        None where there is nothing to play: one rank, or more than `MOST_RANKS`.
    """
    topology = step.topology
    if not 2 <= topology.ranks <= MOST_RANKS:
        return None
    size, plain = step.bucket_bytes, lawful(topology)
    name = choose_option(plain, size, step.algorithm).name
    segments = SEGMENTS if name in (*TREES, "nvls") else 1
    own = np.median(step.own_s, axis=0)
    late = {rank: float(more) for rank, more in enumerate(own - own.min()) if more > 0}
    try:
        return simulate(schedule_for(plain, name), topology, size, late=late, segments=segments)
    except UsageError:  # too large to be played
        return None
