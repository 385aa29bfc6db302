"""What an all-reduce costs on a cluster, from what the cluster is made of: base cost, hops, and the narrowest way.

Base cost plus critical-path hops by link class give the latency; the rate is that of the best algorithm over the
narrowest link class; `PipelineLaw` joins the two. The laws, with n ranks on h hosts of g:

- ring: every rank sends 2(n-1)/n of the tensor, so algbw = W·n/(2(n-1)); all of a host's interfaces carry the ring.
- NVLS (a switch that reduces, one host): algbw = W·n/(n+1).
- tree between two hosts: each host sends the tensor once and receives it once, so algbw is the host's network rate:
  twice a ring's. From three hosts on an inner host sends it twice. Inside the host the chain passes it up and down.
- NVLS tree: the same between hosts, the switch inside.
- switches between hosts that reduce (SHARP): a host sends the tensor once and receives it once, however many there are.
- all-gather, reduce-scatter: once round the ring, so twice an all-reduce's algbw.
- all-to-all of S per rank: every rank sends S/n to each other one, straight there, so a host of g sends g·S·(n-g)/n
  into the network, where a ring crosses it once. A rank's own part takes as long as any other: published tables have
  the same algbw with 2, 4 and 8 ranks.
- send and receive: a message of its own, over a port or one interface.

Ranks of a host share its interfaces: the network's rate is the host's, whatever the number of ranks.

The efficiencies are what published tables reach of these laws (docs/predict-score.md lists which and how well they hold
on tables that had no part in them); everything else comes from the topology.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ringside.errors import UsageError
from ringside.predict.laws.bumps import Beside, Floats
from ringside.predict.tables.table import ALL_REDUCE, bus_factor
from ringside.predict.topology.topology import Topology

# -------------------------------------------------------------------------------------------------
# The time of a collective over its size: latency, pipeline fill, bandwidth. Four figures, each with a meaning.
#
# A collective that forwards its tensor in segments over h hops takes h·α + S/B, and the pipeline's fill. With the best
# segment length the fill is 2·sqrt(h·α·S/B) (Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication:
# theory, practice, and experience", 2007); a library grows its segments only up to a largest one, and from there on the
# fill stays what it is. With u = S/(B·t0) the ratio of the bytes' time to the latency:
#
#     t(S) = t0 · (1 + u + ramp·√u / (1 + ramp·√u/depth))
#
# `ramp` is how steeply the fill grows, `depth` where it ends, both in units of t0. Protocols and channel counts that
# change with the size follow the same curve up to bumps, which `calibrate.py` keeps as what they are.

BASE, RAMP, DEPTH, RATE = range(4)


class PipelineLaw:
    """The curve above, as a backbone: four figures, of which logarithms are fitted."""

    drift: Floats = np.array([0.20, 0.20, 0.20, 0.12])
    """How much each figure differs between scales of one cluster beyond its law: standard deviations, float64 [4]."""

    def log_slopes(self, theta: Floats, sizes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the logarithm of the time and its derivatives.

        Args:
            theta: Logarithms of t0 (seconds), ramp, depth and B (bytes per second), float64 [4].
            sizes: Bytes, more than 0, [n].

        Returns:
            float64 [n], of seconds; float64 [n, 4].
        """
        base, ramp, depth, rate = np.exp(theta)
        u = np.asarray(sizes, dtype=np.float64) / (rate * base)
        root = np.sqrt(u)
        bent = 1.0 + ramp * root / depth
        fill = ramp * root / bent
        total = 1.0 + u + fill
        by_root = fill / (root * bent)  # d fill / d root, and half of it per d log u
        slopes = np.empty((len(u), 4))
        slopes[:, RATE] = -(u + 0.5 * root * by_root) / total
        slopes[:, BASE] = 1.0 + slopes[:, RATE]
        slopes[:, RAMP] = root * by_root / total
        slopes[:, DEPTH] = (fill - root * by_root) / total
        return np.log(base * total), slopes


PIPELINE = PipelineLaw()


