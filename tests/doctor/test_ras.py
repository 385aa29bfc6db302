"""What RAS says of a living job: only a lag that stays names a rank."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ringside.doctor import Findings, examine, ras

from .ras_maker import communicator, event, member, reading

SAMPLES = Path(__file__).parent / "nccl_samples"


def examined(folder: Path, *texts: str) -> Findings:
    """Examine what was printed one after the other into one file."""
    (folder / "ras.log").write_text("".join(texts))
    return examine([folder / "ras.log"])


def counts(*called: int) -> dict[int, dict[str, int]]:
    """All-reduces of each rank, and messages, of which every rank may send as many as it likes."""
    return {rank: {"AllReduce": number, "Send": 10 * rank} for rank, number in enumerate(called)}


def test_who_stays_behind_while_nothing_moves_is_waited_for(tmp_path: Path) -> None:
    stuck = communicator(counts(41, 41, 40, 41))
    found = examined(tmp_path, reading(0, communicator(counts(30, 30, 29, 30))), reading(20, stuck), reading(40, stuck))
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert verdict.evidence["victims"] == "0, 1, 3"
    assert "called AllReduce 40 times" in verdict.cause
    assert "for 20 s" in verdict.cause
    assert found.notes[0].text == "3 readings, 0 events"


def test_one_reading_names_nobody(tmp_path: Path) -> None:
    found = examined(tmp_path, reading(0, communicator(counts(41, 41, 40, 41))))
    assert found.verdicts == []
    assert "only a lag that stays counts" in found.unjudged[0].why


def test_two_readings_of_one_moment_are_one(tmp_path: Path) -> None:
    behind = communicator(counts(41, 41, 40, 41))
    assert examined(tmp_path, reading(0, behind), reading(2, behind)).verdicts == []


def test_a_lag_of_a_job_that_moves_names_nobody(tmp_path: Path) -> None:
    found = examined(tmp_path, *(reading(10 * i, communicator(counts(i + 9, i + 9, i + 8, i + 9))) for i in range(4)))
    assert found.verdicts == []
    assert "the job moves on" in found.unjudged[0].why


@pytest.mark.parametrize(
    ("then", "now"), [((100, 100, 100, 100), (101, 101, 101, 100)), ((100, 100, 100, 99), (150, 150, 150, 99))]
)
def test_who_stands_still_while_the_others_move_is_not_waited_for_yet(
    tmp_path: Path, then: tuple[int, ...], now: tuple[int, ...]
) -> None:
    found = examined(tmp_path, reading(0, communicator(counts(*then))), reading(6, communicator(counts(*now))))
    assert found.verdicts == []
    assert "the job moves on" in found.unjudged[0].why


def test_a_rank_that_is_busy_in_another_communicator_names_nobody_yet(tmp_path: Path) -> None:
    behind = communicator(counts(41, 41, 40, 41))
    pairs = [communicator({0: {"AllReduce": n}, 1: {"AllReduce": n}}, "0x2", places={0: 2, 1: 3}) for n in (5, 9)]
    assert examined(tmp_path, reading(0, behind, pairs[0]), reading(20, behind, pairs[1])).verdicts == []


def test_equal_counts_are_no_lag(tmp_path: Path) -> None:
    still = communicator(counts(41, 41, 41, 41))
    found = examined(tmp_path, reading(0, still), reading(30, still))
    assert found.verdicts == []
    assert found.unjudged == []


def test_who_is_behind_because_it_waits_elsewhere_is_a_victim(tmp_path: Path) -> None:
    """Rank 3 never comes to its pair; rank 2 waits for it there and so is behind in the whole group."""
    world = communicator(counts(41, 41, 40, 40))
    pair = communicator({0: {"AllReduce": 8}, 1: {"AllReduce": 7}}, "0x2", places={0: 2, 1: 3})
    (verdict,) = examined(tmp_path, reading(0, world, pair), reading(30, world, pair)).verdicts
    assert verdict.ranks == [3]


def test_dead_and_silent_ranks(tmp_path: Path) -> None:
    last = communicator(counts(41, 41), missing={2: "considered_dead", 3: "unresponsive"})
    found = examined(tmp_path, reading(0, communicator(counts(40, 40, 40, 40))), reading(30, last))
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("dead_rank", [2])
    assert verdict.evidence["host"] == "10.0.0.0"
    assert found.unjudged[0].what == "what rank 3 did"


def test_a_missing_rank_as_nccl_2_28_writes_it(tmp_path: Path) -> None:
    """A comma is missing there, and so is the whole of what was read, just where a rank is."""
    last = reading(0, communicator(counts(41, 41), missing={2: "considered_dead"}))
    status = '"nvml_dev": 2,\n          "status"'
    assert status in last
    found = examined(tmp_path, last.replace(status, status.replace(",", "")).replace("2.30.7", "2.28.9"))
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("dead_rank", [2])]


def test_the_published_reading_and_event(tmp_path: Path) -> None:
    """The rank is missing, then its process declared dead. The monitor's welcome may stand before."""
    text = (SAMPLES / "ras_2_29.json").read_text()
    for before in ("", f"RAS Monitor Mode - watching for peer changes (Ctrl+C to exit)...\n{'=' * 64}\n"):
        found = examined(tmp_path, before, text)
        assert [(note.kind, note.text) for note in found.notes] == [(ras.KIND, "1 reading, 1 event")]
        (verdict,) = found.verdicts
        assert (verdict.kind, verdict.ranks, verdict.evidence["pid"]) == ("dead_rank", [1], 1524345)


