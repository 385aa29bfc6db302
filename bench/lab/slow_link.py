"""A mesh of which one link is cut to a quarter of its rate while a job runs: when it is answered, and how well."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import Floor, module_command, report_progress
from bench.lab.jobs import MB
from bench.lab.report import Row, Section, size_words

from ringside.lab import Lab, RankPlacement

HOSTS, RATE, CUT, LINK, SIZE = 4, "1gbit", "250mbit", (0, 1), 4 * MB
NAMES = ("native", "ring", "ring@0,2,1,3", "halving_doubling", "direct", "two_tree*16", "chain*16@0,2,1,3")
_MOST, _LIMIT_S = 40, 150.0


def mesh(repeat: int) -> Section:
    """Cut a link while all-reduces are under way, and hold what comes after against every fixed choice."""
    section = Section(
        "mesh",
        f"Mesh of {HOSTS} hosts, {RATE}, {size_words(SIZE)}: link {LINK[0]}-{LINK[1]} is cut to {CUT} mid-run",
        [("by", "by", "s"), ("ms", "ms", ".2f"), ("by the best fixed", "ratio", ".3f"), ("what", "what", "s")],
    )
    report_progress(f"  mesh: {HOSTS} hosts")
    reports = _run(max(repeat, 3))
    first = reports[0]
    section.rows.append(_row("before the cut", median(_slowest(reports, "before")), None, first["was"]))
    section.rows.append(_row("until it was answered", median(_slowest(reports, "after")), None, first["was"]))
    fixed = {name: median(_turns(reports, name)) for name in NAMES}
    best = min(fixed, key=lambda name: fixed[name])
    ratios = [a / b for a, b in zip(_turns(reports, "default"), _turns(reports, best), strict=True)]
    section.rows.append(_row("default", median(_turns(reports, "default")), median(ratios), first["chosen"]))
    section.rows += [_row(name, seconds, seconds / fixed[best], "fixed") for name, seconds in fixed.items()]
    section.floors = [
        Floor("mesh: collectives until it was answered", first["answered"] or None, 1, 20),
        Floor(f"mesh: time after by the best fixed choice's ({best})", median(ratios), None, 1.15),
    ]
    section.notes = [
        f"answered at collective {first['answered']}: {'; '.join(first['why'][:1])}",
        f"default by {best}, round by round: {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds.",
    ]
    return section


def _row(by: str, seconds: float, ratio: float | None, choice: str) -> Row:
    return {"by": by, "ms": seconds * 1e3, "ratio": ratio, "what": choice}


def _slowest(reports: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [max(times) for times in zip(*(report[key] for report in reports), strict=True)]


def _turns(reports: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [max(times) for times in zip(*(report["turns"][name] for report in reports), strict=True)]


def _run(rounds: int) -> list[dict[str, Any]]:
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
        command = module_command("bench.lab.slow_link_rank", str(plan))
        result = lab.run(command, env, timeout_s=_LIMIT_S, after_failure_s=5.0, sink=sink).check()
    return [json.loads(rank.stdout.strip().rpartition("\n")[2]) for rank in result.ranks]
