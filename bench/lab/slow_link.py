"""A mesh of which one link is cut to a quarter of its rate while a job runs: when it is answered, and how well."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench.common import Floor, last_json, module_command, process_group, report_progress
from bench.lab.jobs import MB
from bench.lab.report import Row, Section, size_words

from ringside.lab import Lab, RankPlacement

HOSTS, RATE, CUT, LINK, SIZE = 4, "1gbit", "250mbit", (0, 1), 4 * MB
NAMES = ("native", "ring", "ring@0,2,1,3", "halving_doubling", "direct", "two_tree*16", "chain*16@0,2,1,3")
# Collectives after the cut in which it must be answered; for the whole job to end; for the cut to come.
_MOST, _LIMIT_S, _WAIT_S = 40, 150.0, 60.0
_MOST_TO_SETTLE = 60  # calls until the default choice stands


def mesh(repeat: int) -> Section:
    """Cut a link while all-reduces are under way, and hold what comes after against every fixed choice."""
    section = Section(
        "mesh",
        f"Mesh of {HOSTS} hosts, {RATE}, {size_words(SIZE)}: link {LINK[0]}-{LINK[1]} is cut to {CUT} mid-run",
        [("by", "by", "s"), ("ms", "ms", ".2f"), ("by the best fixed", "ratio", ".3f"), ("what", "what", "s")],
    )
    report_progress(f"  mesh: {HOSTS} hosts")
    reports = _run_ranks(max(repeat, 3))
    first = reports[0]
    section.rows.append(_mesh_row("before the cut", median(_slowest_rank_s(reports, "before")), None, first["was"]))
    section.rows.append(
        _mesh_row("until it was answered", median(_slowest_rank_s(reports, "after")), None, first["was"])
    )
    fixed = {name: median(_turn_s(reports, name)) for name in NAMES}
    best = min(fixed, key=lambda name: fixed[name])
    ratios = [a / b for a, b in zip(_turn_s(reports, "default"), _turn_s(reports, best), strict=True)]
    section.rows.append(_mesh_row("default", median(_turn_s(reports, "default")), median(ratios), first["chosen"]))
    section.rows += [_mesh_row(name, seconds, seconds / fixed[best], "fixed") for name, seconds in fixed.items()]
    section.floors = [
        Floor("mesh: collectives until it was answered", first["answered"] or None, 1, 20),
        Floor(f"mesh: time after by the best fixed choice's ({best})", median(ratios), None, 1.15),
    ]
    section.notes = [
        f"answered at collective {first['answered']}: {'; '.join(first['why'][:1])}",
        f"default by {best}, round by round: {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds.",
    ]
    return section


def _mesh_row(by: str, seconds: float, ratio: float | None, choice: str) -> Row:
    return {"by": by, "ms": seconds * 1e3, "ratio": ratio, "what": choice}


def _slowest_rank_s(reports: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [max(times) for times in zip(*(report[key] for report in reports), strict=True)]


def _turn_s(reports: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [max(times) for times in zip(*(report["turns"][name] for report in reports), strict=True)]


def _run_ranks(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=HOSTS, rate=RATE, wiring="mesh") as lab:
        go, plan = Path(folder, "go"), Path(folder, "plan.json")
        plan.write_text(
            json.dumps({"size_bytes": SIZE, "go": str(go), "most": _MOST, "rounds": rounds, "names": NAMES})
        )

        def sink(place: RankPlacement, stream: str, line: str) -> None:
            if line == "READY":
                lab.set_rate(CUT, link=LINK)
                go.touch()

        env = {"RINGSIDE_CACHE_DIR": folder, "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = module_command("bench.lab.slow_link", str(plan))
        result = lab.run(command, env, timeout_s=_LIMIT_S, after_failure_s=5.0, sink=sink).check()
    return [last_json(rank.stdout) for rank in result.ranks]


# ------------------------------------------------------------------------------------------------ on every rank


@process_group()
def run_rank(plan: dict[str, Any]) -> None:
    """Call all-reduces as chosen while the link is cut, and then beside named ones, in turn; print a report as JSON."""
    import ringside

    with ringside.communicator(timeout=60) as comm:
        array = np.ones(plan["size_bytes"] // 4, dtype=np.float32)

        def once(name: str | None = None) -> float:
            began = time.perf_counter()
            comm.all_reduce(array, "avg", algorithm=name)
            return time.perf_counter() - began

        def settle() -> None:
            for _ in range(_MOST_TO_SETTLE):
                if comm.settled(array.nbytes):
                    return
                once()

        settle()
        before = [once() for _ in range(8)]
        was = comm.explain(array.nbytes).partition(": ")[2].partition(".")[0]
        comm.barrier()
        if comm.rank == 0:
            print("READY", flush=True)
        until = time.monotonic() + _WAIT_S
        while not os.path.exists(plan["go"]):
            if time.monotonic() > until:
                raise SystemExit("nobody cut the link")
            time.sleep(0.01)
        comm.barrier()
        after, answered = [], 0
        for number in range(1, plan["most"] + 1):
            after.append(once())
            if comm.revisions and not answered:
                answered = number
                break
        settle()
        turns: dict[str, list[float]] = {name: [] for name in ("default", *plan["names"])}
        for name in plan["names"]:
            once(name)
        for _ in range(plan["rounds"]):
            for name, times in turns.items():
                comm.barrier()
                times.append(once(None if name == "default" else name))
        chosen = comm.explain(array.nbytes).partition(": ")[2].partition(".")[0]
        report: dict[str, Any] = {"before": before, "after": after, "answered": answered, "was": was}
        report |= {"chosen": chosen, "turns": turns, "why": list(comm.revisions)}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    run_rank(json.loads(Path(sys.argv[1]).read_text()))
