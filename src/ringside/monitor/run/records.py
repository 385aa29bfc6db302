"""What ranks record: small frozen values, written as they happen, read by detectors and views.

All durations are in seconds on the rank's own monotonic clock; `ended_unix` is wall-clock time. A record's fields
never change meaning without a new `SCHEMA`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.text import rate, size

SCHEMA = 1
_T = TypeVar("_T")

# What is larger, or negative, in a file or a message is damage, and no number that is counted with.
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Vitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the kernel and the GPU's driver report of a rank, for the time since it was last read; None = not known.

    It is read a few times a second at most, when a batch of records is sent; the oldest of the batch carries it.

    Args:
        seconds: How long the time is that the figures cover.
        reading_seconds: What asking took, on the monitor's own thread.
        cpu_seconds: CPU time of the process, all its threads.
        cpus: CPUs it may run on.
        ran_seconds: CPU time of the thread that wanted a CPU longest (that ran or was ready to).
        waited_seconds: How long that thread was ready to run and had no CPU; on most kernels this has
            `throttled_seconds` in it.
        preemptions: Involuntary context switches.
        major_faults: Page faults for which something was read from a disk.
        swapped_in_pages: Pages the whole machine read back from swap; read where there were major faults.
        written_bytes: Bytes that the process wrote to storage (or left to the kernel to write).
        throttled_seconds: How long its cgroup stood still because a CPU quota was used up.
        quota_cpus: That quota.
        steal_ratio: Of the time in which its CPUs had work, the share that the hypervisor gave to others.
        memory_stalled_seconds: How long some task of its cgroup (or of the machine) stood still for want of memory.
        gpu_clock_mhz: Clock of its GPU's multiprocessors.
        gpu_max_clock_mhz: The highest that this GPU has.
        gpu_celsius: Temperature of the GPU.
        gpu_watts: Power the GPU draws.
        gpu_cap_watts: Power it may draw.
        gpu_reasons: Why its clock is not higher: NVML's bits of clocks event reasons (`vitals.gpu.REASONS`).
    """

    seconds: float
    reading_seconds: float | None = None
    cpu_seconds: float | None = None
    cpus: Count | None = None
    ran_seconds: float | None = None
    waited_seconds: float | None = None
    preemptions: Count | None = None
    major_faults: Count | None = None
    swapped_in_pages: Count | None = None
    written_bytes: Count | None = None
    throttled_seconds: float | None = None
    quota_cpus: float | None = None
    steal_ratio: float | None = None
    memory_stalled_seconds: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_max_clock_mhz: float | None = None
    gpu_celsius: float | None = None
    gpu_watts: float | None = None
    gpu_cap_watts: float | None = None
    gpu_reasons: int | None = None


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank sent to another host over one TCP connection, in one period; see `ringside.monitor.links.sampler`.

    Args:
        seconds: Length of the period.
        sent_bytes: Bytes that arrived at the other host.
        wire_seconds: For how long data was under way while the peer had room for it.
        window_seconds: For how long the peer had no room: it did not read.
        delivery_bytes_per_s: The kernel's own rate of the newest stretch of data; 0 where that was too short to tell.
        rtt_seconds: Round trip, under whatever load there was.
        retransmitted_bytes: Bytes sent again.
        local: This end of the connection, `address port`.
        remote: The other end.
        peer: The rank at the other end; -1 where it is not known.
    """

    seconds: float
    sent_bytes: Count
    wire_seconds: float
    window_seconds: float = 0.0
    delivery_bytes_per_s: float = 0.0
    rtt_seconds: float = 0.0
    retransmitted_bytes: Count = 0
    local: str = ""
    remote: str = ""
    peer: int = -1

    @property
    def bytes_per_s(self) -> float:
        """The wire's rate: the larger of bytes over wire time and the kernel's own.

        A last acknowledgement that is delayed (by up to 40 ms) makes the first too small, one stretch of data that
        happened to be delayed the second; a slow wire makes both small.
        """
        mean = self.sent_bytes / self.wire_seconds if self.wire_seconds > 0 else 0.0
        return max(mean, self.delivery_bytes_per_s)


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process group of the job.

    Args:
        name: torch's own, the same on all of its ranks and no other group's.
        description: torch's own: `mesh_tp` of a `DeviceMesh`'s dimension `tp`.
        ranks: Its global ranks, in their order in the group.
        has_messages: Whether messages between two ranks were sent in it.
    """

    name: str
    description: str = ""
    ranks: tuple[Rank, ...]
    has_messages: bool = False


