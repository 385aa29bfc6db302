"""Why a rank is slow, as far as its records show: what held it up, which phase grew, whether it was running at all.

What holds a rank up is a share of its own time that is larger than before and larger than at every healthy rank, by
enough to account for a good part of the excess and by more than it varies. The signs are in its vitals: what changed on
its host and its GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.table import StepTable, VitalsTable
from ringside.monitor.slow_rank.pauses import WRITING_EVIDENCE, find_pauses, is_of_pauses
from ringside.monitor.slow_rank.window_test import WARM_UP
from ringside.monitor.stats import Floats, known_median, log_excess, rank_medians, share_of
from ringside.monitor.verdict import Evidence, Verdict
from ringside.monitor.vitals import shares
from ringside.monitor.vitals.gpu import CAPPED, HOT, IDLE, SET, name_reasons
from ringside.text import duration, percent, size

# -------------------------------------------------------------------------------------------------
# The verdict with its cause.

PHASE_WORDS = {
    "data": "fetching its input",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "compute": "its forward and backward passes",
    "optimizer": "its optimizer update",
}
PHASES = tuple(PHASE_WORDS)
DOMINANT = 0.6
"""A phase that holds this share of the excess is named; for the input, the verdict changes its kind."""

CONTENDED = 0.1
"""A rank that had no CPU for this share of the time, as the healthy ones, was not running all the time."""

DESCHEDULED = "it was ready to run but had no CPU for part of the step: descheduled or throttled"
UNEXPLAINED = "it was running for less of the step than usual, and the kernel's counters do not show why"
RUNNING = "it was running all the time: more work to do, or a slower clock"
AS_MUCH_CPU = "it had a CPU as much as the others: more work to do, or a slower clock"
INPUT_ADVICE = (
    "Give this rank's data loader more workers or prefetching, or move its share of the data to storage as fast as "
    "the others'."
)
DESCHEDULED_ADVICE = (
    "Look for another process on this rank's cores, a CPU quota of its container (cpu.stat: nr_throttled) or steal "
    "time of its virtual machine; pin the rank or move it."
)


def explain_verdict(verdict: Verdict, episode: StepTable, before: StepTable) -> Verdict:
    """Return a `slow_rank` verdict with its cause: what held it up, the phase that grew, running slowly or not running.

    Args:
        verdict: A verdict on one rank. That it pauses is explained by what it alone writes meanwhile.
        episode: The records of its episode.
        before: The records before it.

    Returns:
        The verdict with more evidence and, if the input is what grew, of the kind `input_bound`; verdicts of other
        kinds come back as they are.
    """
    if verdict.kind != "slow_rank" or not len(episode):
        return verdict
    if is_of_pauses(verdict):
        return _explain_pauses(verdict, episode)
    rank = verdict.ranks[0]
    extra = extra_phase_seconds(rank, episode)
    total = sum(max(value, 0.0) for value in extra.values())
    grown = max(PHASES, key=lambda phase: extra[phase])
    measured = [phase for phase in PHASES if np.nansum(episode[f"{phase}_seconds"]) > 0]
    evidence = {f"extra_{phase}_seconds": extra[phase] for phase in measured}
    longer = f"{duration(extra[grown])} per step"
    found = [] if total <= 0 else [f"most of the extra time is in {PHASE_WORDS[grown]} ({longer})"]
    comparison = _compare_rank(rank, verdict.excess_ratio, episode, before)
    signs = _find_signs(comparison)
    if total > 0 and grown == "data" and extra["data"] >= DOMINANT * total:
        loading = [sign for sign in signs if sign.advice != SLEEP_ADVICE]  # a rank that waits for its input sleeps
        return _with(verdict, evidence, found, loading, kind="input_bound", advice=INPUT_ADVICE)
    if total > 0 and extra[grown] < DOMINANT * total:
        found = ["all of its phases take longer"]
    if signs:
        return _with(verdict, evidence, found, signs)

    # Nothing is known to hold it up: whether it had a CPU with its share before, or else with the others'. A share of
    # the *step* is robust: a rank that spins while it waits and one that sleeps both look busier, never idler, once
    # they are the culprit and wait no more.
    share, earlier = (share_of(table["cpu_seconds"], table["step_seconds"]) for table in (episode, before))
    usual = known_median(earlier[:, rank]) or known_median(np.delete(share, rank, axis=1).ravel())
    now = known_median(share[:, rank])
    if now <= 0 or usual <= 0:
        return _with(verdict, evidence, found)
    numbers = {**evidence, "cpu_share_ratio": now, "usual_cpu_share_ratio": usual}
    no_cpu = [comparison.read(share).now for share in (shares.waited, shares.throttled)]
    waited = float(np.nansum(no_cpu)) if np.isfinite(no_cpu).any() else math.nan
    if now < usual * (1.0 - 0.5 * comparison.lost):
        why = DESCHEDULED if math.isnan(waited) else UNEXPLAINED
        return _with(verdict, numbers, [*found, why], advice=DESCHEDULED_ADVICE)
    return _with(verdict, numbers, [*found, AS_MUCH_CPU if waited >= CONTENDED else RUNNING])


def extra_phase_seconds(rank: int, table: StepTable) -> dict[str, float]:
    """Return how much longer each of `PHASES` took on a rank than on the median of the others, seconds per step."""
    extra = {}
    for phase in PHASES:
        seconds = table[f"{phase}_seconds"]
        extra[phase] = known_median(seconds[:, rank]) - known_median(np.delete(seconds, rank, axis=1).ravel())
    return extra


WRITTEN_BYTES, ALONE, TOGETHER = 1e6, 0.5, 0.8
"""A rank that pauses writes a checkpoint, or the like, if it is so much per pause, no other rank writes more than this
share of it, and so much of it is written in batches of records with a pause in them."""

WRITING_ADVICE = (
    "It writes files in those steps: write them beside training (torch.distributed.checkpoint.async_save), on all "
    "ranks at once, or less often."
)


def _explain_pauses(verdict: Verdict, episode: StepTable) -> Verdict:
    rank, vitals = verdict.ranks[0], episode.vitals
    late, pauses = find_pauses(verdict, episode["own_seconds"])
    mine = vitals.owners == rank
    written, seconds, steps = vitals["written_bytes"][mine], vitals["seconds"][mine], vitals.steps[mine]
    rates = vitals.mean(vitals["written_bytes"] / vitals["seconds"])
    others = np.delete(rates, rank)
    if not (pauses and rates[rank] > 0 and np.isfinite(others).all()):
        return verdict
    # A batch begins with the step that carries its vitals; it is sent at any time, so in the middle of a pause as well.
    paused, typical = episode.steps[late], float(verdict.evidence["own_seconds"])
    until = steps + np.ceil(seconds / typical)
    has_pause = np.searchsorted(paused, until) > np.searchsorted(paused, steps - 1)
    # What is kept of a long run is a sample, of steps and of batches alike.
    each = float(rates[rank] * np.nansum(episode["step_seconds"][:, rank]) / pauses)
    most = float(others.max(initial=0.0) / rates[rank])
    if each < WRITTEN_BYTES or most > ALONE or np.nansum(written[has_pause]) < TOGETHER * np.nansum(written):
        return verdict
    return msgspec.structs.replace(
        verdict,
        cause=f"{verdict.cause}; it writes {size(each)} to storage each time",
        evidence={**verdict.evidence, **dict(zip(WRITING_EVIDENCE, (each, most * each), strict=True))},
        advice=WRITING_ADVICE,
    )


def _with(
    verdict: Verdict, numbers: dict[str, float], found: list[str], signs: Sequence[ProbableCause] = (), **changes: str
) -> Verdict:
    """Name the strongest sign first, with its advice; the numbers of all of them are evidence."""
    evidence = {name: value for name, value in verdict.evidence.items() if name not in SIGN_EVIDENCE} | numbers
    for sign in signs:
        evidence |= sign.evidence
    for strongest in signs[:1]:
        found, changes = [strongest.words, *found], {**changes, "advice": strongest.advice}
    return msgspec.structs.replace(verdict, cause="; ".join(found) or verdict.cause, evidence=evidence, **changes)


# -------------------------------------------------------------------------------------------------
# A slow rank beside healthy ones and beside its own past.

EXPLAINS = 0.4
"""A sign is a cause if it accounts for this share of the time lost."""
LEAST = 0.03
"""A smaller share of the time than this is no cause of anything."""
NOISE = 3.0
"""It must exceed what it varies by so many times (the standard error of its mean)."""
HEALTHY = 0.5
"""Ranks with less than this share of the culprit's excess are healthy."""


