"""What was injected, held against what was found; and the comparison, in words."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ringside.faults.inject import Diverge, Fault, Hang, Input, Kill, Pause, Slow, Stop, Uneven, first_step
from ringside.monitor.verdict import Verdict
from ringside.text import duration, percent

FACTOR = 1.3
WANTED: Mapping[type, tuple[str, ...]] = {
    **dict.fromkeys((Slow, Input, Uneven, Pause), ("slow_rank", "uneven_work", "input_bound")),
    **dict.fromkeys((Hang, Stop), ("hang",)),
    Diverge: ("diverged",),
    Kill: ("dead_rank",),
}
"""Which verdicts are right about a fault."""
LONG_PAUSE_S = 4.0
"""A pause so long may be called a hang that was over again."""


def draw(seed: int, ranks: int, steps: int) -> Slow:
    """Return a slow rank drawn at random: who, and from which step on (after a healthy fifth of `steps`)."""
    generator = random.Random(seed)
    return Slow(generator.randrange(ranks), FACTOR, generator.randint(steps // 5, 3 * steps // 10))


def injected(fault: Fault | None) -> dict[str, Any]:
    """Return `summary.json`'s `injected`."""
    if fault is None:
        return {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    content: dict[str, Any] = {"kind": fault.kind, "ranks": [fault.rank], "factor": None}
    given = {name: getattr(fault, name) for name in ("factor", "seconds", "by") if hasattr(fault, name)}
    return {**content, **given, "from_step": first_step(fault)}


def reveal(fault: Fault | None, verdicts: Sequence[Verdict]) -> tuple[bool, str]:
    """Return whether the verdicts are right about what was injected, and both in words."""
    if fault is None:
        return not verdicts, _named_nobody(verdicts, "Nothing was injected")
    words = f"What was injected: {fault.describe()}"
    if isinstance(fault, Pause) and not fault.every:
        called = [v for v in verdicts if v.kind != "hang" or v.ranks != [fault.rank] or fault.seconds < LONG_PAUSE_S]
        return not called, _named_nobody(called, f"{words}. One stall makes no slow rank")
    begin = 0 if isinstance(fault, Kill) else first_step(fault)
    told = [v for v in verdicts if names(fault, v)]
    named = [v for v in told if v.kind in WANTED[type(fault)] and v.detected_step >= begin]
    others = [v for v in verdicts if v not in told]
    if named and not others:
        return True, f"{words}. The verdict is correct{_delay(fault, named[0])}."
    if named:
        return True, f"{words}. It was detected, and another rank too: other load on this machine, or a false alarm."
    if others:
        return False, f"{words}. The verdict is wrong: it names another rank."
    where = "time" if isinstance(fault, Slow | Input | Uneven | Pause) else "this run"
    return False, f"{words}. It was not detected in {where}."


def names(fault: Fault, verdict: Verdict) -> bool:
    """Tell whether a verdict is on the rank of a fault; of two replicas that differ neither can be told right."""
    if isinstance(fault, Diverge) and verdict.kind == "diverged":
        return fault.rank in verdict.ranks
    return verdict.ranks == [fault.rank]


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the comparison in words; nothing where there was none."""
    if not found:
        return []
    peer = str(found["peer"]).capitalize()
    if found["engine"] == found["peer"]:
        return [f"Gradients went over {peer} all the time: there is nothing to compare with (see the log for why)."]
    ours, theirs = found["ours"], found["theirs"]
    synchronising: list[str] = []
    if found["sync_ratio"] is not None and math.isfinite(found["sync_ratio"]):  # only a hook of ours measures it
        synchronising.append(
            f"  synchronising  {found['sync_ratio']:5.2f} ×  {_both('sync_seconds', theirs, ours)}, "
            "partly overlapped with backward"
        )
    return [
        f"The same training over {peer}, in turn with ours, {found['steps']} steps each ({peer}'s time over ours):",
        f"  step           {found['step_ratio']:5.2f} ×  {_both('step_seconds', theirs, ours)}",
        *synchronising,
        f"  {'of which ' if synchronising else ''}exposed      {_both('exposed_seconds', theirs, ours)}: "
        f"{percent(theirs['share'])} of the step against {percent(ours['share'])}",
    ]


def _both(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> str:
    return f"{duration(theirs[name])} against {duration(ours[name])}"


def _named_nobody(verdicts: Sequence[Verdict], words: str) -> str:
    if verdicts:
        return f"{words}, yet a rank was named: other load on this machine, or a false alarm."
    return f"{words}, and no rank was named: correct."


def _delay(fault: Fault, verdict: Verdict) -> str:
    if not isinstance(fault, Slow | Input | Uneven):
        return ""
    return f", {verdict.detected_step - fault.from_step + 1} steps after it began"
