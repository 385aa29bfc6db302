"""How long a training step takes: what a rank computes and what it waits for, played one after the other.

A rank's step is a program: it computes, starts a collective, waits for one, hands a tensor to the next stage of a
pipeline, takes one. Collectives of a rank's data-parallel group share one wire and are carried in the order in which
they were started, as a communicator carries them; what is not over when it is waited for is exposed. All ranks of a
stage do the same, so each stage is played by one rank.

- plain data parallel: gradients in buckets, each reduced as soon as backward has filled it (S. Li et al., "PyTorch
  Distributed", VLDB 2020);
- ZeRO stages 1 and 2: they are reduce-scattered so, and weights gathered after the optimizer's step; with stage 2
  after every micro-batch (S. Rajbhandari et al., "ZeRO", SC 2020);
- stage 3 (FSDP2): layer by layer, weights are gathered before a layer computes, `prefetch` layers ahead, in forward
  and, unless they were kept, in backward, where gradients are reduce-scattered (Y. Zhao et al., "PyTorch FSDP", 2023);
- tensor parallel: two all-reduces of the activations per layer in forward and two in backward, each waited for
  (M. Shoeybi et al., "Megatron-LM", 2019);
- pipeline: stages hand activations on and gradients back, 1F1B (D. Narayanan et al., SC 2021) or all forward first
  (Y. Huang et al., "GPipe", 2019). A stage asks for a tensor when it needs it, so nothing hides its transfer; what it
  waits for others, transfers included, is the bubble. Between a forward and a backward of 1F1B two stages swap tensors
  and wait for both (torch's `Schedule1F1B`, Megatron-LM). NCCL carries both at once. Gloo carries one after the other:
  the receiver's word that it is ready waits on the same connection behind the payload that goes the other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.buckets import BACKWARD
from ringside.predict.plan.options import Option, collective, has_library
from ringside.predict.topology.topology import Topology

MOST_ACTIONS = 200_000  # that are played, as `Job.actions` counts them
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Job:
    """How a model is trained.

    Args:
        stage: Of ZeRO, as in `memory.STAGE_WORDS`; 3 is FSDP2.
        layers: Of the model: weights are gathered, and their gradients reduced, one by one.
        prefetch: Of stage 3: how many layers ahead weights are gathered; 0: when they are needed.
        reshard: Of stage 3: whether weights are given up after forward and gathered again in backward.
        tensor: Ranks that share every layer; neighbours.
        pipeline: Stages, of neighbouring hosts or ranks.
        micro_batches: Per step: through the pipeline, or accumulated.
        activation_bytes: Of a micro-batch between two layers.
        buckets: Into how many pieces gradients are cut at stages 0 to 2; None: as many as layers.
        schedule: Of the pipeline, one of `SCHEDULES`.
        blocking: Collectives (`all_gather`, `reduce_scatter`, `all_reduce`) that a rank waits for where it starts them.

    Raises:
        UsageError: A figure cannot be.
    """

    stage: int = 0
    layers: int = 32
    prefetch: int = 1
    reshard: bool = True
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    activation_bytes: float = 0.0
    buckets: int | None = None
    schedule: str = SCHEDULES[0]
    blocking: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise UsageError(f"--zero {self.stage}: a stage of ZeRO is 0 to 3; 3 is FSDP")
        counts = {"layers": self.layers, "tensor-parallel": self.tensor, "pipeline-parallel": self.pipeline}
        counts |= {"accumulate": self.micro_batches, "buckets": 1 if self.buckets is None else self.buckets}
        for name, count in counts.items():
            if count < 1:
                raise UsageError(f"--{name} {count}: at least 1")
        if self.prefetch < 0:
            raise UsageError(f"--prefetch {self.prefetch}: layers gathered ahead, 0 or more")
        if self.layers < self.pipeline:
            raise UsageError(f"--layers {self.layers}: fewer than the {self.pipeline} stages of --pipeline-parallel")
        if self.actions > MOST_ACTIONS:
            raise UsageError(
                f"--layers {self.layers} and --pipeline-parallel {self.pipeline}, times --accumulate "
                f"{self.micro_batches}: at most {MOST_ACTIONS}"
            )
        if not (math.isfinite(self.activation_bytes) and self.activation_bytes >= 0):
            raise UsageError(f"--activation-bytes {self.activation_bytes:g}: 0 or more")
        if not self.activation_bytes and self.parts > 1:
            raise UsageError("--activation-bytes SIZE: what tensor and pipeline parallelism send of a micro-batch")

    @property
    def parts(self) -> int:
        """Into how many parts ranks divide the model before it is sharded."""
        return self.tensor * self.pipeline

    @property
    def stage_layers(self) -> int:
        """Layers of the largest stage of the pipeline."""
        return -(-self.layers // self.pipeline)

    @property
    def actions(self) -> int:
        """About how many actions are played: layer by layer in every micro-batch, or below stage 2 in the last one."""
        by_layer = self.layers * (self.micro_batches if self.stage >= 2 else 1)
        return by_layer + self.pipeline * (self.micro_batches - 1)


@dataclass(frozen=True)
class StepTime:
    """What a step takes. Bands are of times that are wrong together, so ends belong to ends.

    Args:
        seconds: All of it.
        communication: How long the rank's wires are busy.
        exposed: What the rank waits for of it.
        bubble: What a stage waits for others, transfers included; 0 without a pipeline.
        data: Ranks that average their gradients; of `tensor` times `pipeline` times these are all.
        job: How it is trained.
        extrapolated: Why; empty where tables support it.
    """

    seconds: Band
    communication: Band
    exposed: Band
    bubble: Band
    data: int
    job: Job
    extrapolated: str


def step_time(
    topology: Topology, size_bytes: float, compute_s: float, job: Job, reduction: Callable[[Topology, float], Option]
) -> StepTime:
    """Return what a step takes.

    Args:
        topology: Of all ranks.
        size_bytes: Of the model's gradients, and of its weights, in all.
        compute_s: Of forward and backward that a rank computes in a step, in all micro-batches, seconds.
        job: How it is trained.
        reduction: The all-reduce of a topology, at a size.

    Raises:
        UsageError: The ranks cannot be divided so.
    """
    data, tensor, lane = groups(topology, job)
    own = size_bytes / job.parts  # of a rank's part of the model, before it is sharded
    pieces = job.stage_layers if job.stage == 3 else job.buckets or job.stage_layers
    zero, reasons = Band(0.0, 0.0, 0.0), []

    def price(option: Option, size: float) -> Band:
        reasons.append(option.why_extrapolated(size))
        return option.predict([size]).bands[0]

    costs = dict.fromkeys(_Costs._fields, zero)
    if data is not None and job.stage == 0:
        costs["reduce"] = price(reduction(data, own / pieces), own / pieces)
    elif data is not None:
        costs["gather"] = price(collective(data, "all_gather"), own / pieces)
        costs["reduce"] = price(collective(data, "reduce_scatter"), own / pieces)
    if tensor is not None:
        costs["tensor"] = price(reduction(tensor, job.activation_bytes), job.activation_bytes)
    if lane is not None:
        costs["hand_on"] = price(collective(lane, "sendrecv"), job.activation_bytes)
        costs["swap"] = costs["hand_on"] if has_library(topology) else Band(*(2 * end for end in costs["hand_on"].ends))

    ends = (_Costs(**{name: band.ends[end] for name, band in costs.items()}) for end in range(3))
    played = [_slowest_rank(job, pieces, compute_s, end) for end in ends]
    total, busy, exposed, bubble = (
        Band(*(getattr(rank, name) for rank in played)) for name in ("clock", "busy", "exposed", "bubble")
    )
    return StepTime(total, busy, exposed, bubble, topology.ranks // job.parts, job, next(filter(None, reasons), ""))


# -------------------------------------------------------------------------------------------------
# Who communicates with whom. Tensor-parallel ranks are neighbours, then data-parallel ones, stages lie outermost, as
# Megatron-LM numbers them. Groups that use a host's interfaces at once have their share of them.


def groups(topology: Topology, job: Job) -> tuple[Topology | None, Topology | None, Topology | None]:
    """Return what a data-parallel group, a tensor-parallel one, and two neighbouring stages run over; None: alone.

    Raises:
        UsageError: Ranks or hosts cannot be divided so.
    """
    n, t, p = topology.ranks, job.tensor, job.pipeline
    if job.parts == 1:
        return (topology if n > 1 else None), None, None
    local = topology.ranks_per_host[0]
    stage = n // p  # ranks of a stage
    near = min(local, stage)  # of them on a host
    sizes = {(n, job.parts), (stage, near), (local, near), (max(t, near), min(t, near))}
    if len(set(topology.ranks_per_host)) > 1 or any(whole % part for whole, part in sizes if part):
        raise UsageError(
            f"{topology.name}: {topology.hosts} hosts of {local} ranks cannot be divided into --tensor-parallel {t} "
            f"times --pipeline-parallel {p}: hosts or ranks of a host by each"
        )
    tensor = _part(topology, min(t, near), -(-t // near)) if t > 1 else None
    data = n // job.parts
    members = max(near // t, 1)
    group = _part(topology, members, data // members) if data > 1 else None
    lane = None
    if p > 1:  # among several hosts some stages are neighbours across hosts, and a pipeline is as fast as its slowest
        lane = _part(topology, 1, 2) if topology.hosts > 1 else _part(topology, 2, 1)
    return group, tensor, lane


def _part(topology: Topology, local: int, hosts: int) -> Topology:
    """Return `hosts` hosts with `local` ranks each, with these ranks' share of a host's interfaces."""
    between, full = topology.between, topology.ranks_per_host[0]
    sized = topology.sized(hosts, local)
    if between is not None:
        rate = topology.nics * between.bytes_per_s * local / full / sized.nics
        sized = replace(sized, between=replace(between, bytes_per_s=rate))
    return sized


def default_blocking(topology: Topology) -> tuple[str, ...]:
    """Return what FSDP2 waits for where it starts it: on GPUs nothing, as streams carry it; on CPUs everything."""
    return () if has_library(topology) else ("all_gather", "reduce_scatter")


# -------------------------------------------------------------------------------------------------
# A rank of every stage played through its program. All collectives of a rank's group follow each other on one wire.


class _Costs(NamedTuple):
    """What a collective of each kind, handing a tensor on to the next stage, or swapping two with it takes, seconds."""

    gather: float
    reduce: float
    tensor: float
    hand_on: float
    swap: float


Sent = dict[tuple[bool, int, int], float]
"""When a tensor was handed on, by whether it goes forward, its micro-batch and the stage that it comes from."""
Swaps = dict[tuple[int, int], list[float]]
"""When stages came that swap tensors, by the earlier stage and the backward's micro-batch."""