class Measurement(NamedTuple):
    """One sign at a rank.

    Args:
        now: Its share during the episode.
        usual: Its share before; NaN: not known.
        others: The largest share of a healthy rank during the episode; NaN: not known.
        noise: The standard error of `now`.
    """

    now: float
    usual: float
    others: float
    noise: float

    @property
    def more(self) -> float:
        """How much larger it is than in the past and elsewhere; 0 where it is not, or there is nothing to compare."""
        known = [value for value in (self.usual, self.others) if np.isfinite(value)]
        return max(self.now - max(known), 0.0) if known and np.isfinite(self.now) else 0.0

    @property
    def saved(self) -> float:
        """The share of the rank's own time that it would save if this were as elsewhere and in its past.

        It would do the same work, which takes 1 - now of its time, and that would then be 1 - now + more of it.
        """
        return self.more / max(1.0 - self.now + self.more, LEAST)

    def explains(self, lost: float) -> bool:
        """Whether it is a cause of a rank's losing that share of its own time."""
        return self.more >= max(LEAST, NOISE * self.noise) and self.saved >= EXPLAINS * lost


class RankComparison(NamedTuple):
    """A slow rank and whom to compare it with.

    Args:
        rank: The culprit.
        lost: The share of its own time that it lost.
        healthy: Which ranks are not slow, bool [ranks].
        episode: The vitals since it became slow.
        past: Those before.
        own_seconds: Own time of each rank per step, [ranks].
        synced: Share of the time each rank is blocked in synchronisation, [ranks], during the episode ...
        synced_before: ... and before.
    """

    rank: int
    lost: float
    healthy: NDArray[np.bool_]
    episode: VitalsTable
    past: VitalsTable
    own_seconds: Floats
    synced: Floats
    synced_before: Floats

    def read(self, share: Callable[[VitalsTable, Floats], Floats]) -> Measurement:
        """Return a sign's reading.

        Args:
            share: From vitals, and the share of the time each rank is blocked in synchronisation, to float64 [rows].
        """
        now, before = share(self.episode, self.synced), share(self.past, self.synced_before)
        means, mine = self.episode.mean(now), self.episode.owners == self.rank
        spread = np.concatenate([_residuals(self.episode, now), _residuals(self.past, before)])
        rows = max(int(np.isfinite(now[mine]).sum()), 1)
        return Measurement(
            now=float(means[self.rank]),
            usual=known_median(before[self.past.owners == self.rank], math.nan),  # it may have been slow before
            others=float(np.fmax.reduce(means[self.healthy], initial=math.nan)),
            noise=math.sqrt(float(np.mean(spread**2)) / rows) if spread.size else 0.0,
        )

    def level(self, field: str) -> float:
        """Return the mean of a field at the culprit during the episode; NaN: not known."""
        return float(self.episode.mean(self.episode[field])[self.rank])

    def others(self, field: str) -> float:
        """Return the median of a field's means at the healthy ranks during the episode; 0: not known."""
        return known_median(self.episode.mean(self.episode[field])[self.healthy])


