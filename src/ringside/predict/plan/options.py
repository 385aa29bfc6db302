"""What an all-reduce may be done with on a topology, each way with its price, its band, and what supports it.

Two sources of prices. A GPU *library*'s ways (ring, tree, NVLS, NVLS tree) follow the laws of `fabric.py`, which are
held against published tables. Every other algorithm is priced by its *schedule*, exactly, on the topology's figures;
its band is that of the figures, and no table supports it: it is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import ArrayLike

from ringside.errors import UsageError
from ringside.predict.laws import fabric
from ringside.predict.laws.bumps import Floats
from ringside.predict.laws.calibrate import NOISY, Band, Calibration, Prediction, expect, fit, transfer
from ringside.predict.laws.fabric import BASE, PIPELINE, RATE, SPREAD, Candidate, Law, PipelineLaw, TermsLaw
from ringside.predict.laws.nccl import switches
from ringside.predict.simulation.simulate import prices
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.tables.table import ALL_REDUCE
from ringside.predict.topology.topology import MeasuredTimes, Topology
from ringside.schedule import ALGORITHMS, Round, Schedule, by_name, hierarchical, in_network, two_tree
from ringside.text import did_you_mean

# -------------------------------------------------------------------------------------------------
# A schedule's exact price as a curve with a band: what is latency in it, what is wire, and how sure either is.

SPREADS = np.array([SPREAD[BASE], SPREAD[RATE]])  # of a cluster's latency and rate beside its topology's
SEGMENTS = (1, 8, 64)
MOST_MESSAGES = 1 << 19  # ranks times segments that are simulated


@dataclass(eq=False)
class Scheduled(TermsLaw):
    """The price of a schedule as a backbone for `calibrate.expect`: factors of its latency and of its time on wires.

    A tree that is not cut into segments takes its whole tensor over every level, one after the other; nobody runs it
    so. With `pipelined`, every size takes the best of `SEGMENTS`.

    Args:
        schedule: Of as many ranks as the topology.
        topology: What it runs over.
        fixed_s: What is spent beside it, seconds.
        pipelined: Whether chunks may be cut.
        tensors: How many of the sizes that are asked for are the schedule's tensor.
    """

    schedule: Schedule
    topology: Topology
    fixed_s: float = 0.0
    pipelined: bool = False
    tensors: float = 1.0

    drift = PIPELINE.drift[[BASE, RATE]]  # as of a cluster's latency and rate

    def __post_init__(self) -> None:
        most = max(MOST_MESSAGES // self.schedule.ranks, 1) if self.pipelined else 1
        self.segments = [one for one in SEGMENTS if one <= most]
        self._known: dict[float, tuple[float, float]] = {}

    def terms(self, sizes: Floats) -> Floats:
        """Return latency and time on wires in seconds, float64 [n, 2]."""
        new = sorted({float(size) for size in sizes} - set(self._known))
        best = np.full((len(new), 2), np.inf)
        for segments in self.segments if new else ():
            # The price of an empty tensor is the latency; what a size takes beyond it is time on wires.
            whole = [self.tensors * size for size in new]
            found = prices(self.schedule, self.topology, [0.0, *whole], segments=segments)
            latency, total = found[0] + self.fixed_s, found[1:] + self.fixed_s
            better = total < best.sum(axis=1)
            best[better] = np.stack([np.full(len(new), latency), total - latency], axis=1)[better]
        floor = 1e-12  # links without latency and tensors of a byte: a logarithm needs a number
        for size, (latency, wire) in zip(new, np.maximum(best, floor), strict=True):
            self._known[size] = (float(latency), float(wire))
        return np.array([self._known[float(size)] for size in sizes]).reshape(-1, 2)


# -------------------------------------------------------------------------------------------------
# NVLS: every GPU reduces its slice by reading it through the switch, and writes the sum through it to all.
#
# NVIDIA's NVLink SHARP (NCCL 2.17). A GPU sends its whole tensor for others to add up and its own slice's sum, and
# receives its slice's sum and the whole result: S + S/n each way. So with W bytes per second of every GPU's way to the
# switch, algbw tends to W n/(n+1) when it is pipelined; no bus bandwidth of a ring can be read off it.


def nvls(n: int) -> Schedule:
    """Return the NVLS all-reduce of `n` ranks around one switch, vertex n, that reduces and multicasts.

    n chunks, 4 rounds (0 for one rank): all send all chunks up, the switch hands owner r the sum of chunk r, owners
    send it up again, and the switch hands it to all, the owner too. (n+1)/n of the tensor sent and received per rank
    over one port. Canonical: the switch adds in rank order. Pipeline it: in 64 segments it is what NVLS does.

    Raises:
        UsageError: n < 1.
    """
    alone = n <= 1
    return Schedule("nvls", n, max(n, 1), 0 if alone else 4, _nvls_round, (n,), switches=0 if alone else 1)


def _nvls_round(n: int, k: int) -> Round:
    rank = np.arange(n, dtype=np.int32)
    if k in (1, 2):  # an owner's own chunk
        switch = np.full(n, n, dtype=np.int32)
        src, dst, chunk = (switch, rank, rank) if k == 1 else (rank, switch, rank)
    else:  # everybody's every chunk
        each, chunk = np.repeat(rank, n), np.tile(rank, n)
        switch = np.full(n * n, n, dtype=np.int32)
        src, dst = (each, switch) if k == 0 else (switch, each)
    return Round(src, dst, chunk, np.full(len(chunk), k == 0))


GPU_LINKS = ("nvlink", "nvswitch", "pcie")
# Published all-reduce tables that the laws were held against (docs/predict-score.md) end here.
TABLE_HOSTS, TABLE_RACKS, TABLE_BYTES = 4, 2, 17179869184.0
TREES = ("tree", "two_tree", "chain")  # a library's tree is the pipelined two-tree
LIBRARY = "library"
SCHEDULE = "schedule"
AUTO = "auto"
IN_NETWORK = "in_network"
NO_SHARP = "no published table shows switches between hosts that reduce"


@dataclass(frozen=True, eq=False)
class Option:
    """One way to do an all-reduce on a topology.

    Args:
        name: Of the algorithm.
        basis: `library`: a law held against published tables; `schedule`: priced by its transfers.
        law: What is expected of it.
        sent: What all ranks send together, in tensors; a switch's sends not counted.
        host_sent: What the busiest host sends into the network, in tensors; None: not known, or only one host.
        rounds: Rounds one after the other; None: a library's, which pipelines.
        beyond: Why its prices are extrapolated at any size; empty: they are not.
        measured: What was measured of it, and moved the law; None: nothing was.
        pace: How many times longer what was measured took than its law predicts.
    """

    name: str
    basis: str
    law: Law
    sent: float
    host_sent: float | None
    rounds: int | None
    beyond: str = ""
    measured: Calibration | None = None
    pace: float = 1.0

    @cached_property
    def _calibration(self) -> Calibration:
        return expect(self.law) if self.measured is None else self.measured

    def predict(self, sizes: ArrayLike) -> Prediction:
        """Return times with 95% bands for sizes in bytes, more than 0; `extrapolated` where no table supports them."""
        predicted = self._calibration.predict(sizes)
        far = np.full(predicted.sizes.shape, bool(self.beyond)) | (predicted.sizes > TABLE_BYTES)
        return replace(predicted, extrapolated=far)

    def why_extrapolated(self, size_bytes: float) -> str:
        """Return why a price is extrapolated; empty where tables support it."""
        if self.beyond or size_bytes <= TABLE_BYTES:
            return self.beyond
        return f"published tables end at {TABLE_BYTES / 1e9:.0f} GB"


def has_library(topology: Topology) -> bool:
    """Whether a GPU library's laws apply: GPU links inside its hosts, and none that differs from its class."""
    inside = topology.inside
    return inside is not None and inside.kind in GPU_LINKS and not topology.overrides


