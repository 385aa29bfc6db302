"""What held a rank up, in words with numbers: signs in its vitals that neither healthy ranks nor its own past show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.causes.baseline import EXPLAINS, LEAST, Measurement, RankComparison
from ringside.monitor.run import vitals_table as shares
from ringside.monitor.run.vitals_table import VitalsTable
from ringside.monitor.slow_rank.verdict import middle
from ringside.monitor.stats import Floats
from ringside.monitor.verdict import percent
from ringside.monitor.vitals.gpu import CAPPED, HOT, IDLE, SET, name_reasons

# -------------------------------------------------------------------------------------------------
# A GPU that runs at a lower clock than the others' and than it did before, and why it does.

BITS = 16
"""NVML has reasons for so many bits at most."""

ADVICE = {
    HOT: "Look after this GPU's cooling (air flow, fans, dust, hot neighbours) or move the rank: it lowers its clock "
    "because of heat.",
    CAPPED: "Compare its power limit with the others' (nvidia-smi -q -d POWER; nvidia-smi -pl sets it) and look after "
    "the machine's power supply.",
    SET: "Somebody set its clocks: nvidia-smi -rgc and -rac take that back.",
}
OTHER_ADVICE = "Compare nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE on this host with a healthy one's."

CLOCK_EVIDENCE = frozenset(
    {"gpu_clock_mhz", "gpu_max_clock_mhz", "others_gpu_clock_mhz", "gpu_clock_reasons"}
    | {"gpu_celsius", "gpu_watts", "gpu_cap_watts"}
)
"""Names of the numbers that are given as evidence."""


class SlowClock(NamedTuple):
    """A GPU's low clock as a cause; the fields are those of `ringside.monitor.causes.signs.ProbableCause`."""

    share: float
    words: str
    advice: str
    evidence: dict[str, float | int | str]


def slow_clock(episode: VitalsTable, past: VitalsTable, rank: int, healthy: NDArray[np.bool_]) -> SlowClock | None:
    """Return what a lower clock of a rank's GPU accounts for; None where it is not lower, or the GPU has little to do.

    Clocks are compared as shares of the highest that each GPU has, with the lowest of the healthy ranks' and with its
    own before. What takes a GPU is taken to be inverse to its clock.

    Args:
        episode: The vitals since the rank became slow.
        past: Those before.
        rank: The culprit.
        healthy: Which ranks are not slow, bool [ranks].
    """
    now, before = episode.mean(_clock(episode)), past.mean(_clock(past))[rank]
    known = [value for value in (*now[healthy], before) if np.isfinite(value)]
    bits = _lasting(episode, rank)
    if not known or not np.isfinite(now[rank]) or bits & IDLE:
        return None
    for other in np.flatnonzero(healthy):
        bits &= ~_lasting(episode, int(other))
    numbers, reasons = _numbers(episode, rank, healthy), name_reasons(bits)
    evidence: dict[str, float | int | str] = dict(numbers)
    if reasons:
        evidence["gpu_clock_reasons"] = ", ".join(reasons)
    share = max(1.0 - float(now[rank]) / max(min(known), 1e-9), 0.0)
    return SlowClock(share, _words(numbers, reasons), _advice(bits), evidence)


def _clock(vitals: VitalsTable) -> Floats:
    """Clock as a share of the highest, [rows]; in MHz where that is not known."""
    most = vitals["gpu_max_clock_mhz"]
    share: Floats = vitals["gpu_clock_mhz"] / np.where(most > 0, most, 1.0)
    return share


def _lasting(vitals: VitalsTable, rank: int) -> int:
    """Return the bits that are set in at least half of a rank's rows."""
    reasons = vitals["gpu_reasons"][vitals.owners == rank]
    known = reasons[np.isfinite(reasons)].astype(np.int64)
    if not known.size:
        return 0
    return sum(1 << bit for bit in range(BITS) if np.mean(known >> bit & 1) >= 0.5)