class GroupUse(msgspec.Struct, frozen=True, array_like=True):
    """What one rank did in one group in one step.

    Args:
        group: The group's name.
        peer: The rank at the other end of its messages; -1: these are collectives.
        count: How many were issued.
        size_bytes: Their bytes.
        blocked_seconds: How long this rank was blocked in them.
    """

    group: str
    peer: int
    count: Count
    size_bytes: Count
    blocked_seconds: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One training step of one rank.

    A step runs from the end of one optimizer update to the end of the next.
    `own_seconds` + `exposed_seconds` = `step_seconds`, and `wait_seconds` ≤ `exposed_seconds`.

    Args:
        step: Training step, from 0.
        rank: Global rank.
        ended_unix: Wall-clock time at which the step ended, seconds since 1970.
        step_seconds: Duration of the whole step.
        own_seconds: The rank's own work: the step minus the time it was blocked on others.
        wait_seconds: Its last arrival at a synchronisation until the last rank arrived there (NaN: not known here).
        exposed_seconds: Time blocked in gradient synchronisation after backward had no work left, and in what was
            issued in groups that are watched.
        sync_seconds: Total time from a bucket's hand-over to its result, summed over buckets (overlapped or not).
        wire_seconds: Part of `sync_seconds` after the last rank had arrived.
        data_seconds: End of the previous step until forward began.
        forward_seconds: Forward passes.
        backward_seconds: Backward passes without `exposed_seconds`.
        optimizer_seconds: Optimizer updates.
        cpu_seconds: CPU time of the process (all its threads) during the step; NaN: it is timed by a device's clock.
        samples: Samples (or tokens) this rank worked on; 0 where it is not known.
        payload_bytes: Gradient bytes synchronised.
        collectives: Number of collectives that carried them.
        overhead_seconds: Ringside's own bookkeeping inside the step.
        loss: The rank's loss, where the script gave one.
        vitals: What held it up, as far as the machine knows; on the oldest record of a batch.
        busy_seconds: What the collectives took one after the other, without others being late for the first.
        latency_seconds: What one collective takes whatever its size, as far as this rank could measure; 0: not known.
        wires: What it sent to other hosts; on the newest record of a batch, about once a second.
        compute_seconds: What came before the optimizer's update, where forward and backward passes are not told apart.
        unclear_seconds: Part of `own_seconds` in which it may have been waiting: that was not to be seen.
        run_delay_seconds: Part of `own_seconds` in which the training thread was ready to run and had no CPU; None: not
            known.
        routed_bytes: What it sent or received in all-to-alls, of each the larger: the tokens of its experts.
        groups: What it did in which process group, where groups are watched.
        new_groups: Groups that it used for the first time; rank 0 puts them into the run's events, not into records.
    """

    step: Annotated[int, msgspec.Meta(le=2**53)]  # a larger one is a damaged line, and no int64
    rank: Rank
    ended_unix: float
    step_seconds: float
    own_seconds: float
    wait_seconds: float = 0.0
    exposed_seconds: float = 0.0
    sync_seconds: float = 0.0
    wire_seconds: float = 0.0
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: Count = 0
    payload_bytes: Count = 0
    collectives: Count = 0
    overhead_seconds: float = 0.0
    loss: float | None = None
    vitals: Vitals | None = None
    busy_seconds: float = 0.0
    latency_seconds: float = 0.0
    wires: tuple[Wire, ...] = ()
    compute_seconds: float = 0.0
    unclear_seconds: float = 0.0
    run_delay_seconds: float | None = None
    routed_bytes: Count = 0
    groups: tuple[GroupUse, ...] = ()
    new_groups: tuple[Group, ...] = ()


Row = dict[int, StepRecord]
"""The records of one step, by rank; ranks may be missing."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run when it starts: the content of `run.json`.

    Args:
        schema: `SCHEMA`.
        name: The run's name (its directory's last part).
        started_unix: Wall-clock start, seconds since 1970.
        command: The command line that was run.
        world_size: Number of ranks.
        hosts: Host name of each rank, in rank order.
        pids: Process id of each rank, in rank order.
        engine: Who carries gradients: `ringside` or the process group's own (`gloo`, `nccl`).
        algorithm: The all-reduce algorithm, where it is ours.
        versions: Versions of ringside, torch, numpy and Python.
    """

    schema: int
    name: str
    started_unix: float
    command: list[str] = []
    world_size: int
    hosts: list[str] = []
    pids: list[int] = []
    engine: str
    algorithm: str = ""
    versions: dict[str, str] = {}


# -------------------------------------------------------------------------------------------------
# Events of a run whose writers are elsewhere: where gradient buckets lie, what they go by, and when that changed.


def events_of(events: Iterable[Mapping[str, Any]], kind: str, content: type[_T]) -> list[_T]:
    """Return the events of one kind as values; damaged ones are left out."""
    found = []
    for event in events:
        if event.get("kind") == kind:
            with contextlib.suppress(*UNDECODABLE):
                found.append(msgspec.convert(event, content))
    return found


class GradientMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `gradient_memory`: the buckets of one model on rank 0, recorded whenever they change.

    Args:
        model: Which model of this process, counted from 0.
        shared_buckets: Buckets that the host's ranks map and reduce where they lie.
        shared_bytes: Their size.
        copied_buckets: Buckets in private memory, which are copied through Ringside's.
        copied_bytes: Their size.
    """

    model: int = 0
    shared_buckets: int = 0
    shared_bytes: int = 0
    copied_buckets: int = 0
    copied_bytes: int = 0


