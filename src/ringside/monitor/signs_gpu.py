"""A GPU that runs at a lower clock than the others' and than it did before, and why it does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.excess import Floats
from ringside.monitor.judge import middle
from ringside.monitor.vitals_gpu import CAPPED, HOT, IDLE, SET, name_reasons
from ringside.monitor.vitals_table import VitalsTable

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
    """A GPU's low clock as a cause; the fields are those of `ringside.monitor.signs.Sign`."""

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
