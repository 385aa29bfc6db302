"""What was injected, what it came to by the records, what was found, and the errors; the comparison, in words."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ringside.demo.size import measure_change
from ringside.faults.inject import (
    LASTING,
    Diverge,
    Fault,
    Hang,
    Input,
    Kill,
    Link,
    Pause,
    Quota,
    Slow,
    Stop,
    Uneven,
    first_step,
)
from ringside.monitor.run.table import StepTable
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import duration, name_ranks, percent

SIZE = 0.3
"""How much slower than the others, beside what it was before, a rank is made that is drawn at random."""
OF_A_RANK = (Slow, Input, Uneven, Quota)
"""Faults that make one rank's every step longer."""
WANTED: Mapping[type, tuple[str, ...]] = {
    **dict.fromkeys((*OF_A_RANK, Pause), ("slow_rank", "uneven_work", "input_bound")),
    **dict.fromkeys((Hang, Stop), ("hang",)),
    Link: ("slow_link",),
    Diverge: ("diverged",),
    Kill: ("dead_rank",),
}
"""Which verdicts are right about a fault."""
LONG_PAUSE_S = 4.0
"""A pause so long may be called a hang that was over again."""


SHOWN: Mapping[type, Mapping[str, float]] = {Input: {"seconds": 0.06}, Pause: {"seconds": 0.4, "every": 5}}
"""How large a fault is that is drawn, where that is not what it is anyway."""