def _numbers(episode: VitalsTable, rank: int, healthy: NDArray[np.bool_]) -> dict[str, float]:
    names = ("gpu_clock_mhz", "gpu_max_clock_mhz", "gpu_celsius", "gpu_watts", "gpu_cap_watts")
    numbers = {name: float(episode.mean(episode[name])[rank]) for name in names}
    numbers["others_gpu_clock_mhz"] = middle(episode.mean(episode["gpu_clock_mhz"])[healthy])
    return {name: value for name, value in numbers.items() if value > 0}


def _words(numbers: dict[str, float], reasons: list[str]) -> str:
    of = f" of {numbers['gpu_max_clock_mhz']:,.0f}" if "gpu_max_clock_mhz" in numbers else ""
    beside = f" (the others' {numbers['others_gpu_clock_mhz']:,.0f})" if "others_gpu_clock_mhz" in numbers else ""
    hot = any("thermal" in reason for reason in reasons) and "gpu_celsius" in numbers
    at = f" at {numbers['gpu_celsius']:.0f} °C" if hot else ""
    why = "".join(f", {reason}" for reason in reasons)
    return f"GPU clock {numbers.get('gpu_clock_mhz', 0.0):,.0f}{of} MHz{beside}{why}{at}"


def _advice(bits: int) -> str:
    return next((advice for mask, advice in ADVICE.items() if bits & mask), OTHER_ADVICE)


FAULTS_PER_SECOND, FAULTS_RATIO = 20.0, 5.0
"""A rank that sleeps is said to wait for pages if it has so many more faults, and so many times as many."""
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
    "Give its container or host more memory, or let it need less; memory.pressure and memory.events say how short of "
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
    | CLOCK_EVIDENCE
)
"""Names of all numbers that signs give as evidence."""


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
    evidence: dict[str, float | int | str]


def find_signs(of: RankComparison) -> list[ProbableCause]:
    """Return what explains a slow rank, the strongest first; empty where nothing does.

    That it slept is said only where nothing else is known of it: it is what all kinds of waiting look like.
    """
    clock = slow_clock(of.episode, of.past, of.rank, of.healthy)
    found = [sign for look in (_quota, _neighbour, _steal, _faults, _memory) if (sign := look(of)) is not None]
    if clock is not None and clock.share >= max(EXPLAINS * of.lost, LEAST):
        found.append(ProbableCause(*clock))
    if not found:
        found = _both(of)
    if found:
        return sorted(found, key=lambda sign: -sign.share)
    asleep = None if np.isfinite(of.level("gpu_clock_mhz")) else _sleep(of)
    return [] if asleep is None else [asleep]


def had_no_cpu(of: RankComparison) -> float:
    """Return the share of its own time in which the culprit wanted a CPU and had none; NaN: not known."""
    waited, throttled = of.read(shares.waited_share).now, of.read(shares.throttled_share).now
    return float(np.nansum([waited, throttled])) if np.isfinite([waited, throttled]).any() else float("nan")


def _quota(of: RankComparison) -> ProbableCause | None:
    found = of.read(shares.throttled_share)
    return _throttled(of, found) if found.explains(of.lost) else None


def _neighbour(of: RankComparison) -> ProbableCause | None:
    found = of.read(shares.waited_share)
    return _waited(of, found) if found.explains(of.lost) else None


def _both(of: RankComparison) -> list[ProbableCause]:
    """A quota and other processes, neither of which alone would explain it: the one that takes more first."""
    if not of.read(shares.held_share).explains(of.lost):
        return []
    quota, neighbour = of.read(shares.throttled_share), of.read(shares.waited_share)
    found = [make(of, one) for make, one in ((_throttled, quota), (_waited, neighbour)) if one.more >= LEAST]
    found.sort(key=lambda sign: -sign.share)
    return [found[0]._replace(words="; ".join(sign.words for sign in found)), *found[1:]] if found else []


