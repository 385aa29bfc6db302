"""What the parent of a run adds once its ranks have ended."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from tests.monitor.jobs import records_of, run_info
from tests.recorded_runs import own_times

from ringside.monitor.run_directory import RunReader, RunWriter
from ringside.monitor.verdict import Verdict
from ringside.processes import Death
from ringside.watching import conclude

KILLED = Death(rank=1, pid=101, status=None, signum=signal.SIGKILL)
SEEN = Verdict(
    kind="dead_rank", ranks=[1], since_step=7, detected_step=7, excess_ratio=0.0, evidence={"arrived": "0"}, advice="x"
)


def a_run(path: Path, *verdicts: Verdict) -> None:
    writer = RunWriter(path, run_info(2))
    writer.append(records_of(own_times(7, 2)))
    for verdict in verdicts:
        writer.event({"unix": 0.0, "kind": "verdict", "verdict": msgspec.to_builtins(verdict)})


@pytest.mark.parametrize("seen", [(), (SEEN,)], ids=["the parent alone", "after the hang watch"])
def test_a_rank_that_a_signal_ended_is_named_once_and_with_the_signal(
    tmp_path: Path, seen: tuple[Verdict, ...]
) -> None:
    a_run(tmp_path, *seen)
    concluded = conclude(tmp_path, [KILLED])
    assert concluded is not None
    (verdict,) = concluded[1]
    assert (verdict.kind, verdict.ranks, verdict.since_step) == ("dead_rank", [1], 7)
    assert verdict.evidence["signal"] == "SIGKILL"
    assert "arrived" in verdict.evidence or not seen
    conclude(tmp_path, [KILLED])
    assert len([event for event in RunReader(tmp_path).poll_events() if "verdict" in event]) == len(seen) + 1


@pytest.mark.parametrize(
    "death",
    [
        Death(rank=1, pid=101, status=1, signum=0),
        Death(rank=1, pid=101, status=None, signum=signal.SIGTERM),
        Death(rank=1, pid=99, status=None, signum=signal.SIGKILL),
    ],
    ids=["an error of its own", "asked to end", "not of this run"],
)
def test_other_ends_are_no_verdict(tmp_path: Path, death: Death) -> None:
    a_run(tmp_path)
    concluded = conclude(tmp_path, [death])
    assert concluded is not None
    assert concluded[1] == []
