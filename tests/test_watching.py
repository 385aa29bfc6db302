"""A run as its parent sees it: where it is written, what is shown of it, what is added once its ranks have ended."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.monitor.jobs import records_of, run_info
from tests.recorded_runs import own_times

from ringside.errors import UsageError
from ringside.launch.follow import choose_directory, conclude_run, environment, follow_run
from ringside.launch.torchrun import StopRequest
from ringside.monitor.run.directory import RUN, RunReader, RunWriter
from ringside.monitor.verdict import Verdict
from ringside.processes import Death
from ringside.view.run.follower import RunFollower, ShownFinding

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
    concluded = conclude_run(tmp_path, [KILLED])
    assert concluded is not None
    (verdict,) = concluded[1]
    assert (verdict.kind, verdict.ranks, verdict.since_step) == ("dead_rank", [1], 7)
    assert verdict.evidence["signal"] == "SIGKILL"
    assert "arrived" in verdict.evidence or not seen
    conclude_run(tmp_path, [KILLED])
    assert len([event for event in RunReader(tmp_path).poll_events() if "verdict" in event]) == len(seen) + 1


@pytest.mark.parametrize(
    "death",
    [
        Death(rank=1, pid=101, status=1, signum=0),
        Death(rank=1, pid=101, status=None, signum=signal.SIGTERM),
        Death(rank=1, pid=101, status=None, signum=signal.SIGINT),
        Death(rank=1, pid=101, status=None, signum=signal.SIGHUP),
        Death(rank=1, pid=99, status=None, signum=signal.SIGKILL),
    ],
    ids=["an error of its own", "asked to end", "interrupted", "its terminal gone", "not of this run"],
)
def test_other_ends_are_no_verdict(tmp_path: Path, death: Death) -> None:
    a_run(tmp_path)
    concluded = conclude_run(tmp_path, [death])
    assert concluded is not None
    assert concluded[1] == []


def test_the_first_death_of_this_run_is_the_cause_and_the_others_follow(tmp_path: Path) -> None:
    a_run(tmp_path)
    error = Death(rank=0, pid=100, status=1, signum=0)
    started_anew = Death(rank=0, pid=99, status=1, signum=0)
    concluded = conclude_run(tmp_path, [started_anew, KILLED, error], extra={"comparison": {"asked": 2}})
    assert concluded is not None
    summary, (verdict,) = concluded
    assert summary["comparison"] == {"asked": 2}
    assert verdict.detected_step == 7
    assert verdict.cause == "its process 101 was ended by SIGKILL"
    assert verdict.evidence == {"pid": 101, "signal": "SIGKILL", "last_recorded_step": 6}
    assert "last checkpoint" in verdict.advice


def test_a_death_before_the_first_record_is_in_step_0(tmp_path: Path) -> None:
    RunWriter(tmp_path, run_info(2))
    concluded = conclude_run(tmp_path, [KILLED])
    assert concluded is not None
    (verdict,) = concluded[1]
    assert (verdict.since_step, verdict.evidence["last_recorded_step"]) == (0, -1)


@pytest.mark.parametrize("seen", [msgspec.structs.replace(SEEN, ranks=[0]), SEEN], ids=["another rank", "known"])
def test_the_hang_watch_has_the_last_word_on_who_died(tmp_path: Path, seen: Verdict) -> None:
    a_run(tmp_path, msgspec.structs.replace(seen, ranks=[0]), msgspec.structs.replace(seen, kind="slow_rank"), seen)
    concluded = conclude_run(tmp_path, [KILLED])
    assert concluded is not None
    told = [verdict for verdict in concluded[1] if verdict.kind == "dead_rank"]
    assert [verdict.ranks for verdict in told][-1] == seen.ranks
    assert ("signal" in told[-1].evidence) is (seen is SEEN)


def test_where_nothing_was_recorded_or_can_be_read_there_is_no_summary(tmp_path: Path, caplog: Any) -> None:
    assert conclude_run(tmp_path / "nowhere", [KILLED]) is None
    assert caplog.text == ""
    (tmp_path / RUN).write_text("not a run")
    assert conclude_run(tmp_path, [KILLED]) is None
    assert "the summary of this run is missing" in caplog.text


def test_a_run_gets_a_directory_that_can_be_written_and_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, warning = choose_directory(None, "demo")
    assert path.parent == Path("runs")
    assert path.name.startswith("demo-")
    assert path.name.endswith(f"-{os.getpid()}")
    assert list(path.iterdir()) == []
    assert warning == ""
    assert choose_directory(path / "below", "demo") == (path / "below", "")
    (path / RUN).write_text("{}")
    with pytest.raises(UsageError, match="already contains a run"):
        choose_directory(path, "demo")


def test_where_it_cannot_be_written_another_place_is_found_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path, warning = choose_directory(tmp_path / "file" / "run", "demo")
    assert path.parent == tmp_path
    assert path.name.startswith("ringside-demo-")
    assert warning == f"{tmp_path}/file/run cannot be written (Not a directory): this run is recorded elsewhere"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    path, warning = choose_directory(tmp_path / "file" / "run", "demo")
    assert path == tmp_path / "file" / "run"
    assert warning.endswith(": training goes on, but nothing of it is recorded")


def test_ranks_are_told_where_the_run_is_and_who_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = environment(Path("run"))
    assert {"RINGSIDE_RUN_DIR": str(tmp_path / "run"), "RINGSIDE_LAUNCHED": "1"}.items() <= given.items()
    assert given["PATH"] == os.environ["PATH"]


class Launcher:
    """Stands for a running torchrun: what it does in each wait, and what it was told."""

    def __init__(self, *waits: Any) -> None:
        self.waits, self.ended = list(waits), []

    def wait(self, timeout_s: float) -> int | None:
        assert 0 < timeout_s < 1
        one = self.waits.pop(0)
        return one() if callable(one) else one  # type: ignore[no-any-return]

    def end(self, signum: int, hurry: Any) -> None:
        self.ended.append((signum, hurry))


def shown_of(path: Path, launcher: Launcher, stop: StopRequest) -> tuple[int, list[tuple[int, list[ShownFinding]]]]:
    shown: list[tuple[int, list[ShownFinding]]] = []

    def show(run: RunFollower, new: list[ShownFinding]) -> None:
        shown.append((run.step, new))

    return follow_run(launcher, path, stop, show), shown  # type: ignore[arg-type]


def test_what_is_new_is_shown_until_the_launcher_ends(tmp_path: Path) -> None:
    launcher = Launcher(None, lambda: a_run(tmp_path / "run", SEEN), None, 3)
    status, shown = shown_of(tmp_path / "run", launcher, StopRequest())
    assert status == 3
    assert launcher.ended == []
    assert [(step, [finding.verdict for finding in new]) for step, new in shown] == [
        (-1, []), (6, [SEEN]), (6, []), (6, []),
    ]  # fmt: skip


@pytest.mark.parametrize("waits", [(None, None, None), (None, None, 9)], ids=["while it runs", "as it ends"])
def test_who_is_asked_to_stop_ends_the_launcher(tmp_path: Path, waits: tuple[int | None, ...]) -> None:
    stop = StopRequest()

    def asked() -> int | None:
        stop.signum = signal.SIGINT
        return waits[-1]

    launcher = Launcher(*waits[:-1], asked)
    status, shown = shown_of(tmp_path / "run", launcher, stop)
    assert status == 128 + signal.SIGINT
    assert launcher.ended == ([(signal.SIGINT, stop.hurry)] if waits[-1] is None else [])
    assert len(shown) == 3


def test_a_run_that_cannot_be_read_is_said_once_and_goes_on(tmp_path: Path, caplog: Any) -> None:
    RunWriter(tmp_path, run_info(0))
    status, shown = shown_of(tmp_path, Launcher(None, None, 0), StopRequest())
    assert status == 0
    assert shown == [(-1, [])] * 3
    assert caplog.text.count("the run goes on and is not shown any more") == 1
