from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from ringside.doctor import examine
from ringside.monitor.nccl.causes import Blame, Seen
from ringside.monitor.nccl.report import NcclReport

from .written_run import write_run


def test_a_slow_rank_has_the_monitors_verdict_lanes_and_answers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", slow_rank=5)
    (run / "events.jsonl").write_text("")
    (run / "report.html").write_text("<html><title>Ringside</title>")
    before = sorted(path.name for path in run.iterdir())
    found = examine([run])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("slow_rank", [5])
    assert verdict.cost_rank_seconds > 0
    assert found.questions["similar_step_times"].answer is False
    assert found.questions["small_collectives"].answer is False
    assert {span.kind for lane in found.lanes for span in lane.spans} == {"compute", "wait", "communication"}
    assert [lane.note for lane in found.lanes] == [""] * 5 + ["culprit"] + [""] * 2
    assert sorted(path.name for path in run.iterdir()) == before
    told = {note.file.rpartition("/")[2]: note.text for note in found.notes}
    assert told["report.html"] == "the run's page; what it rests on is read instead"
    assert {told[name] for name in told if name != "report.html"} == {told["steps.jsonl"]}


def test_what_nccls_own_records_say_is_a_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for host, rank in (("", 3), ("-host", 5)):
        blame = Blame(cause="slow GPU", rank=rank, seconds=20.0, host_seconds=1.0, gpu_seconds=19.0, communicator="0x9")
        seen = Seen(
            id="0x9", name="dp", ranks=4, ranks_seen=4, calls=100, captured=0, seen_ratio=1.0, seconds=100.0,
            late_seconds={}, waits=[],
        )  # fmt: skip
        report = NcclReport(
            processes=4, interface=6, records=9, dropped=0, torn=0, blames=[blame], communicators=[seen]
        )
        (run / f"nccl{host}.json").write_bytes(msgspec.json.encode(report))
    found = examine([run])
    assert sorted(verdict.ranks for verdict in found.verdicts) == [[3], [5]]
    assert all(note.used for note in found.notes)


def test_a_healthy_run_has_no_verdict(tmp_path: Path) -> None:
    found = examine([write_run(tmp_path / "run")])
    assert found.verdicts == []
    assert found.questions["similar_step_times"].answer is True
    assert all("cut off" not in note.text for note in found.notes)


def test_a_run_in_an_archive_and_one_without_its_run_json(tmp_path: Path) -> None:
    write_run(tmp_path / "a", slow_rank=1)
    (tmp_path / "a" / "events.jsonl").write_text("")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a", "a")
    assert [verdict.ranks for verdict in examine([tmp_path / "a.tar.gz"]).verdicts] == [[1]]
    (tmp_path / "a" / "run.json").unlink()
    found = examine([tmp_path / "a"])
    assert not any(note.used for note in found.notes)
    assert "give the whole run directory" in found.notes[0].text


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_run_that_was_killed_is_judged_as_far_as_it_got(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "endless_run.py"
    process = subprocess.Popen([sys.executable, script, tmp_path / "run"])
    steps, deadline = tmp_path / "run" / "steps.jsonl", time.monotonic() + 60
    try:
        while not steps.exists() or os.path.getsize(steps) < 100_000:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)  # a growing file gives no event to wait for here
    finally:
        process.kill()
        process.wait()
    with steps.open("ab") as file:
        file.write(b'{"step":999999,"rank":0,"end')
    found = examine([tmp_path / "run"])
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("slow_rank", [2])]
    assert all("cut off" in note.text for note in found.notes)
