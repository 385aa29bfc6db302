"""Logs of single collectives that a job writes while it is looked at: `top`, `serve` and `report` say what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.recorded_runs import own_times, write_run
from tests.support.waiting import until

from ringside.commands import main
from ringside.doctor.calls import follow
from ringside.doctor.calls.follow import judge_folder
from ringside.monitor.nccl.report import log_folder, read_log_folder
from ringside.view.run import log_follower
from ringside.view.run.live import LiveRun
from ringside.view.run.log_follower import LogFollower

from .call_logs import CallJob, write_comma, write_inspector

LATE = CallJob(late={2: 0.008}, hosts=dict.fromkeys(range(4), "node0"))


@pytest.mark.parametrize("write", [write_inspector, write_comma])
def test_the_late_rank_is_named_in_a_line(write: object, tmp_path: Path) -> None:
    write(LATE, tmp_path)  # type: ignore[operator]
    (line,) = judge_folder(tmp_path)
    assert "logs: rank 2: in communicator" in line or "traces: rank 2: in communicator" in line


def test_what_names_nobody_says_how_much_was_seen(tmp_path: Path) -> None:
    assert judge_folder(tmp_path) == judge_folder(tmp_path / "missing") == ()
    write_inspector(CallJob(), tmp_path)
    assert judge_folder(tmp_path) == ("NCCL Inspector logs: 240 calls, nobody holds the others up",)
    for path in list(tmp_path.iterdir())[2:]:
        path.unlink()
    (line,) = judge_folder(tmp_path)
    assert line.startswith("NCCL Inspector logs: 120 calls; who is late in communicator")
    assert "give the files of all" in line


def test_the_process_beside_ends_when_the_view_that_holds_its_stdin_does(tmp_path: Path) -> None:
    code = "import time; from ringside.doctor.calls import follow; "
    code += "follow.judge_folder = lambda *_: time.sleep(600); follow.main()"
    words = [sys.executable, "-c", code, str(tmp_path), "0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as beside:
        assert beside.stdin is not None
        beside.stdin.close()
        try:
            assert beside.wait(60.0) == 1
        finally:
            beside.kill()


def test_what_is_no_log_stops_nothing(tmp_path: Path) -> None:
    write_inspector(LATE, tmp_path)
    os.mkfifo(tmp_path / "a-fifo")
    (tmp_path / "a-loop").symlink_to("a-loop")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-link").symlink_to(tmp_path)
    unreadable = tmp_path / "a-secret"
    unreadable.touch(mode=0)
    (line,) = judge_folder(tmp_path)
    assert "rank 2" in line


def test_of_too_many_files_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inspector(LATE, tmp_path)
    monkeypatch.setattr(follow, "MOST_FILES", 2)
    *_, line = judge_folder(tmp_path)
    assert line == f"of the files in {tmp_path} the first 2 by name were read"


def test_logs_of_an_earlier_job_in_the_same_folder_are_not_this_ones(tmp_path: Path) -> None:
    write_inspector(LATE, tmp_path)
    path = next(tmp_path.iterdir())
    written = path.stat().st_mtime
    assert judge_folder(tmp_path, written + 3600.0) == ()
    assert "rank 2" in judge_folder(tmp_path, written - 3600.0)[0]


def test_a_run_names_the_folder_and_views_say_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    write_inspector(LATE, logs)
    path = write_run(tmp_path / "run", own_times(20, 4))
    (path / "events.jsonl").write_bytes(msgspec.json.encode({"kind": "call_logs", "folder": str(logs)}) + b"\n")
    monkeypatch.setattr(log_follower, "STEP_S", 0.01)
    live, unasked = LiveRun(path, follow_logs=LogFollower), LiveRun(path)
    live.poll()
    until(live.poll, "what the logs say")
    unasked.poll()
    assert "rank 2" in live.notes[0]
    assert unasked.notes == []
    live.close()
    assert main(["report", str(path), "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)["call_logs"]
    assert told["folder"] == str(logs)
    assert "rank 2" in told["words"]
    assert "rank 2: in communicator" in (path / "report.html").read_text()
    shutil.rmtree(logs)
    assert main(["report", str(path), "--json"]) == 0  # what was said stays
    assert "rank 2" in msgspec.json.decode(capsys.readouterr().out)["call_logs"]["words"]


def test_where_logs_lie_is_told_by_the_jobs_environment() -> None:
    assert log_folder({"NCCL_INSPECTOR_DUMP_DIR": "/logs", "NCCL_PROFILER_LATENCY_FILE": "/x/y"}) == "/logs"
    assert log_folder({"NCCL_INSPECTOR_DUMP_DIR": "logs"}) == os.path.abspath("logs")
    assert log_folder({"NCCL_PROFILER_LATENCY_FILE": "/x/latency-%h.json"}) == "/x"
    assert log_folder({"NCCL_INSPECTOR_ENABLE": "1"}) == os.path.abspath("nccl-inspector-unknown-jobid")
    assert log_folder({"NCCL_INSPECTOR_ENABLE": "1", "SLURM_JOBID": "7"}) == os.path.abspath("nccl-inspector-7")
    assert log_folder({"NCCL_INSPECTOR_ENABLE": "0"}) == log_folder({}) == ""
    named = [{"kind": "call_logs", "folder": folder} for folder in ("/a", "b", 3, "/c\0")]
    assert read_log_folder([*named, {"kind": "ended"}]) == "/a"