def _compare_rank(rank: int, excess_ratio: float, episode: StepTable, before: StepTable) -> RankComparison:
    """Return whom to compare a slow rank with.

    Args:
        rank: The culprit.
        excess_ratio: How much longer its own time is than the others'.
        episode: The records since it became slow.
        before: The records before.
    """
    healthy = rank_medians(log_excess(episode["own_seconds"])) < HEALTHY * np.log1p(max(excess_ratio, 0.0))
    healthy[rank] = False
    return RankComparison(
        rank=rank,
        lost=excess_ratio / (1.0 + excess_ratio),
        healthy=healthy,
        episode=episode.vitals,
        past=before.vitals.between(WARM_UP),
        own_seconds=rank_medians(episode["own_seconds"]),
        synced=_synced(episode),
        synced_before=_synced(before),
    )


def _residuals(vitals: VitalsTable, values: Floats) -> Floats:
    """Return the known rows' deviations from the mean of their rank."""
    deviations: Floats = values - vitals.mean(values)[vitals.owners]
    return deviations[np.isfinite(deviations)]


def _synced(table: StepTable) -> Floats:
    exposed, steps = (np.nansum(table[name], axis=0) for name in ("exposed_seconds", "step_seconds"))
    return np.clip(share_of(exposed, steps, 0.0), 0.0, 1.0)