def test_events_of_the_monitor_name_the_rank_where_a_reading_knows_it(tmp_path: Path) -> None:
    peer = {key: value for key, value in member(3).items() if key in ("host", "pid")}
    dead = event("PEER_DEAD", peer | {"cuda_devs": [3], "nvml_devs": [3]}, 7)
    new = event("PEER_NEW", {"addr": "10.0.0.1<41234>"})
    (verdict,) = examined(tmp_path, new, dead).verdicts
    assert (verdict.kind, verdict.ranks) == ("dead_rank", [])
    assert verdict.cause.startswith("process 1003 on 10.0.0.0 was declared dead by RAS at 2026-11-27 08:00:07")
    (verdict,) = examined(tmp_path, reading(0, communicator(counts(1, 1, 1, 1))), new, dead).verdicts
    assert verdict.ranks == [3]


def test_documents_one_a_line_are_read_as_well(tmp_path: Path) -> None:
    stuck = reading(0, communicator(counts(41, 40))), reading(30, communicator(counts(41, 40)))
    (verdict,) = examined(tmp_path, *(json.dumps(json.loads(text)) + "\n" for text in stuck)).verdicts
    assert verdict.ranks == [1]


@pytest.mark.parametrize("keep", range(0, 5000, 450))
def test_what_breaks_off_is_left_out(tmp_path: Path, keep: int) -> None:
    stuck = communicator(counts(41, 41, 40, 41))
    texts = reading(0, stuck), reading(30, stuck), reading(59, stuck)[:keep]
    found = examined(tmp_path, *texts)
    assert [verdict.ranks for verdict in found.verdicts] == [[2]]


@pytest.mark.parametrize(
    "broken",
    ['{"rank": -5}', "7", '{"rank": 0, "collective_counts": {"X": 1e300}}', '{"rank": 99999999999}', "[" * 9999],
)
def test_hostile_documents_are_counted(tmp_path: Path, broken: str) -> None:
    text = reading(0, communicator(counts(41, 40))).replace('"ranks": [', f'"ranks": [{broken},', 1)
    found = examined(tmp_path, text)
    assert found.verdicts == []
    assert found.notes[0].text.endswith("1 damaged one left out")
    assert not found.notes[0].used


def test_of_many_readings_in_any_order_only_the_latest_are_kept() -> None:
    readings = ras.Readings()
    for second in (30, 3, 59, 58, 20, 57, 40, 53, 56, 1, 54, 55, 52):
        text = reading(second, communicator(counts(second)))
        readings.add(msgspec.json.decode(text, type=ras.Document))
    assert [kept.timestamp[-2:] for kept in readings.recent] == ["54", "55", "56", "57", "58", "59"]
    assert readings.last is not None
    assert readings.before is not None
    assert (readings.last.timestamp[-2:], readings.before.timestamp[-2:]) == ("59", "54")
    assert readings.number == 13