@dataclass
class _Rank:
    """A stage's rank while it is played: its clock, when its wires are free, and what it has spent, seconds."""

    clock: float = 0.0
    wire: float = 0.0
    busy: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0

    def start(self, seconds: float, *, blocking: bool) -> float:
        """Start a collective, and wait for it if it is blocking; return when it is over."""
        self.wire = (self.wire if self.wire > self.clock else self.clock) + seconds
        self.busy += seconds
        if blocking:
            self.wait(self.wire)
        return self.wire

    def wait(self, until: float) -> None:
        if until > self.clock:
            self.exposed += until - self.clock
            self.clock = until

    def block(self, seconds: float) -> None:
        """Communicate beside the wire, and do nothing else meanwhile."""
        self.clock += seconds
        self.busy += seconds
        self.exposed += seconds

    def receive(self, sent: float, seconds: float) -> None:
        """Take a tensor, which is carried once both its ends are there."""
        there = max(self.clock, sent) + seconds
        self.bubble += there - self.clock
        self.busy += seconds
        self.clock = there


@lru_cache(maxsize=64)
def _slowest_rank(job: Job, pieces: int, compute_s: float, costs: _Costs) -> _Rank:
    """Return the rank that is done last, after its step; arguments as of `_play`."""
    sent: Sent = {}
    swaps: Swaps = {}
    ranks = [_Rank() for _ in range(job.pipeline)]
    playing = [_play(rank, job, stage, pieces, compute_s, costs, sent, swaps) for stage, rank in enumerate(ranks)]
    over = object()
    while playing:  # each until it needs what was not handed on yet
        playing = [each for each in playing if next(each, over) is not over]
    return max(ranks, key=lambda rank: rank.clock)