# -------------------------------------------------------------------------------------------------
# A GPU that runs at a lower clock than the others' and than it did before, and why it does.

BITS = 16
"""NVML has reasons for so many bits at most."""

ADVICE = {
    HOT: "Look after this GPU's cooling (air flow, fans, dust, hot neighbours) or move the rank: it lowers its clock "
    "because of heat.",
    CAPPED: "Compare its power limit with the others' (nvidia-smi -q -d POWER; nvidia-smi -pl sets it) and look after "
    "the machine's power supply.",
    SET: "Its clocks were set by hand: nvidia-smi -rgc and -rac reset them.",
}
OTHER_ADVICE = "Compare nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE on this host with a healthy one's."

CLOCK_NUMBERS = ("gpu_clock_mhz", "gpu_max_clock_mhz", "gpu_celsius", "gpu_watts", "gpu_cap_watts")
"""Those of the vitals that are given as evidence."""


class ProbableCause(NamedTuple):
    """A probable cause.

    Args:
        share: The share of the rank's own time that it accounts for.
        words: What it is, in plain words with numbers.
        advice: What to do about it.
        evidence: Its numbers.
    """

    share: float
    words: str
    advice: str
    evidence: Evidence


def _slow_clock(comparison: RankComparison) -> ProbableCause | None:
    """Return what a lower clock of a rank's GPU accounts for; None where it is not lower, or the GPU has little to do.

    Clocks are compared as shares of the highest that each GPU has, with the lowest of the healthy ranks' and with its
    own before. What takes a GPU is taken to be inverse to its clock.
    """
    episode, past, rank, healthy = comparison.episode, comparison.past, comparison.rank, comparison.healthy
    now, before = episode.mean(_clock(episode)), past.mean(_clock(past))[rank]
    known = [value for value in (*now[healthy], before) if np.isfinite(value)]
    bits = _lasting_bits(episode, rank)
    if not known or not np.isfinite(now[rank]) or bits & IDLE:
        return None
    # What holds a healthy rank's clock down as well is no reason for this one's being lower.
    for other in np.flatnonzero(healthy):
        bits &= ~_lasting_bits(episode, int(other))
    reasons = name_reasons(bits)
    numbers = {name: comparison.level(name) for name in CLOCK_NUMBERS}
    numbers["others_gpu_clock_mhz"] = comparison.others("gpu_clock_mhz")
    numbers = {name: value for name, value in numbers.items() if value > 0}
    named = {"gpu_clock_reasons": ", ".join(reasons)} if reasons else {}

    most = f" of {numbers['gpu_max_clock_mhz']:,.0f}" if "gpu_max_clock_mhz" in numbers else ""
    beside = f" (the others' {numbers['others_gpu_clock_mhz']:,.0f})" if "others_gpu_clock_mhz" in numbers else ""
    is_hot = any("thermal" in reason for reason in reasons) and "gpu_celsius" in numbers
    heat = f" at {numbers['gpu_celsius']:.0f} °C" if is_hot else ""
    why = "".join(f", {reason}" for reason in reasons)
    return ProbableCause(
        share=max(1.0 - float(now[rank]) / max(min(known), 1e-9), 0.0),
        words=f"GPU clock {numbers.get('gpu_clock_mhz', 0.0):,.0f}{most} MHz{beside}{why}{heat}",
        advice=next((advice for mask, advice in ADVICE.items() if bits & mask), OTHER_ADVICE),
        evidence={**numbers, **named},
    )