class TermsLaw:
    """A backbone whose time is a sum of terms, each times one figure."""

    drift: Floats
    """As of `PipelineLaw`, float64 [k]."""

    def terms(self, sizes: Floats) -> Floats:
        """Return the terms before their figures, seconds, float64 [sizes, k]."""
        raise NotImplementedError

    def log_slopes(self, theta: Floats, sizes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the logarithm of the time and its derivatives by `theta`: float64 [n], [n, k]."""
        parts = self.terms(np.asarray(sizes, dtype=np.float64)) * np.exp(theta)
        total = parts.sum(axis=1)
        return np.log(total), parts / total[:, None]


# -------------------------------------------------------------------------------------------------
# What a topology's links and switches give: latency and rate of every way.

LAUNCH_S = 9e-6  # a kernel launched, a communicator's ranks met; GPU libraries
RING = 0.98  # of the link's rate
NVLS = 0.98
NVLS_RACK, RACK_HOP = 0.86, 4.0  # where NVLink spans a rack: of the rate, and times a hop inside one server
NVLS_AMONG_HOSTS = 0.92
CHAIN = 0.53  # of the link's rate: the tensor passes up and down
NETWORK_RING = 0.98
NETWORK_TREE = 0.87
NETWORK_NVLS_TREE = 0.94

STRAIGHT = ("alltoall", "sendrecv")  # collectives whose bytes go straight to who wants them
BETWEEN_HOSTS = 3.0  # doublings of ranks that one host and several are apart; chosen by hand
PROXY_S = 6e-6  # a proxy thread that hands messages to the network interface
# The pipeline's fill (`PipelineLaw`) inside one host, among hosts, and inside a host whose ranks are one hop apart.
RAMPS, DEPTHS = (2.0, 4.0, 0.9), (7.5, 7.0, 6.0)
# What a cluster has beside its topology, from the spread of published tables: standard deviations of the logarithm.
SPREAD = (0.40, 0.50, 0.50, 0.17)


@dataclass(frozen=True)
class Candidate:
    """One algorithm on a cluster.

    Args:
        name: `ring`, `tree`, `nvls` or `nvls_tree`.
        hops_s: Its critical path without bytes, seconds.
        bytes_per_s: Tensor bytes per second when the pipeline is full (algbw).
        bound: The link class that limits the rate: `inside` or `between`.
    """

    name: str
    hops_s: float
    bytes_per_s: float
    bound: str


@dataclass(frozen=True)
class Law:
    """What is expected of a cluster before anything is measured: a log-normal distribution over the curve's figures.

    Args:
        mean: Logarithms of t0, ramp, depth and rate (`PipelineLaw`), float64 [4]; of another backbone's figures, [k].
        spread: Their standard deviations, float64 [k].
        words: Where it comes from.
        backbone: The curve that the figures are of.
        noise: Variance of bumps and noise that is expected, in units of a GPU cluster's.
        switches: log2 of the sizes at which the library changes its protocol so that times may jump, ascending.
        place: log2 of the ranks, more between hosts than inside one, 0 where the hardware is not known; and how new the
            library is, nan where that is not known: see `apart`.
        beside: What tables of other scales have beside their curves.
        hops_s: What all hops among hosts take, seconds; 0 where there are none, and where the hardware is not known.
    """

    mean: Floats
    spread: Floats
    words: str
    backbone: PipelineLaw | TermsLaw = PIPELINE
    noise: float = 1.0
    switches: tuple[float, ...] = ()
    place: tuple[float, float] = (0.0, math.nan)
    beside: Beside | None = None
    hops_s: float = 0.0

    def apart(self, other: Law) -> float:
        """Return how far two laws of a cluster are from each other, in doublings of its ranks.

        Versions count where both are known.
        """
        ranks, versions = (abs(mine - theirs) for mine, theirs in zip(self.place, other.place, strict=True))
        return ranks + (0.0 if math.isnan(versions) else versions)


def fill_growth(law: Law, other: Law) -> Floats:
    """Return how much more than another law's a law's figures are by its hops alone, logarithms, float64 [k].

    Every hop fills the pipeline anew, while only a part of t0, of which ramp and depth are multiples, is hops.
    """
    found = np.zeros(len(law.mean))
    if law.hops_s and other.hops_s:
        longer = math.log(law.hops_s / other.hops_s)
        later = math.log((LAUNCH_S + law.hops_s) / (LAUNCH_S + other.hops_s))
        found[RAMP], found[DEPTH] = longer - 0.5 * later, longer - later
    return found


def law(topology: Topology, collective: str = ALL_REDUCE, algorithm: str = "auto") -> Law:
    """Return what a collective is expected to cost on a topology.

    Args:
        topology: Its inside, between, nics and nvls are read.
        collective: `all_reduce`, `all_gather`, `reduce_scatter`, `alltoall` or `sendrecv`; all else goes round a ring.
        algorithm: As a table names it; `Ring`, `Tree` and `NVLS` are taken at their word, all else is NCCL's choice.

    Raises:
        UsageError: The topology has a single rank: nothing is sent.
    """
    if topology.ranks < 2:
        raise UsageError(f"{topology.name}: one rank has nobody to reduce with; give a topology of two or more")
    if collective == ALL_REDUCE:
        found = candidates(topology)
    elif collective in STRAIGHT:
        found = [_straight(topology, collective)]
    else:  # its bytes go round a ring, and up or down a tree once, not both
        ring = _ring(topology)
        bus = ring.bytes_per_s * bus_factor(ALL_REDUCE, topology.ranks)
        hops = _hops(topology) if topology.hosts > 1 else _inside_hops(topology)
        found = [Candidate("ring", hops / 2, bus / bus_factor(collective, topology.ranks), ring.bound)]
    named = [each for each in (*found, *switched(topology)) if algorithm.lower().startswith(each.name)]
    chosen = named[0] if named else chosen_by_nccl(found)
    base = LAUNCH_S + PROXY_S * (topology.hosts > 1) + min(candidate.hops_s for candidate in found)
    place = reach(topology)
    mean = np.log([base, RAMPS[place], DEPTHS[place], chosen.bytes_per_s])
    words = f"{topology.name}: {chosen.name}, {chosen.bound} {chosen.bytes_per_s / 1e9:.4g} GB/s, {base * 1e6:.3g} µs"
    scale = math.log2(topology.ranks) + BETWEEN_HOSTS * (topology.hosts > 1)
    hops_s = PROXY_S + _hops(topology) if topology.hosts > 1 and collective not in STRAIGHT else 0.0
    return Law(mean, np.array(SPREAD), words, place=(scale, math.nan), hops_s=hops_s)


def _straight(topology: Topology, collective: str) -> Candidate:
    """Return an all-to-all among hosts, or a message: straight to the receiver, through all of the way's links once.

    An all-to-all waits for the later of what stays in the host and what leaves it. The tensor is what a rank sends.
    """
    ranks, local = topology.ranks, topology.largest_host
    inside, network = RING * _inside(topology), NETWORK_RING * _network(topology)
    link, bound = (topology.inside, "inside") if topology.hosts == 1 else (topology.between, "between")
    if collective == "sendrecv":
        rate = inside if bound == "inside" else min(inside, network / topology.nics)
    else:
        inside *= ranks / local
        network *= ranks / max(local * (ranks - local), 1)  # infinite inside one host
        rate, bound = min(inside, network), "inside" if inside < network else "between"
    hop = link.alpha_s if link is not None else 0.0
    if collective == "alltoall" and topology.hosts == 1:  # a message for every other rank, begun one by one
        hop = _inside_hops(topology) / 2
    return Candidate("ring", hop + topology.overhead_s, rate, bound)


def reach(topology: Topology) -> int:
    """Return which of `RAMP` and `DEPTH` is a topology's: 0 inside one host, 1 among hosts, 2 one hop apart."""
    if topology.hosts > 1:
        return 1
    return 2 if topology.inside is not None and topology.inside.kind == "nvlink" else 0


def candidates(topology: Topology) -> list[Candidate]:
    """Return the algorithms for all-reduce that a topology allows."""
    found = [_ring(topology)]
    if topology.hosts == 1:
        if topology.nvls is not None:
            share = NVLS_RACK if is_rack(topology) else NVLS
            rate = share * nvls_rate(topology.nvls.bytes_per_s, topology.ranks)
            found.append(Candidate("nvls", _inside_hops(topology), rate, "inside"))
        return found
    found.append(_tree(topology, "tree", CHAIN * _inside(topology), NETWORK_TREE))
    if topology.nvls is not None:
        share = NVLS_RACK if is_rack(topology) else NVLS_AMONG_HOSTS
        inside = share * nvls_rate(topology.nvls.bytes_per_s, topology.largest_host)
        found.append(_tree(topology, "nvls_tree", inside, NETWORK_NVLS_TREE))
    return found


def switched(topology: Topology) -> list[Candidate]:
    """Return the reduction by the switches between hosts, where there are such: NCCL takes it only with a plugin.

    Inside a host NVLS, or a reduce-scatter to the rank of each interface and an all-gather from it (CollNet).
    """
    if topology.hosts == 1 or topology.sharp is None or topology.between is None:
        return []
    local, share = topology.largest_host, NVLS_RACK if is_rack(topology) else NVLS_AMONG_HOSTS
    around = RING * _inside(topology) / bus_factor(ALL_REDUCE, local) if local > 1 else math.inf
    inside = share * nvls_rate(topology.nvls.bytes_per_s, local) if topology.nvls is not None else around
    wide = replace(topology, between=replace(topology.between, bytes_per_s=topology.sharp.bytes_per_s))
    network = NETWORK_NVLS_TREE * _network(wide)
    hops = _inside_hops(topology) + 2 * topology.sharp.alpha_s + topology.overhead_s
    bound = "inside" if inside < network else "between"
    return [Candidate("in_network", hops, min(inside, network), bound)]


def nvls_rate(bytes_per_s: float, ranks: int) -> float:
    """Return the algorithm bandwidth of an all-reduce in an NVLink switch: W·n/(n+1).

    A rank sends S/n of each of n parts up once and takes it once for every part, and its own sum once more: (n+1)/n of
    the tensor crosses its port.

    Args:
        bytes_per_s: W, of one rank's way to the switch, each direction.
        ranks: n.
    """
    return bytes_per_s * ranks / (ranks + 1)


def chosen_by_nccl(found: list[Candidate]) -> Candidate:
    """Return the algorithm that NCCL takes for large tensors: NVLS where there is one, else the best rate.

    Its tuner (src/graph/tuning.cc) rates NVLS trees above rings on Hopper and later even from three hosts on, where a
    ring would be faster: published tables show the price.
    """
    nvls = [candidate for candidate in found if candidate.name == "nvls_tree"]
    return nvls[0] if nvls else max(found, key=lambda candidate: candidate.bytes_per_s)


def is_rack(topology: Topology) -> bool:
    """Whether NVLink joins more ranks than a server has."""
    return topology.largest_host > 16


def _network(topology: Topology) -> float:
    """Bytes per second of one host's interfaces together; infinite where there is only one host."""
    if topology.hosts == 1 or topology.between is None:
        return math.inf
    slowest = min((min(pair) for pair in topology.host_rates), default=math.inf)
    return min(topology.nics * topology.between.bytes_per_s, slowest) / topology.oversubscription


def _inside(topology: Topology) -> float:
    """Rate of a ring inside a host: that of a port, and a shared bus divided among those who use it."""
    if topology.inside is None or topology.largest_host == 1:
        return math.inf
    shared = topology.inside.host_bytes_per_s or math.inf
    return min(topology.inside.bytes_per_s, shared / topology.largest_host)


def _inside_hops(topology: Topology) -> float:
    """Up and down inside a host: a tree on a switch, one hop over links from each to each, a chain along a bus."""
    if topology.inside is None or topology.largest_host == 1:
        return 0.0
    ranks = topology.largest_host
    depth = {"nvswitch": math.log2(ranks), "nvlink": 1.0}.get(topology.inside.kind, ranks - 1.0)
    return 2 * depth * topology.inside.alpha_s * (RACK_HOP if is_rack(topology) else 1.0)


def _hops(topology: Topology) -> float:
    """Up and down a tree of hosts and, inside them, of ranks."""
    between = topology.between.alpha_s if topology.between is not None else 0.0
    return _inside_hops(topology) + 2 * math.ceil(math.log2(topology.hosts)) * between + topology.overhead_s


def _ring(topology: Topology) -> Candidate:
    inside, network = RING * _inside(topology), NETWORK_RING * _network(topology)
    rate = min(inside, network) / bus_factor(ALL_REDUCE, topology.ranks)
    alpha = topology.inside.alpha_s if topology.inside is not None else 0.0
    far = topology.between.alpha_s if topology.hosts > 1 and topology.between is not None else 0.0
    steps = 2 * (topology.ranks - 1)
    hops = (steps - 2 * topology.hosts) * alpha + 2 * topology.hosts * far if topology.hosts > 1 else steps * alpha
    if topology.inside is not None and topology.inside.kind == "nvlink" and topology.hosts == 1:
        hops = _inside_hops(topology)
    # The least of all paths is what small messages take; a ring's is rarely it.
    return Candidate("ring", max(hops, 0.0) + topology.overhead_s, rate, "inside" if inside < network else "between")


def _tree(topology: Topology, name: str, inside: float, efficiency: float) -> Candidate:
    network = efficiency * _network(topology) / (1 if topology.hosts == 2 else 2)
    bound = "inside" if inside < network else "between"
    return Candidate(name, _hops(topology), min(inside, network), bound)