def gradient_memory(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return what was shared and what was copied in the end, of all models together; {} where no event says."""
    newest = {memory.model: memory for memory in events_of(events, "gradient_memory", GradientMemory)}
    names = [name for name in GradientMemory.__struct_fields__ if name != "model"]
    return {name: sum(getattr(memory, name) for memory in newest.values()) for name in names} if newest else {}


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `carried`: what gradient buckets go by between hosts, once it stays the same.

    Args:
        algorithm: As `ringside.engine.algorithm.AlgorithmSpec` writes it, such as `hosts/ring`.
        wire_dtype: As what float32 elements travel.
    """

    algorithm: str
    wire_dtype: str = "float32"


def carried(events: Iterable[Mapping[str, Any]]) -> Carried | None:
    """Return what gradients went by in the end; None where no event says."""
    found = events_of(events, "carried", Carried)
    return found[-1] if found else None


# -------------------------------------------------------------------------------------------------
# What a run notes when all-reduces between hosts change their algorithm: read from its events, and described.

NOTES_KEPT = 32


class ChangedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that was slow when the algorithm was chosen anew.

    Args:
        ranks: The first rank of its sender's host and of its receiver's; one alone: every link of that host is slow.
        hosts: The names of these hosts.
        bytes_per_s: Its rate.
        usual_bytes_per_s: The rate of the others.
    """

    ranks: list[int]
    hosts: list[str] = []
    bytes_per_s: float = 0.0
    usual_bytes_per_s: float = 0.0


class Revised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `revised`.

    Args:
        step: The training step in which it was decided.
        size_bytes: Of the all-reduces that took longer than they should.
        before, after: Their algorithm until now and from now on.
        others_changed: Whether only other sizes change their algorithm.
        reason: Why links and choices were timed again.
        links: The slow ones, slowest first.
    """

    step: int
    size_bytes: int
    before: str
    after: str
    others_changed: bool = False
    reason: str = ""
    links: list[ChangedLink] = []

    def describe(self) -> str:
        """Return what happened in one or two sentences."""
        if self.before != self.after:
            change = f"all-reduces of {size(self.size_bytes)} go by {self.after} instead of {self.before}"
        else:
            change = f"all-reduces of {size(self.size_bytes)} still go by {self.after}"
        why = self.reason
        if self.links:
            link = self.links[0]
            ends = [f"rank {rank}" for rank in link.ranks]
            if len(link.hosts) == len(ends):
                ends = [f"{end} ({host})" for end, host in zip(ends, link.hosts, strict=True)]
            # One rank alone stands for its whole host, as `ChangedLink` says.
            which = f"the link from {ends[0]} to {ends[1]}" if len(ends) > 1 else f"every link of the host of {ends[0]}"
            why = f"{which} carries {rate(link.bytes_per_s)}, the others {rate(link.usual_bytes_per_s)}"
        return f"From step {self.step} on {change}{': ' if why else ''}{why}."


def revisions(events: Iterable[Mapping[str, Any]]) -> list[Revised]:
    """Return the newest revisions among events, oldest first; those that are damaged or report nothing are left out."""
    found = []
    for revised in events_of(events, "revised", Revised):
        ends = [len(link.ranks) for link in revised.links]
        is_whole = min(revised.step, revised.size_bytes) >= 0 and all(0 < count <= 2 for count in ends)
        # What it reports is another algorithm, or a slow link.
        is_news = revised.before != revised.after or revised.others_changed or revised.links
        if is_whole and is_news:
            found.append(revised)
    return found[-NOTES_KEPT:]


def summary_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentences of a summary's revisions, and those on its pipeline and on logs of single collectives."""
    changes = [*(summary.get("revisions") or []), summary.get("pipeline"), summary.get("call_logs")]
    return [str(change["words"]) for change in changes if isinstance(change, dict) and "words" in change]
