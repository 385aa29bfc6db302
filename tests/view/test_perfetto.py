from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.errors import RingsideError, UsageError
from ringside.monitor.run.directory import RunReader
from ringside.view.export import perfetto
from ringside.view.export.perfetto import clock_shifts, trace_events, write_perfetto
from ringside.view.run.recorded import Run


def events_of(path: Path) -> list[dict[str, Any]]:
    run = Run(path)
    return list(trace_events(run.info, list(RunReader(path).iterate()), run.verdicts))


def enclosing(events: list[dict[str, Any]], point: dict[str, Any]) -> list[str]:
    """The slices that enclose an event, outermost first."""
    return [
        event["name"]
        for event in events
        if event["ph"] == "X" and event["pid"] == point["pid"] and event["tid"] == point["tid"]
        if event["ts"] <= point["ts"] <= event["ts"] + event["dur"]
    ]


def test_slices_of_a_rank_nest_and_do_not_overlap(tmp_path: Path) -> None:
    events = events_of(slow_run(tmp_path / "run"))
    for rank in range(4):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        steps = [event for event in slices if event["name"].startswith("step ")]
        phases = [event for event in slices if not event["name"].startswith("step ")]
        assert len(steps) == 120
        for group in (steps, phases):
            group.sort(key=lambda event: event["ts"])
            gaps = [after["ts"] - before["ts"] - before["dur"] for before, after in itertools.pairwise(group)]
            assert min(gaps) > -1.0  # microseconds: wall clocks are floats of 1.7e9
        assert all(event["dur"] >= 0 for event in slices)


def test_every_arrow_begins_in_the_last_ranks_backward_and_ends_in_a_wait(tmp_path: Path) -> None:
    events = events_of(slow_run(tmp_path / "run"))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) > 150
    late = [event["pid"] for event in starts.values() if event["ts"] > 60 * 0.11e6]
    assert set(late[10:]) == {2}
    for key, start in starts.items():
        assert "backward" in enclosing(events, start)
        assert "wait" in enclosing(events, ends[key])
        assert start["ts"] <= ends[key]["ts"]


def test_clocks_of_hosts_that_differ_are_brought_together(tmp_path: Path) -> None:
    ahead = np.array([0.0, 0.0, 0.0, 7.5])
    path = write_run(tmp_path / "run", own_times(60, 4), clocks=ahead)
    shifts = clock_shifts(list(RunReader(path).iterate()), 4)
    assert shifts == pytest.approx(ahead, abs=1e-6)
    ends = [event["ts"] + event["dur"] for event in events_of(path) if event["ph"] == "X" and event["name"] == "step 9"]
    assert max(ends) - min(ends) < 1.0


def test_the_verdict_stands_at_its_step(tmp_path: Path) -> None:
    events = events_of(slow_run(tmp_path / "run"))
    told = [event for event in events if event["ph"] == "i"]
    assert len(told) == 1
    assert told[0]["name"].startswith("rank 2 is")
    assert told[0]["ts"] > 60 * 0.1e6


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_is_json_and_names_ranks_and_hosts(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "run", own_times(10, 4))
    count = write_perfetto(tmp_path / name, Run(path).info, list(RunReader(path).iterate()), [])
    data = (tmp_path / name).read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert len(content["traceEvents"]) == count
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"rank {rank} · host-0" for rank in range(4)]


def test_nothing_and_too_much_are_refused_and_a_full_disk_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", own_times(10, 4))
    info, records = Run(path).info, list(RunReader(path).iterate())
    with pytest.raises(UsageError, match="no step was recorded"):
        write_perfetto(tmp_path / "x.json", info, [], [])
    with pytest.raises(RingsideError, match=r"cannot be written: No such file"):
        write_perfetto(tmp_path / "missing" / "x.json", info, records, [])
    monkeypatch.setattr(perfetto, "MOST_RECORDS", 20)
    with pytest.raises(UsageError, match="choose about 5 steps"):
        write_perfetto(tmp_path / "x.json", info, records, [])
    assert not (tmp_path / "x.json").exists()