def names(topology: Topology) -> tuple[str, ...]:
    """Return the algorithms that a topology allows, a library's first."""
    library = tuple(candidate.name for candidate in _of_fabric(topology))
    skip = (*library, *(TREES if library and topology.hosts > 1 else ()))
    return library + tuple(name for name in ALGORITHMS if name not in skip and _is_possible(name, topology))


def option(topology: Topology, name: str = AUTO) -> Option:
    """Return a way by its name; `auto`: what the library chooses.

    Raises:
        UsageError: One rank has nobody to reduce with, there is no such algorithm here (the message lists those there
            are), or `auto` where no library's law applies.
    """
    if topology.ranks < 2:
        raise UsageError(f"{topology.name}: one rank has nobody to reduce with; give more --hosts or --ranks-per-host")
    if name == AUTO and has_library(topology):
        # The shortest way for small tensors, the library's preferred rate for large ones.
        chosen = fabric.chosen_by_nccl(fabric.candidates(topology))
        return _library_option(topology, chosen, fabric.law(topology))
    for candidate in _of_fabric(topology):
        if candidate.name == name:
            law = fabric.law(topology, algorithm=name)  # with its own latency and rate, not those of the best
            mean = law.mean.copy()
            mean[0] = math.log(fixed_s(topology) + candidate.hops_s)
            mean[3] = math.log(candidate.bytes_per_s)
            return _library_option(topology, candidate, replace(law, mean=mean))
    if name not in ALGORITHMS or not _is_possible(name, topology):
        known = names(topology)
        there = f"there are {', '.join(known)}"
        raise UsageError(f"there is no {name!r}{did_you_mean(name, known)} on {topology.name}; {there}")
    # By its schedule. What all ranks send is counted by closed forms: schedules may be huge.
    schedule = schedule_for(topology, name)
    law = schedule_law(Scheduled(schedule, topology, fixed_s(topology), pipelined=name in TREES))
    n, hosts = topology.ranks, topology.hosts
    power = 1 << (n.bit_length() - 1)
    counted = {
        "in_network": float(n),
        "one_shot": float(n) * (n - 1),
        "recursive_doubling": power * (power.bit_length() - 1) + 2.0 * (n - power),
        "halving_doubling": 2.0 * (power - 1) + 2.0 * (n - power),
    }
    around = {"hierarchical": 2.0 * (hosts - 1) / hosts, "ring": 2.0 * (n - 1) / n}
    host_sent = around.get(name) if hosts > 1 else None
    beyond = f"no published table of {name} here, priced by its schedule"
    return Option(name, SCHEDULE, law, counted.get(name, 2.0 * (n - 1)), host_sent, schedule.rounds, beyond)