def _play(
    rank: _Rank, job: Job, stage: int, pieces: int, compute_s: float, costs: _Costs, sent: Sent, swaps: Swaps
) -> Iterator[None]:
    """Play a rank of a pipeline's stage through a step; yield while it needs a tensor that was not handed on yet.

    Args:
        rank: That is played.
        job: How the model is trained.
        stage: Of the pipeline.
        pieces: In which a rank's gradients are reduced, and its weights gathered.
        compute_s: Of a step, forward and backward, seconds.
        costs: Of what is communicated.
        sent: What stages have handed on.
        swaps: Which stages have come to swap tensors.
    """
    last, many = job.pipeline - 1, job.micro_batches
    ahead = many if job.schedule == "gpipe" else min(last - stage, many)
    order = [True] * ahead + [True, False] * (many - ahead) + [False] * ahead
    steady = range(ahead, ahead + 2 * (many - ahead))  # where forward and backward take turns
    done = {True: 0, False: 0}
    shares = {True: (1.0 - BACKWARD) * compute_s / many, False: BACKWARD * compute_s / many}
    reduced: list[float] = []  # when each piece of the gradients was
    for place, forward in enumerate(order):
        number = done[forward]
        done[forward] += 1
        before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        swapped, swaps_next = place - 1 in steady and place in steady, place in steady and place + 1 in steady
        if 0 <= before <= last and not swapped:
            while (forward, number, before) not in sent:
                yield
            rank.receive(sent[forward, number, before], costs.hand_on)
        reduces = not forward and (number == many - 1 or job.stage >= 2)
        reduced += _play_layers(rank, job, pieces, shares[forward], costs, forward, reduces)
        if 0 <= after <= last and swaps_next:  # a backward's gradient for the activation of a forward
            came = swaps.setdefault((min(stage, after), done[False] if forward else number), [])
            came.append(rank.clock)
            while len(came) < 2:
                yield
            rank.receive(max(came), costs.swap)
        elif 0 <= after <= last:
            sent[forward, number, stage] = rank.clock
    for over in reduced:
        rank.wait(over)
    if job.stage in (1, 2):  # the optimizer's shards of the weights
        for _ in range(pieces):
            rank.start(costs.gather, blocking=True)