def draw(seed: int, ranks: int, steps: int, kind: type[Fault] = Slow) -> Fault:
    """Return a fault drawn at random: who, and from which step on (after a healthy fifth of `steps`)."""
    generator = random.Random(seed)
    rank, begin = generator.randrange(ranks), generator.randint(steps // 5, 3 * steps // 10)
    values: dict[str, Any] = {"from_step" if kind in LASTING else "at_step": begin, **SHOWN.get(kind, {})}
    if kind is Link:
        values["to"] = (rank + 1) % ranks
    return kind(rank=rank, **values)


def injected(fault: Fault | None) -> dict[str, Any]:
    """Return `summary.json`'s `injected`."""
    if fault is None:
        return {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    ranks = [fault.rank, fault.to] if isinstance(fault, Link) else [fault.rank]
    content: dict[str, Any] = {"kind": fault.kind, "ranks": ranks, "factor": None}
    given = {name: getattr(fault, name) for name in ("factor", "seconds", "by", "cpus") if hasattr(fault, name)}
    return {**content, **given, "from_step": first_step(fault)}


def reveal(fault: Fault | None, verdicts: Sequence[Verdict], began: bool = True) -> tuple[bool, str]:
    """Return whether the verdicts are right about what was injected, and both in words.

    Args:
        fault: What was injected; None: nothing.
        verdicts: What was found.
        began: Whether the run lasted until the fault.
    """
    if fault is None:
        return not verdicts, _named_nobody(verdicts, "Nothing was injected")
    if not began:
        alarm = ", yet a rank was named: other load on this machine, or a false alarm" if verdicts else ""
        return False, f"What was to be injected never began, the run ended before: {fault}{alarm}."
    words = f"What was injected: {fault.describe()}"
    if isinstance(fault, Pause) and not fault.every:
        called = [v for v in verdicts if v.kind != "hang" or v.ranks != [fault.rank] or fault.seconds < LONG_PAUSE_S]
        return not called, _named_nobody(called, f"{words}. One stall makes no slow rank")
    begin = 0 if isinstance(fault, Kill) else first_step(fault)
    told = [v for v in verdicts if names(fault, v)]
    wanted = [v for v in told if v.kind in WANTED[type(fault)]]
    named = [v for v in wanted if v.detected_step >= begin]
    others = [v for v in verdicts if v not in told]
    if early := [v for v in wanted if v.detected_step < begin]:
        found = "It was detected" if named else "It was not detected in time"
        alarm = f"a false alarm named its rank in step {early[0].detected_step}, before it began"
        return False, f"{words}. {found}, {'but' if named else 'and'} {alarm}."
    halting_s = fault.seconds if isinstance(fault, Input | Pause) else 0.0
    if isinstance(fault, (*OF_A_RANK, Pause)) and halting_s < LONG_PAUSE_S and any(v.kind == "hang" for v in told):
        found = "It was detected, but" if named else "It was not detected in time, and"
        return False, f"{words}. {found} its rank was called hung, which it was not: a false alarm."
    if named and not others:
        return True, f"{words}. The verdict is correct{_delay(fault, named[0])}."
    if named:
        return True, f"{words}. It was detected, and another rank too: other load on this machine, or a false alarm."
    if others:
        return False, f"{words}. The verdict is wrong: it names another rank."
    where = "time" if isinstance(fault, (*LASTING, Pause)) else "this run"
    return False, f"{words}. It was not detected in {where}."


def has_begun(fault: Fault | None, verdicts: Sequence[Verdict], steps: int) -> bool:
    """Tell whether a run of so many steps lasted until a fault; a step in which a rank halts is not recorded."""
    if fault is None or steps > first_step(fault):
        return True
    halts = isinstance(fault, Kill | Hang | Stop)
    return halts and (steps == first_step(fault) or any(v.kind in WANTED[type(fault)] for v in verdicts))


def names(fault: Fault, verdict: Verdict) -> bool:
    """Tell whether a verdict is on the rank of a fault; of two replicas that differ neither can be told right."""
    if isinstance(fault, Diverge) and verdict.kind == "diverged":
        return fault.rank in verdict.ranks
    if isinstance(fault, Link):  # it carries less both ways
        return verdict.kind == "slow_link" and set(verdict.ranks) == {fault.rank, fault.to}
    return verdict.ranks == [fault.rank]


def facts(fault: Fault | None, verdicts: Sequence[Verdict], table: StepTable) -> dict[str, Any]:
    """Return what was injected, what it came to, what was found and the errors, with null for what does not apply.

    Args:
        fault: What was injected, as it was fixed before the run.
        verdicts: What was found.
        table: The run's records.
    """
    came_to = None
    if isinstance(fault, OF_A_RANK):
        came_to = measure_change(table.steps, table["own_seconds"], fault.rank, first_step(fault))
    told = next((v for v in verdicts if fault is None or v.kind in WANTED[type(fault)]), None)
    found: dict[str, Any] | None = None
    if told is not None:
        found = {name: getattr(told, name) for name in ("kind", "ranks", "since_step", "detected_step")}
        found |= dict.fromkeys(("relative", "since_interval"))
        if told.kind == "diverged":  # replicas are compared now and then
            found["since_interval"] = (told.since_step, told.detected_step)
        if told.kind in OWN_TIME_KINDS and len(told.ranks) == 1:
            usual = float(told.evidence.get("usual_excess_ratio", 0.0))
            found["relative"] = (1.0 + told.excess_ratio) / (1.0 + usual) - 1.0
    errors: dict[str, Any] | None = None
    if fault is not None and told is not None and found is not None:
        errors = {
            "names_the_rank": names(fault, told),
            "since_steps": told.since_step - first_step(fault),
            "delay_steps": told.detected_step - first_step(fault) + 1,
            "relative": None,
            "interval_holds": None,
        }
        if came_to is not None and found["relative"] is not None and names(fault, told):
            errors["relative"] = found["relative"] - came_to.relative
            low, high = came_to.relative_interval
            errors["interval_holds"] = low <= found["relative"] <= high
    measured = None if came_to is None else came_to._asdict()
    return {"injected": injected(fault), "came_to": measured, "found": found, "errors": errors}


def facts_lines(found: Mapping[str, Any]) -> list[str]:
    """Return `facts` in words; nothing where there is nothing to hold against each other."""
    lines = []
    if came_to := found["came_to"]:
        lines.append(
            f"  came to   {name_ranks(found['injected']['ranks'])}'s own time {_change(came_to['own_seconds'])}, "
            f"the others' {_change(came_to['others_own_seconds'])}: relative {_signed(came_to['relative'])} "
            f"({_range(came_to['relative_interval'])}; {came_to['steps'][0]} steps before, {came_to['steps'][1]} after)"
        )
    if told := found["found"]:
        since, size = "", ""
        if told["since_interval"] is not None:
            since = " ({} to {})".format(*told["since_interval"])
        if told["relative"] is not None:
            size = f", {_signed(told['relative'])}"
        lines.append(
            f"  found     {name_ranks(told['ranks']) or 'the job'}, since step {told['since_step']}{since}{size}"
        )
    if errors := found["errors"]:
        words = [f"who: {'right' if errors['names_the_rank'] else 'WRONG'}", f"since: {errors['since_steps']:+d} steps"]
        if errors["relative"] is not None:
            words.append(f"size: {100 * errors['relative']:+.1f} points")
        if errors["interval_holds"] is not None:
            words.append(f"{'within' if errors['interval_holds'] else 'OUTSIDE'} the interval of what it came to")
        lines.append(f"  errors    {', '.join(words)}")
    if lines and found["came_to"]:
        lines.append("  Relative: beside the others and before. Its interval: 95%, Student's t over blocks of 8 steps.")
    return lines


def _change(seconds: Sequence[float]) -> str:
    before, after = seconds
    return f"{duration(before)} → {duration(after)} ({_signed(after / before - 1.0)})"


def _signed(ratio: float) -> str:
    return f"{round(100 * ratio):+d}%"  # no -0%


def _range(interval: Sequence[float]) -> str:
    return f"{_signed(interval[0])} to {_signed(interval[1])}"


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
    if not isinstance(fault, LASTING):
        return ""
    return f", {verdict.detected_step - fault.from_step + 1} steps after it began"