def _clock(vitals: VitalsTable) -> Floats:
    """Clock as a share of the highest, [rows]; in MHz where that is not known."""
    most = vitals["gpu_max_clock_mhz"]
    return vitals["gpu_clock_mhz"] / np.where(most > 0, most, 1.0)


def _lasting_bits(vitals: VitalsTable, rank: int) -> int:
    """Return the bits that are set in at least half of a rank's rows."""
    reasons = vitals["gpu_reasons"][vitals.owners == rank]
    known = reasons[np.isfinite(reasons)].astype(np.int64)
    if not known.size:
        return 0
    return sum(1 << bit for bit in range(BITS) if np.mean(known >> bit & 1) >= 0.5)


FAULTS_PER_SECOND, FAULTS_RATIO = 20.0, 5.0
"""A rank that sleeps waits for pages if it has so many more faults, and so many times as many."""
CROWDED = 0.85
"""Its own threads crowd on its CPUs if they use this share of them."""

QUOTA_ADVICE = (
    "Raise or remove the CPU quota of its container (cpu.max, docker --cpus, Kubernetes' limits.cpu), or start fewer "
    "threads and data workers in it."
)
NEIGHBOUR_ADVICE = (
    "Find what else runs on its CPUs (top, pidstat; its own data workers count), and pin the rank to CPUs of its own "
    "or move the other."
)
CROWD_ADVICE = (
    "Give this rank more CPUs (taskset, srun --cpu-bind, the container's cpuset), or let it start fewer threads "
    "(OMP_NUM_THREADS)."
)
STEAL_ADVICE = (
    "Move the rank to another virtual machine or host, or ask for CPUs of your own: its host has more to run than "
    "it has CPUs."
)
SWAP_ADVICE = (
    "Give its host more memory, or let it need less: fewer data workers, smaller caches, no other job beside it; "
    "vmstat 1 shows the swapping."
)
FAULT_ADVICE = (
    "It reads memory-mapped files that do not stay in memory: give its host more memory, or put the data on a faster "
    "disk or read it ahead."
)
MEMORY_ADVICE = (
    "Give its container or host more memory, or let it need less; memory.pressure and memory.events show how short of "
    "it they are."
)
SLEEP_ADVICE = (
    "Take stacks of this rank (py-spy dump --pid) and look at what it waits for: a disk, a network file system, "
    "a lock, a logger."
)

_SHARES = ("throttled", "waited_for_cpu", "steal", "memory_stalled", "asleep")
SIGN_EVIDENCE = frozenset(
    {f"{whose}{share}_ratio" for whose in ("", "usual_", "others_") for share in _SHARES}
    | {"quota_cpus", "cpus", "others_cpus", "major_faults_per_step", "others_major_faults_per_step"}
    | {*CLOCK_NUMBERS, "others_gpu_clock_mhz", "gpu_clock_reasons"}
)
"""Names of all numbers that signs give as evidence."""


