"""Starts the ranks of a job in the lab and puts together what they report."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.common import last_json, module_command, report_progress

from ringside.lab import Lab, RankPlacement

MB, KB = 1 << 20, 1 << 10
DEFAULT = "default"
_LIMIT_S = 700.0  # for a whole job
_FIRST_SWITCH_PORT = 31000
Key = tuple[int, int, str]  # ranks, bytes, contender


@dataclass(frozen=True)
class Case:
    """Contenders for one number of ranks and one size, which take turns.

    Args:
        n: The first `n` ranks take part.
        size_bytes: Of the tensor (float32).
        contenders: `gloo` (stock all-reduce), `default` (ours as it chooses), `idle`, or the names of algorithms.
        iterations: Calls in a turn; 0: as many as fit.
        rounds: Turns of every contender; 0: as many as the others have.
        warm: One call more before each turn, which does not count: connections that were idle for a while begin slowly,
            and Gloo's own are kept busy by the barriers between turns.
    """

    n: int
    size_bytes: int
    contenders: Sequence[str]
    iterations: int = 0
    rounds: int = 0
    warm: bool = False


@dataclass
class Turn:
    """What one contender's turn was, on all ranks.

    Args:
        key: (ranks, bytes, contender).
        round: In which round.
        iterations: Calls.
        reports: What each rank says, by rank.
    """

    key: Key
    round: int
    iterations: int
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time of one all-reduce: from the last rank's start to the last rank's end, by the number of calls.

        Of calls that were made apart, the median.
        """
        spans = list(zip(*(report["spans"] for report in self.reports), strict=True))
        took = [max(end for _, end in span) - max(start for start, _ in span) for span in spans]
        return float(median(took)) * len(spans) / self.iterations

    @property
    def cpu_s(self) -> float:
        """Processor time of all ranks together in one all-reduce, seconds."""
        return float(sum(report["cpu_s"] for report in self.reports)) / self.iterations

    @property
    def span(self) -> tuple[float, float]:
        """From the last rank's start of the first call to the last rank's end of the last one."""
        return max(r["spans"][0][0] for r in self.reports), max(r["spans"][-1][1] for r in self.reports)


class Turns:
    """All turns of a job."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self.turns = list(turns)

    def of(self, n: int, size_bytes: int, contender: str) -> list[Turn]:
        """Return one contender's turns in one case, by round."""
        return [turn for turn in self.turns if turn.key == (n, size_bytes, contender)]

    def seconds(self, n: int, size_bytes: int, contender: str) -> float:
        """Return the median time of its all-reduce, seconds."""
        return median(turn.seconds for turn in self.of(n, size_bytes, contender))

    def cpu_s(self, n: int, size_bytes: int, contender: str) -> float:
        """Return the median processor time of its all-reduce, all ranks together, seconds."""
        return median(turn.cpu_s for turn in self.of(n, size_bytes, contender))

    def idle(self, n: int, size_bytes: int, contender: str) -> float:
        """Return which share of the machine's cores was idle in all of its turns."""
        counted = [turn.reports[0]["ticks"] for turn in self.of(n, size_bytes, contender)]
        return sum(idle for idle, _ in counted) / max(sum(every for _, every in counted), 1)

    def chosen(self, n: int, size_bytes: int) -> str:
        """Return what `default` had chosen at the end."""
        return str(self.of(n, size_bytes, DEFAULT)[-1].reports[0]["chosen"])

    def ratio(self, n: int, size_bytes: int, slow: str, fast: str) -> float:
        """Return how many times as long one takes as another: the median over rounds in which both had a turn."""
        return median(self.ratios(n, size_bytes, slow, fast))

    def ratios(self, n: int, size_bytes: int, slow: str, fast: str) -> list[float]:
        """Return the same round by round."""
        pairs = zip(self.of(n, size_bytes, slow), self.of(n, size_bytes, fast), strict=True)
        return [a.seconds / b.seconds for a, b in pairs]


def take_turns(
    lab: Lab,
    cases: Sequence[Case],
    rounds: int,
    *,
    turn_s: float = 0.05,
    apart: bool = False,
    hops: bool = False,
    switch: bool = False,
    probes: bool = False,
    settle: int = 400,
) -> Turns:
    """Run cases on the ranks of a lab, contenders in turn, round after round.

    Args:
        lab: An open one.
        cases: What is measured.
        rounds: Turns of every contender.
        turn_s: How long a turn lasts about, seconds, unless one call takes longer.
        apart: All ranks begin every call at an agreed time, instead of one call right after the other.
        hops: Keep what each message took.
        switch: A reducer at the switch takes part; every number of ranks is a job of its own then.
        probes: Communicators time the links when they are made, as they do by default; so they do in any case where
            the default choice takes part.
        settle: Calls of the default choice before it is measured, at most, until little is left to be tried.
    """
    sizes = sorted({case.n for case in cases}, reverse=True)
    ports = [(n, _FIRST_SWITCH_PORT + n) for n in sizes] if switch else []
    plan = {
        "cases": [vars(case) for case in cases],
        "rounds": rounds,
        "turn_s": turn_s,
        "apart": apart,
        "hops": hops,
        "switch_ports": ports,
        "settle": settle,
    }
    if switch:  # one process for all jobs: importing torch takes seconds
        words = module_command("bench.lab.in_network", *(str(port) for _, port in ports))
        lab.run_switch(words, {"MASTER_ADDR": lab.address(0)}, stderr=subprocess.DEVNULL)
    measures = probes or any(DEFAULT in case.contenders for case in cases)
    env = {"RINGSIDE_SELECTION": "fresh" if measures else "off"}  # not what an earlier run has kept
    # The ranks' reports of the same turn together, by rank.
    turns: dict[tuple[Key, int], Turn] = {}
    for reports in run_ranks(lab, "bench.lab.rank", plan, env):
        for report in reports:
            key = (report["n"], report["size_bytes"], report["contender"])
            turn = turns.setdefault((key, report["round"]), Turn(key, report["round"], report["iterations"]))
            turn.reports.append(report)
    return Turns(turns.values())


def run_ranks(lab: Lab, module: str, plan: dict[str, Any], env: dict[str, str] | None = None) -> list[Any]:
    """Run a module of ours on every rank and return what each reports on its last line.

    Args:
        lab: An open one.
        module: Takes the name of a file with the plan as JSON.
        plan: What is to be done.
        env: Variables to add.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        command = module_command(module, file.name)
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hosts of a lab have no names to look up, and torch says so
        result = lab.run(
            command, {**quiet, **(env or {})}, timeout_s=_LIMIT_S, after_failure_s=5.0, sink=_progress
        ).check()
    return [last_json(rank.stdout) for rank in result.ranks]


def _progress(place: RankPlacement, stream: str, line: str) -> None:
    if place.rank == 0 and stream == "stderr":
        report_progress(f"    {line}")