def options(topology: Topology) -> list[Option]:
    """Return every way that a topology allows; errors as of `option`."""
    return [option(topology, name) for name in names(topology)]


BY_SCHEDULE = {  # who carries a collective where there is no library
    "all_gather": "ring_all_gather",
    "reduce_scatter": "ring_reduce_scatter",
    "alltoall": "direct_all_to_all",
    "sendrecv": "chain_broadcast",
}
NO_TABLE = "no published table of {} between hosts"


def collective(topology: Topology, name: str) -> Option:
    """Return a collective that is no all-reduce.

    Args:
        topology: Of two ranks or more.
        name: `all_gather` and `reduce_scatter` of a whole tensor, moved as a ring does; `alltoall` of a tensor that
            every rank has and divides among all; `sendrecv` of one from a rank to another, of another host if any.
    """
    if name == "sendrecv" and topology.ranks > 2:
        nics = topology.nics
        topology = topology.sized(2, 1) if topology.hosts > 1 else topology.sized(1, 2)
        topology = replace(topology, nics=nics)
    n = topology.ranks
    sent = 1.0 if name == "sendrecv" else n - 1.0
    if has_library(topology):
        law, here, beyond = _held_to_tables(topology, fabric.law(topology, name), collective=name)
        if not beyond and name in fabric.STRAIGHT and topology.hosts > 1:
            beyond = NO_TABLE.format(name)
        return Option(name, LIBRARY, law, sent, None, None, beyond, measured=here)
    schedule = by_name(BY_SCHEDULE[name], n)
    backbone = Scheduled(schedule, topology, tensors=n if name == "alltoall" else 1.0)
    law = Law(np.zeros(2), SPREADS, name, backbone=backbone, noise=NOISY)
    beyond = f"no published table of {name} here, priced by its schedule"
    return Option(name, SCHEDULE, law, sent, None, schedule.rounds, beyond)


# ------------------------------------------------------------------------------------------------ a library's


def _of_fabric(topology: Topology) -> list[Candidate]:
    return [*fabric.candidates(topology), *fabric.switched(topology)] if has_library(topology) else []


