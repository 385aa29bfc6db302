"""A link that `tc` slows down while a job runs is named, and only then: over stock Gloo watched, and our engine."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import zygote

pytest.importorskip("torch")

from ringside.lab import Lab
from ringside.monitor.links.sampler import has_tcp_info
from ringside.monitor.run.directory import RunReader

from .factory import LabFactory

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not has_tcp_info(), reason="this kernel's TCP_INFO holds too little"),
]

LIMIT_S = 80.0
SCRIPTS = Path(__file__).parent / "scripts"


def train(lab: Lab, path: Path, engine: str, steps: int, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Train until the verdict is over or for `steps` steps; return the summary."""
    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        lab.run(
            [zygote.python(), str(SCRIPTS / "slow_link.py")],
            {"OUT": str(path / "run"), "ENGINE": engine, "STEPS": str(steps)},
            timeout_s=LIMIT_S,
            after_failure_s=10,
        ).check()
    finally:
        thread.join(LIMIT_S)
    return json.loads((path / "run" / "summary.json").read_text())


class Story:
    """Slows the link between hosts 0 and 1 once its usual rate is known, and mends it when it was named."""

    def __init__(self, lab: Lab, run: Path) -> None:
        self.lab, self.run = lab, run
        self.slowed_at = self.mended_at = -1

    def __call__(self) -> None:
        self._until(lambda: self._file("steps.jsonl").count(b'"wires"') >= 3 * 16)
        self.slowed_at = self._steps()
        self.lab.set_rate("30mbit", link=(0, 1))
        self._until(lambda: b'"slow_link"' in self._file("events.jsonl"))
        self.mended_at = self._steps()
        self.lab.set_rate("300mbit", link=(0, 1))

    def _file(self, name: str) -> bytes:
        file = self.run / name
        return file.read_bytes() if file.exists() else b""

    def _steps(self) -> int:
        return max((record.step for record in RunReader(self.run).poll()), default=0)

    def _until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while not there() and time.monotonic() < deadline:
            time.sleep(0.05)  # other processes' files: there is nothing to wait on


@pytest.mark.noisy
@pytest.mark.parametrize("engine", [pytest.param("native", marks=pytest.mark.long), "ringside"])
def test_a_link_that_tc_slows_down_is_named_and_so_is_its_end(
    lab_factory: LabFactory, tmp_path: Path, engine: str
) -> None:
    lab = lab_factory(hosts=3, wiring="mesh", rate="300mbit")
    story = Story(lab, tmp_path / "run")
    summary = train(lab, tmp_path, engine, 600, story)
    (verdict,) = summary["verdicts"]
    assert verdict["kind"] == "slow_link", verdict
    assert set(verdict["ranks"]) == {0, 1}
    # A period lasts seven steps. When it began is told from periods; a busy machine may put one before it too low, too.
    assert -40 <= verdict["since_step"] - story.slowed_at <= 20
    assert verdict["evidence"]["bytes_per_second"] < 30e6 / 8 * 1.3
    assert verdict["evidence"]["until_step"] >= story.mended_at - 2
    assert verdict["cost_rank_seconds"] > 0
    assert {(link["src"], link["dst"]) for link in summary["links"]} >= {tuple(verdict["ranks"])}
    kinds = [event["kind"] for event in RunReader(tmp_path / "run").poll_events()]
    assert (kinds.count("verdict"), kinds.count("repaired")) == (1, 1)
    answer = summary["questions"]["network_between_hosts"]
    assert answer["answer"] is True
    assert answer["numbers"]["hosts"] == 3
    print(f"{engine}: slowed at step {story.slowed_at}, named at {verdict['detected_step']}, {verdict['cause']}")


@pytest.mark.noisy
def test_a_link_that_our_engine_goes_around_is_noted_in_the_run(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab, run = lab_factory(hosts=3, wiring="mesh", rate="300mbit"), tmp_path / "run"
    settled = tmp_path / "settled"

    def slow_down() -> None:
        while not settled.exists() and not over.wait(0.05):
            pass  # a rank's file: there is nothing to wait on
        lab.set_rate("30mbit", link=(0, 1))

    over, thread = threading.Event(), threading.Thread(target=slow_down)
    thread.start()
    try:
        env = {"OUT": str(run), "SETTLED": str(settled), "RINGSIDE_SELECTION": "fresh"}
        lab.run([sys.executable, str(SCRIPTS / "revised.py")], env, timeout_s=LIMIT_S, after_failure_s=10).check()
    finally:
        over.set()
        thread.join()
    events = [event for event in RunReader(run).poll_events() if event["kind"] == "revised"]
    named = [sorted(event["links"][0]["ranks"]) for event in events if event["links"]]
    assert [0, 1] in named, events
    (note,) = [one for one in json.loads((run / "summary.json").read_text())["revisions"] if one["links"]][:1]
    assert note["before"] != note["after"]
    assert "the link from rank" in note["words"]


@pytest.mark.noisy
@pytest.mark.long
def test_a_healthy_job_between_hosts_names_no_link(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=2, rate="300mbit")
    summary = train(lab, tmp_path, "native", 90)
    assert [verdict["kind"] for verdict in summary["verdicts"]] == []
    assert {(link["src"], link["dst"]) for link in summary["links"]} == {(0, 1), (1, 0)}
    assert all(link["bytes_per_s"] > 5e6 for link in summary["links"])