def _throttled(of: RankComparison, found: Measurement) -> ProbableCause:
    quota = of.level("quota_cpus")
    words = f"its container was throttled {percent(found.now)} of its own time (cpu.stat), quota {_cpus(quota)}"
    return ProbableCause(found.saved, words, QUOTA_ADVICE, {**_evidence("throttled", found), "quota_cpus": quota})


def _waited(of: RankComparison, found: Measurement) -> ProbableCause:
    evidence = _evidence("waited_for_cpu", found)
    used, cpus = float(of.episode.mean(of.episode["cpu_seconds"] / of.episode["seconds"])[of.rank]), of.level("cpus")
    but = f"ready to run but waiting {percent(found.now)} of its own time"
    if used >= CROWDED * cpus:
        others = of.others("cpus")
        beside = f" (elsewhere {others:.3g})" if others > cpus else ""
        words = f"its own threads crowd on {_cpus(cpus)}{beside}: {but}"
        return ProbableCause(found.saved, words, CROWD_ADVICE, {**evidence, "cpus": cpus, "others_cpus": others})
    return ProbableCause(found.saved, f"another process took its core: {but}", NEIGHBOUR_ADVICE, evidence)


def _steal(of: RankComparison) -> ProbableCause | None:
    found = of.read(shares.stolen_share)
    if not found.explains(of.lost):
        return None
    words = f"steal {percent(found.now)}: the hypervisor gave its CPUs to others"
    return ProbableCause(found.saved, words, STEAL_ADVICE, _evidence("steal", found))


def _faults(of: RankComparison) -> ProbableCause | None:
    rates = of.read(shares.fault_rate)
    many = rates.more >= max(FAULTS_PER_SECOND, rates.now * (1.0 - 1.0 / FAULTS_RATIO))
    if not many:
        return None
    known, asleep = of.read(shares.fault_share), of.read(shares.asleep_share)
    share = max(known.saved if known.explains(of.lost) else 0.0, asleep.saved if asleep.explains(of.lost) else 0.0)
    if not share:
        return None
    per_step = rates.now * of.own_seconds[of.rank]
    swaps = of.episode["swapped_in_pages"][of.episode.owners == of.rank]
    swapping = np.nansum(swaps) > 0.5 * np.nansum(of.episode["major_faults"][of.episode.owners == of.rank])
    words = f"{per_step:,.3g} major page faults per step: " + ("swapping" if swapping else "pages are read from a disk")
    evidence: dict[str, float | int | str] = {"major_faults_per_step": per_step}
    if np.isfinite(rates.others):
        evidence["others_major_faults_per_step"] = rates.others * middle(of.own_seconds[of.healthy])
    return ProbableCause(share, words, SWAP_ADVICE if swapping else FAULT_ADVICE, evidence)


def _memory(of: RankComparison) -> ProbableCause | None:
    found = of.read(shares.stalled_share)
    if not found.explains(of.lost):
        return None
    words = f"memory is short: work stood still {percent(found.now)} of the time for want of it (memory.pressure)"
    return ProbableCause(found.saved, words, MEMORY_ADVICE, _evidence("memory_stalled", found))


def _sleep(of: RankComparison) -> ProbableCause | None:
    found = of.read(shares.asleep_share)
    if not found.explains(of.lost):
        return None
    words = f"it slept {percent(found.now)} of its own time: waiting for I/O, a lock or a timer"
    return ProbableCause(found.saved, words, SLEEP_ADVICE, _evidence("asleep", found))


def _evidence(name: str, found: Measurement) -> dict[str, float | int | str]:
    known = {f"{name}_ratio": found.now, f"usual_{name}_ratio": found.usual, f"others_{name}_ratio": found.others}
    return {key: value for key, value in known.items() if np.isfinite(value)}


def _cpus(number: float) -> str:
    return f"{number:.3g} CPU{'' if number == 1 else 's'}"
