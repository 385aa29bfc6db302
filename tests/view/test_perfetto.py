from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.monitor.jobs import run_info
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.errors import RingsideError, UsageError
from ringside.monitor import StepRecord
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.table import tabulate
from ringside.view.export import perfetto
from ringside.view.export.perfetto import clock_shifts, steps_between, trace_events, write_perfetto
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


def laid(**phases: float) -> StepRecord:
    """A step of 100 ms that ends at 1.1 s, by its milliseconds: data, forward, optimizer, exposed, wait."""
    given = {f"{name}_seconds": 1e-3 * took for name, took in phases.items()}
    return StepRecord(**{"step": 0, "rank": 0, "ended_unix": 1.1, "step_seconds": 0.1, "own_seconds": 0.06, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ({"data": 10, "forward": 20, "optimizer": 5, "exposed": 40, "wait": 30},
         {"data": (0, 10), "forward": (10, 30), "backward": (30, 55), "wait": (55, 85), "wire": (85, 95),
          "optimizer": (95, 100)}),
        ({"exposed": 40}, {"backward": (0, 60), "wire": (60, 100)}),
        ({"exposed": 40, "wait": 90}, {"backward": (0, 60), "wait": (60, 100)}),
        ({"exposed": 40, "wait": -1}, {"backward": (0, 60), "wire": (60, 100)}),
        ({"exposed": 40, "wait": math.nan}, {"backward": (0, 60), "wire": (60, 100)}),
        ({"data": 80, "forward": 80, "exposed": 40}, {"data": (0, 60), "wire": (60, 100)}),
        ({"data": 10, "forward": 80, "exposed": 40}, {"data": (0, 10), "forward": (10, 60), "wire": (60, 100)}),
        ({"exposed": 400}, {"wire": (0, 100)}),
        ({"optimizer": 400, "exposed": 10}, {"optimizer": (0, 100)}),
    ],
)  # fmt: skip
def test_phases_lie_end_to_end_and_inside_their_step(
    phases: dict[str, float], found: dict[str, tuple[float, float]]
) -> None:
    events = list(trace_events(run_info(1), [laid(**phases)], []))
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    step = slices.pop("step 0")
    assert (step["ts"], step["dur"], step["args"]) == (0, 100_000, {"own_ms": 60.0, "samples": 0, "bytes": 0})
    spans = {name: (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for name, event in slices.items()}
    assert list(spans) == list(found)
    assert list(spans.values()) == [pytest.approx(span, abs=0.002) for span in found.values()]
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (0, {"ms": 60.0})


def arrows_of(waits_ms: list[float], exposed_ms: float = 50) -> list[tuple[int, int, float, float]]:
    """Sender, receiver, begin and end in ms of the arrows of a step in which ranks waited so long."""
    records = [
        msgspec.structs.replace(laid(exposed=exposed_ms, wait=wait, backward=50), rank=rank, step=3)
        for rank, wait in enumerate(waits_ms)
    ]
    events = list(trace_events(run_info(len(waits_ms)), records, []))
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return [
        (start["pid"], ends[start["id"]]["pid"], start["ts"] / 1e3, ends[start["id"]]["ts"] / 1e3)
        for start in events if start["ph"] == "s"
    ]  # fmt: skip


def test_arrows_go_from_who_came_last_to_who_waited_longest() -> None:
    # a quarter of a microsecond inside of the slices: who came last had no exposed time, here as much as all
    assert arrows_of([20.0, 0.0, 30.0]) == [
        (1, 2, pytest.approx(49.99975, abs=1e-3), pytest.approx(79.99975, abs=1e-3)),
        (1, 0, pytest.approx(49.99975, abs=1e-3), pytest.approx(69.99975, abs=1e-3)),
    ]
    assert [receiver for _, receiver, *_ in arrows_of([0.0, 1.01, 0.99, 1.0])] == [1], "a hundredth of the step"
    many = arrows_of([0.0, *(2.0 + rank for rank in range(20))])
    assert [receiver for _, receiver, *_ in many] == list(range(20, 4, -1)), "sixteen at most"
    assert arrows_of([0.0, 20.0], exposed_ms=100) == [], "nothing was before: nobody was waited for"


def test_steps_between_are_those_that_were_recorded() -> None:
    table = tabulate([msgspec.structs.replace(laid(), step=step) for step in range(5, 10)], 1)
    between = [(None, None), (0, 100), (7, None), (None, 7), (6, 8), (10, 10), (5, 10)]
    assert [steps_between(table, first, until) for first, until in between] == [
        range(5, 10), range(5, 10), range(7, 10), range(5, 7), range(6, 8), range(10, 10), range(5, 10),
    ]  # fmt: skip
    assert steps_between(tabulate([], 1), 0, 5) == range(0)


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
