"""The run that training leaves behind, however it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support import zygote  # noqa: E402
from tests.support.ranks import PYTHON, Ended, run_script  # noqa: E402

import ringside  # noqa: E402
from ringside.monitor.run.directory import RunReader  # noqa: E402

from .training import OLD_TORCH, Plan, ddp_ranks, free_port, group, one_step, small_attachment, steps  # noqa: E402

pytestmark = pytest.mark.native

KEYS = {"schema", "world_size", "steps", "step_seconds", "ranks", "verdicts", "sync", "overhead", "loss"}


def every_step(reader: RunReader, size: int) -> list[tuple[int, int]]:
    """Return (step, rank) of all records, sorted."""
    assert reader.info.world_size == size
    return sorted((record.step, record.rank) for record in reader.poll())


# ------------------------------------------------------------------------------------------------ on one team


def trains(port: int, path: str, engine: str) -> dict[str, Any]:
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine=engine)
        session = attachment.session
        for step in range(8):
            optimizer.zero_grad()
            one_step(ddp, optimizer, Plan(), rank, step)
            optimizer.step()
            ringside.log_step(loss=10.0 - step)
        session.event("note", text="almost done")
        session.end()
        session.end()
        steps(ddp, optimizer, rank, 2)  # after the end nothing is taken in, and nothing breaks
        kept = session.unsent
        return {"path": session.path, "kept": kept, "engine": attachment.engine, "counters": attachment.counters}


@pytest.mark.parametrize(("engine", "name"), [("ringside", "ringside"), ("native", "native")])
def test_a_run_is_complete(tmp_path: Path, engine: str, name: str) -> None:
    first, second = ddp_ranks(2, trains, str(tmp_path / "run"), engine)
    assert first["path"] == tmp_path / "run"
    assert second["path"] is None
    assert first["kept"] == second["kept"] == 0
    reader = RunReader(tmp_path / "run")
    assert every_step(reader, 2) == [(step, rank) for step in range(8) for rank in (0, 1)]
    assert len(set(reader.info.pids)) == 2
    assert reader.info.engine == name
    assert set(reader.info.versions) >= {"ringside", "torch", "numpy", "python"}
    kinds = [event["kind"] for event in reader.poll_events()]
    buckets = ["gradient_memory"] * (2 if name == "ringside" else 0)  # first copied, then rebuilt and shared
    assert kinds == ["started", *buckets, "note", "ended"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["steps"] == 8
    assert summary["verdicts"] == []
    assert [row["rank"] for row in summary["ranks"]] == [0, 1]
    assert summary["loss"]["first"] > summary["loss"]["last"]
    assert summary["sync"]["payload_bytes_per_step"] > 0
    total = summary["sync"]["total_seconds_per_step"]
    assert total > 0 if engine == "ringside" else total is None  # what is only watched is not timed bucket by bucket
    assert 0 < summary["overhead"]["ratio"] < 1
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    print(f"{engine}: overhead {summary['overhead']}")


def test_a_directory_used_again_keeps_the_older_run(tmp_path: Path) -> None:
    for _ in range(2):
        ddp_ranks(2, trains, str(tmp_path / "run"), "ringside")
    for name in ("run", "run.1"):
        assert len(every_step(RunReader(tmp_path / name), 2)) == 16
        assert (tmp_path / name / "summary.json").exists()


def goes_aside(port: int, path: str) -> list[int]:
    heard: list[int] = []
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(run_dir=path)
        attachment.session.on_record(lambda record: heard.append(record.step))
        steps(ddp, optimizer, rank, 3)
        with attachment.session.pause():
            steps(ddp, optimizer, rank, 4)
        steps(ddp, optimizer, rank, 2)
        dist.barrier()
        attachment.session.end()
    return heard


def test_aside_is_timed_and_no_part_of_the_run(tmp_path: Path) -> None:
    for heard in ddp_ranks(2, goes_aside, str(tmp_path / "run")):
        assert heard == [0, 1, 2, 3, 4, 5, 6, 3, 4]
    assert every_step(RunReader(tmp_path / "run"), 2) == [(step, rank) for step in range(5) for rank in (0, 1)]


def validates(port: int, path: str) -> list[int]:
    samples: list[int] = []
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(run_dir=path)
        attachment.session.on_record(lambda record: samples.append(record.samples))
        for _ in range(3):
            steps(ddp, optimizer, rank, 1)
            with torch.no_grad():
                ddp(torch.randn(100, 64))
        attachment.session.end()
    return samples


def test_validation_between_steps_is_no_training(tmp_path: Path) -> None:
    for samples in ddp_ranks(2, validates, str(tmp_path / "run")):
        assert samples == [4, 4, 4]


# ------------------------------------------------------------------------------------------------ whole processes


def ends(path: Path, way: str, *words: object, python: Sequence[str] = ()) -> list[Ended]:
    script = Path(__file__).parent / "scripts" / "session_ends.py"
    return run_script(2, script, free_port(), path, way, *words, python=python or [zygote.python()])


@pytest.mark.parametrize("way", ["nothing", "group", "session, group"])
@pytest.mark.long
def test_a_script_may_end_as_it_likes(tmp_path: Path, way: str) -> None:
    for ended in ends(tmp_path / "run", way, python=PYTHON):
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err
        assert "monitor stopped" not in ended.err
    assert len(every_step(RunReader(tmp_path / "run"), 2)) == 20
    assert (tmp_path / "run" / "summary.json").exists()


def test_rank_that_raises_in_forward_is_lost_to_the_others(tmp_path: Path) -> None:
    first, second = ends(tmp_path / "run", "raises")
    assert second.status == 1
    assert "IndexError" in second.err
    assert first.status == 0, first.err
    assert "lost (1,)" in first.out
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_leaves_a_readable_run_and_the_other_ends(tmp_path: Path, victim: int) -> None:
    ended = ends(tmp_path / "run", "killed", victim)
    assert ended[victim].status == -9
    survivor = ended[1 - victim]
    assert survivor.status == 0, survivor.err
    assert f"lost ({victim},)" in survivor.out
    assert len(every_step(RunReader(tmp_path / "run"), 2)) >= 10
    assert (tmp_path / "run" / "summary.json").exists() == (victim == 1)


def test_ctrl_c_while_waiting_in_backward_ends_the_rank_and_frees_the_others(tmp_path: Path) -> None:
    first, second = ends(tmp_path / "run", "interrupted")
    assert first.status == second.status == 0, (first.err, second.err)
    assert "ended by KeyboardInterrupt" in first.out
    assert "ended by PeerLostError" in second.out
    # Old torch has one connection to the store, so a rank that waits in it tells nothing meanwhile.
    assert len(every_step(RunReader(tmp_path / "run"), 2)) >= (10 if OLD_TORCH else 20)
    assert (tmp_path / "run" / "summary.json").exists()
