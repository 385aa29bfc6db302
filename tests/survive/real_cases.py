"""Runs cases with real workers and prints a line of JSON for each; for tests and bench/survive/kill_matrix.py."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.survive.counting import count
from tests.survive.herd import Report, Store, run_job

from verification.survive.audit import audit

RANKS, STEPS = 4, 30


def warm_up() -> None:
    """Import and set up whatever the first step takes, so that workers that are forked need not."""
    torch.set_num_threads(1)
    count(1, Path())


def wrongs(report: Report, steps: int) -> list[str]:
    """Return every invariant that a job broke, in words."""
    found = [f"rank raised: {error.splitlines()[-1]}" for error in report.errors]
    found += ["time was up"] if report.timed_out else []
    whole = {rank: end for rank, end in report.ended.items() if not end["left"]}
    found += [] if whole else ["nobody finished"]
    found += [f"rank {rank} ended with step {end['step']}" for rank, end in whole.items() if end["step"] != steps]
    found += [f"rank {rank} consumed wrongly: {end['wrong']}" for rank, end in whole.items() if end["wrong"]]
    found += ["states differ"] if len({end["digest"] for end in whole.values()}) > 1 else []
    return found


def run_case(store: Store, name: str, case: Mapping[str, Any]) -> tuple[Report, list[str]]:
    """Run one case: `trap`, and perhaps `steps`, `ranks`, `hosts`, `cut` and settings of `training`.

    In a lab `cut` names links that go silent when the trap stops a worker, which then goes on.
    """
    given = ("trap", "steps", "ranks", "checkpoints", "hosts", "cut")
    settings, links = {key: case[key] for key in case if key not in given}, case.get("cut", ())
    steps, ranks = case.get("steps", STEPS), case.get("ranks", RANKS)
    with tempfile.TemporaryDirectory(prefix="ringside-survive-") as directory:
        if case.get("checkpoints"):
            settings |= {"checkpoint_dir": f"{directory}/checkpoints", "checkpoint_every": case["checkpoints"]}
        worker: Callable[[int, Path], Any] = functools.partial(_count, steps, settings)
        hosts, on_stop = case.get("hosts", 1), functools.partial(_cut, store, links) if links else None
        report = run_job(store, name, ranks, worker, Path(directory), trap=case["trap"], hosts=hosts, on_stop=on_stop)
    if store.lab is not None and links:
        store.lab.restore()
    return report, wrongs(report, steps)


def _cut(store: Store, links: Sequence[tuple[int, int]]) -> None:
    assert store.lab is not None
    for link in links:
        store.lab.cut(link=link)


def _count(steps: int, settings: Mapping[str, Any], rank: int, directory: Path) -> Any:
    return count(steps, directory, **settings)


def main(lines: list[str]) -> None:
    warm_up()
    store = Store()
    try:
        for number, line in enumerate(lines):
            case = json.loads(line)
            report, wrong = run_case(store, f"case{number}", case)
            wrong += audit(store.registers(f"case{number}"), case.get("steps", STEPS), resumed="checkpoints" in case)
            members = report.ended[min(report.ended)]["members"] if report.ended else []
            told = {"wrong": wrong, "deaths": report.deaths, "members": members, "seconds": report.seconds}
            print(json.dumps(told), flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