def _play_layers(
    rank: _Rank, job: Job, pieces: int, compute_s: float, costs: _Costs, forward: bool, reduces: bool
) -> list[float]:
    """Play a micro-batch through a stage's layers, forward or backward; return when gradients will be reduced."""
    layers, shared = job.stage_layers, 2 * costs.tensor
    reduced: list[float] = []
    if job.stage < 3 and not reduces:  # nothing happens between layers
        rank.clock += compute_s
        rank.block(layers * shared)
        return reduced
    if job.stage < 3:  # buckets, which need not be as many as layers
        layers, shared = pieces, shared * layers / pieces
    each_s = compute_s / layers
    gathers = job.stage == 3 and (forward or job.reshard)
    gathered: list[float] = []
    gather_blocks = "all_gather" in job.blocking
    reduce_blocks = ("reduce_scatter" if job.stage else "all_reduce") in job.blocking
    for layer in range(layers):
        if gathers:
            while len(gathered) <= layer + job.prefetch and len(gathered) < layers:
                gathered.append(rank.start(costs.gather, blocking=gather_blocks))
            rank.wait(gathered[layer])
        rank.clock += each_s
        if shared:
            rank.block(shared)
        if reduces:
            reduced.append(rank.start(costs.reduce, blocking=reduce_blocks))
    return reduced