def _library_option(topology: Topology, candidate: Candidate, law: Law) -> Option:
    """Return one of a library's algorithms."""
    law, here, beyond = _held_to_tables(topology, law, name=candidate.name)
    n, hosts = topology.ranks, topology.hosts
    inside = {"nvls": n + 1.0, "nvls_tree": float(n + hosts) + 2.0 * (hosts - 1)}  # every host's switch, and a tree
    inside[IN_NETWORK] = float(n + 2 * hosts) if topology.nvls is not None else 2.0 * (n - hosts) + hosts
    sent = inside.get(candidate.name, 2.0 * (n - 1))
    around = 2.0 * (n - 1) / n
    once = candidate.name == IN_NETWORK or hosts == 2
    host_sent = None if hosts == 1 else around if candidate.name == "ring" else 1.0 if once else 2.0
    rounds = 2 * (n - 1) if candidate.name == "ring" else None
    # A network that is less than its interfaces is beyond published tables at any number of hosts.
    sharp = NO_SHARP if candidate.name == IN_NETWORK else ""
    over = "no published table is of an oversubscribed network" if topology.oversubscription > 1 else ""
    rail = "no published table is of a host with a rail less" if topology.host_rates else ""
    beyond = "; ".join(filter(None, [sharp, over, rail, beyond]))
    return Option(candidate.name, LIBRARY, law, sent, host_sent, rounds, beyond, measured=here)


def _held_to_tables(
    topology: Topology, law: Law, name: str = "", collective: str = ALL_REDUCE
) -> tuple[Law, Calibration | None, str]:
    """Return a law moved by what tables of the same hardware had beside theirs, and a table's own fit of this scale.

    The law's band widens with every doubling of hosts beyond published tables and own ones; that they end is returned
    in words.

    Tables of the same collective count, or where there is none those of all-reduce: whatever makes a cluster slower
    than its datasheet makes all of its collectives so. Those whose bytes go straight to their receiver have other
    protocols: they take over latency and rate, not what an all-reduce has at one size (docs/predict-public.md).

    Args:
        topology: With what was measured of it.
        law: What is expected at its scale.
        name: Of the algorithm, where the collective is an all-reduce.
        collective: Which.
    """
    own = [times for times in topology.measured if times.collective == collective]
    own = own or [times for times in topology.measured if times.collective == ALL_REDUCE]
    fitted, here = [], None
    for times in own:
        scale = replace(topology.sized(len(times.ranks_per_host), times.ranks_per_host), nics=times.nics, measured=())
        fitted.append(_fit_of(scale, times))
        chosen = fabric.chosen_by_nccl(fabric.candidates(scale)).name
        forced = [each.name for each in _of_fabric(scale) if times.algorithm.lower().startswith(each.name)]
        alike = collective != ALL_REDUCE or (*forced, chosen)[0] == name
        if times.collective == collective and times.ranks_per_host == topology.ranks_per_host and alike:
            here = fitted[-1]
    law = transfer(fitted, law) if fitted else law
    if collective in fabric.STRAIGHT and any(times.collective != collective for times in own):
        law = replace(law, beside=None)
    # How far the hosts are beyond all tables.
    most, unit = (TABLE_RACKS, "racks") if fabric.is_rack(topology) else (TABLE_HOSTS, "hosts")
    largest = max((len(times.ranks_per_host) for times in topology.measured), default=0)
    if topology.hosts <= max(most, largest):
        return law, here, ""
    doublings = math.log2(topology.hosts / max(most, largest))
    whose = "your tables end" if largest > most else "published tables end"
    beyond = f"{whose} at {max(most, largest)} {unit}"
    return replace(law, spread=np.sqrt(law.spread**2 + doublings * PIPELINE.drift**2)), here, beyond


@cache
def _fit_of(scale: Topology, times: MeasuredTimes) -> Calibration:
    law = fabric.law(scale, times.collective, times.algorithm)
    return fit(times.sizes_bytes, times.times_s, replace(law, switches=switches(scale, times.collective)))


# ------------------------------------------------------------------------------------------------ by schedule


def fixed_s(topology: Topology) -> float:
    """Return what a GPU library spends beside hops, seconds; 0 among processes, whose latencies hold it."""
    if not has_library(topology):
        return 0.0
    return fabric.LAUNCH_S + fabric.PROXY_S * (topology.hosts > 1)