def _find_signs(comparison: RankComparison) -> list[ProbableCause]:
    """Return what explains a slow rank, the strongest first; empty where nothing does.

    That it slept is reported only where nothing else is known of it: it is what all kinds of waiting look like.
    """
    lost = comparison.lost
    no_cpu = ((comparison.read(shares.throttled), _throttled), (comparison.read(shares.waited), _waited))
    found = [describe(comparison, share) for share, describe in no_cpu if share.explains(lost)]
    stolen = comparison.read(shares.stolen)
    if stolen.explains(lost):
        words = f"steal {percent(stolen.now)}: the hypervisor gave its CPUs to others"
        found.append(ProbableCause(stolen.saved, words, STEAL_ADVICE, _evidence("steal", stolen)))
    if (faults := _faults(comparison)) is not None:
        found.append(faults)
    stalled = comparison.read(shares.stalled)
    if stalled.explains(lost):
        words = f"memory is short: work stalled for {percent(stalled.now)} of the time (memory.pressure)"
        found.append(ProbableCause(stalled.saved, words, MEMORY_ADVICE, _evidence("memory_stalled", stalled)))
    if (clock := _slow_clock(comparison)) is not None and clock.share >= max(EXPLAINS * lost, LEAST):
        found.append(clock)
    # A quota and other processes, neither of which alone would explain it, are one cause, with the stronger's advice.
    are_one = not found and comparison.read(shares.held).explains(lost)
    if are_one:
        found = [describe(comparison, share) for share, describe in no_cpu if share.more >= LEAST]
    found.sort(key=lambda sign: -sign.share)
    if are_one and found:
        found[0] = found[0]._replace(words="; ".join(sign.words for sign in found))
    if found:
        return found
    asleep = comparison.read(shares.asleep)
    # A rank with a GPU sleeps while it waits for that: it means nothing.
    if np.isfinite(comparison.level("gpu_clock_mhz")) or not asleep.explains(lost):
        return []
    words = f"it slept {percent(asleep.now)} of its own time: waiting for I/O, a lock or a timer"
    return [ProbableCause(asleep.saved, words, SLEEP_ADVICE, _evidence("asleep", asleep))]


def _throttled(comparison: RankComparison, share: Measurement) -> ProbableCause:
    quota = comparison.level("quota_cpus")
    words = f"its container was throttled {percent(share.now)} of its own time (cpu.stat), quota {_cpus(quota)}"
    return ProbableCause(share.saved, words, QUOTA_ADVICE, {**_evidence("throttled", share), "quota_cpus": quota})


def _waited(comparison: RankComparison, share: Measurement) -> ProbableCause:
    evidence = _evidence("waited_for_cpu", share)
    episode, cpus = comparison.episode, comparison.level("cpus")
    used = float(episode.mean(episode["cpu_seconds"] / episode["seconds"])[comparison.rank])
    waiting = f"ready to run but waiting {percent(share.now)} of its own time"
    if used >= CROWDED * cpus:
        others = comparison.others("cpus")
        beside = f" (elsewhere {others:.3g})" if others > cpus else ""
        words = f"its own threads crowd on {_cpus(cpus)}{beside}: {waiting}"
        return ProbableCause(share.saved, words, CROWD_ADVICE, {**evidence, "cpus": cpus, "others_cpus": others})
    return ProbableCause(share.saved, f"another process took its core: {waiting}", NEIGHBOUR_ADVICE, evidence)


def _faults(comparison: RankComparison) -> ProbableCause | None:
    rates = comparison.read(shares.fault_rate)
    if rates.more < max(FAULTS_PER_SECOND, rates.now * (1.0 - 1.0 / FAULTS_RATIO)):
        return None
    # What the pages took at least, or else that it slept meanwhile: a slow disk takes longer.
    known, asleep = comparison.read(shares.faults), comparison.read(shares.asleep)
    share = max(sign.saved if sign.explains(comparison.lost) else 0.0 for sign in (known, asleep))
    if not share:
        return None
    per_step = rates.now * comparison.own_seconds[comparison.rank]
    rows = comparison.episode.owners == comparison.rank
    faults, swaps = (np.nansum(comparison.episode[name][rows]) for name in ("major_faults", "swapped_in_pages"))
    swapping = swaps > 0.5 * faults
    words = f"{per_step:,.3g} major page faults per step: " + ("swapping" if swapping else "pages are read from a disk")
    evidence: Evidence = {"major_faults_per_step": per_step}
    if np.isfinite(rates.others):
        others_own_seconds = known_median(comparison.own_seconds[comparison.healthy])
        evidence["others_major_faults_per_step"] = rates.others * others_own_seconds
    return ProbableCause(share, words, SWAP_ADVICE if swapping else FAULT_ADVICE, evidence)


def _evidence(name: str, share: Measurement) -> Evidence:
    known = {f"{name}_ratio": share.now, f"usual_{name}_ratio": share.usual, f"others_{name}_ratio": share.others}
    return {key: value for key, value in known.items() if np.isfinite(value)}


def _cpus(number: float) -> str:
    return f"{number:.3g} CPU{'' if number == 1 else 's'}"