def schedule_for(topology: Topology, name: str) -> Schedule:
    """Return the schedule called `name` for a topology's ranks; `hierarchical` is cut at its hosts.

    So is `in_network` among hosts of several ranks: a rank hands its host's slice to the switches. A library's ways
    are played by what is like them: NVLS as itself, the NVLS tree as `hierarchical`, the tree as two.
    """
    if name in ("hierarchical", "nvls_tree"):
        return hierarchical(topology.ranks_per_host)
    if name == IN_NETWORK and 1 < topology.hosts < topology.ranks:
        return hierarchical(topology.ranks_per_host, outer=in_network)
    if name == "nvls":
        return nvls(topology.ranks)
    if name == "tree" and has_library(topology) and topology.hosts > 1:
        return two_tree(topology.ranks)
    return by_name(name, topology.ranks)


def _is_possible(name: str, topology: Topology) -> bool:
    if name == "hierarchical":
        return 1 < topology.hosts < topology.ranks
    if name == IN_NETWORK:
        return topology.switch is not None
    return True


def schedule_law(backbone: Scheduled) -> Law:
    """Return what is expected of a schedule: its price, as sure as its topology's latencies and rates are."""
    schedule, topology = backbone.schedule, backbone.topology
    words = f"{topology.name}: {schedule.name} by its schedule of {schedule.rounds} rounds"
    noise = 1.0 if has_library(replace(topology, overrides=())) else NOISY
    return Law(np.zeros(2), SPREADS, words, backbone=backbone, noise=noise)


# -------------------------------------------------------------------------------------------------
# What a run measured moves what is expected of the same hardware: all of its ways, alike.
#
# One size shows how much slower everything is than its law predicts, not whether latency or wire is to blame: first the
# whole law takes that pace, then what several sizes show moves its figures (`calibrate.fit`). What was seen counts more
# than a law that was not made for the hardware.

OPEN = 1.0  # standard deviation of a figure's logarithm beside a law that was not made for the hardware


def with_measured(option: Option, points: Sequence[tuple[float, float]]) -> Option:
    """Return an option that was measured on the very hardware: what was seen there counts more than the law.

    Args:
        option: What was run.
        points: Sizes in bytes and what they took, seconds; none: it stays as it is.
    """
    if not points:
        return option
    sizes, times = zip(*points, strict=True)
    pace = math.exp(float(np.mean(np.log(times) - np.log(option.predict(sizes).times_s))))
    law = paced(option.law, pace)
    # A run's figure is a median: little noise is left.
    law = replace(law, spread=np.maximum(law.spread, OPEN), noise=1.0)
    return replace(option, law=law, measured=fit(sizes, times, law), pace=pace)


def moved(option: Option, seen: Option | None) -> Option:
    """Return an option with what another was measured to have beside its law: all on one hardware are moved alike.

    Args:
        option: What was not run.
        seen: What `with_measured` returned; only its pace is taken over where the two laws have other figures.
    """
    if seen is None or seen.measured is None:
        return option
    law = paced(option.law, seen.pace)
    return replace(option, law=transfer([seen.measured], law) if len(seen.law.mean) == len(law.mean) else law)


def paced(law: Law, pace: float) -> Law:
    """Return a law of which everything, latency and wire, takes `pace` times as long: one size shows no more."""
    return _shifted(law, math.log(pace), math.log(pace))


def tilted(option: Option, share: float) -> Option:
    """Return an option whose latency takes longer and whose wires less, by `share` of what either is not known.

    Args:
        option: What is run.
        share: In standard deviations; below 0: the other way round.
    """
    first, last = float(option.law.spread[0]), float(option.law.spread[-1])
    return replace(option, law=_shifted(option.law, share * first, -share * last), measured=None)


def _shifted(law: Law, latency: float, wire: float) -> Law:
    """Return a law with so much more latency and time on wires, in logarithms."""
    mean = law.mean.copy()
    mean[0] += latency
    mean[-1] += -wire if isinstance(law.backbone, PipelineLaw) else wire  # a pipeline's last figure is a rate
    return replace(law, mean=mean)


# -------------------------------------------------------------------------------------------------
# How sure a simulation is: the band of clusters that are like its topology.

UNSEEN = "no published table is of a schedule"


def simulated_band(timeline: Timeline) -> Band:
    """Return what a simulation took, with the band of clusters like its topology, seconds; lateness is as given."""
    if timeline.schedule.rounds == 0:
        return Band(timeline.seconds, timeline.seconds, timeline.seconds)
    law = schedule_law(Scheduled(timeline.schedule, timeline.topology))
    middle, low, high = expect(law).predict([max(timeline.size_bytes, 1.0)]).bands[0].ends
    return Band(timeline.seconds, timeline.seconds + low - middle, timeline.seconds + high - middle)
