from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
from tests.support.ranks import Team, place

from ringside.doctor import Findings, examine
from ringside.doctor.findings import is_enough_to_judge
from ringside.text import rank_list

from .dumps import START_NS, call, dump, world, write
from .shared_data import shared


def culprits(found: Findings) -> set[int]:
    return {rank for verdict in found.verdicts for rank in verdict.ranks}


@pytest.mark.parametrize(("name", "ranks"), [("gpu_error_1st", [12, 14]), ("lock_gil_1st", [9, 14])])
def test_real_dumps_name_every_injected_rank_and_no_innocent_one(name: str, ranks: list[int]) -> None:
    found = examine([shared(f"flight_recorder/{name}")])
    (verdict,) = found.verdicts
    assert verdict.kind == "hang"
    assert verdict.ranks == ranks
    assert verdict.evidence["group"] == {"gpu_error_1st": "74", "lock_gil_1st": "72"}[name]
    assert verdict.evidence["collective"] == "nccl:all_to_all"
    assert sum(note.used for note in found.notes) == 16


def test_real_dumps_of_two_jobs_are_judged_folder_by_folder() -> None:
    found = examine([shared("flight_recorder")])
    assert sorted(verdict.ranks for verdict in found.verdicts) == [[9, 14], [12, 14]]


def test_real_dumps_with_a_rank_left_out_blame_nobody_new() -> None:
    paths = [path for path in sorted(shared("flight_recorder/lock_gil_1st").glob("_dump_*")) if path.name != "_dump_3"]
    found = examine(paths)
    assert culprits(found) == {9, 14}
    assert any("rank 3" in line.what for line in found.unjudged)


@pytest.mark.parametrize("given", [range(5, 6), range(4)])
def test_some_of_sixteen_real_dumps_show_that_it_hung_and_not_who(given: range) -> None:
    found = examine([shared(f"flight_recorder/lock_gil_1st/_dump_{rank}") for rank in given])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert verdict.evidence["victims"] == rank_list(given)
    assert verdict.evidence["missing_dumps"] == rank_list(set(range(16)) - set(given))
    assert any("were given" in line.why for line in found.unjudged)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_never_came(tmp_path: Path, as_json: bool) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    found = examine([write(tmp_path, world(4, {2: usual[:5]}, usual), as_json=as_json)])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    evidence = verdict.evidence
    assert evidence["collective_seq_id"] == 6
    assert evidence["behind"] == "rank 2 at 5 of 6"
    assert evidence["victims"] == "0, 1, 3"
    assert evidence["size_bytes"] == 4000
    assert evidence["group_size"] == 4
    assert evidence["stack_of_the_waiting"] == "train (train.py:46)"


@pytest.mark.parametrize("version", ["2.5", "2.7", "2.9", "2.10"])
def test_healthy_dumps_give_no_verdict(tmp_path: Path, version: str) -> None:
    groups = {"0": range(3)}
    dumps = {rank: dump(map(call, range(1, 30)), groups, version) for rank in range(3)}
    found = examine([write(tmp_path, dumps)])
    assert found.verdicts == []
    assert found.unjudged == []
    assert all(note.used for note in found.notes)


def test_the_first_cause_is_found_through_two_groups(tmp_path: Path) -> None:
    """Rank 3 never comes to its pair; rank 2 waits for it there and so misses the whole group's collective."""
    groups = {rank: {"0": range(4), "1": (0, 1) if rank < 2 else (2, 3)} for rank in range(4)}
    before = [*map(call, range(1, 4))]
    pair = [call(1, group="1", desc="tp", at_ms=4), call(2, group="1", desc="tp", at_ms=5)]
    stuck = call(2, group="1", desc="tp", done=False, at_ms=5)
    entries = {
        0: [*before, *pair, call(4, done=False, at_ms=6)],
        1: [*before, *pair, call(4, done=False, at_ms=6)],
        2: [*before, pair[0], stuck],
        3: [*before, pair[0]],
    }
    found = examine([write(tmp_path, {rank: dump(entries[rank], groups[rank]) for rank in range(4)})])
    assert [verdict.ranks for verdict in found.verdicts] == [[3]]
    assert found.verdicts[0].evidence["group"] == "1"
    assert found.verdicts[0].evidence["victims"] == "0-2"


def test_a_device_that_stopped_is_named_though_its_rank_went_on_calling(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 8)), call(8, done=False)]
    stopped = [*map(call, range(1, 4)), *(call(seq, done=False) for seq in range(4, 9))]
    found = examine([write(tmp_path, world(4, {1: stopped}, usual))])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert verdict.evidence["stopped"] == "rank 1 at 3, peers at 7"


@pytest.mark.parametrize(("behind", "named"), [(0, []), (1, []), (2, [1]), (3, [1])])
def test_one_collective_more_on_the_peers_is_a_round_of_the_watchdog_and_two_a_device_that_stopped(
    tmp_path: Path, behind: int, named: list[int]
) -> None:
    usual = [*map(call, range(1, 8)), call(8, done=False)]
    late = [call(seq, done=seq <= 7 - behind) for seq in range(1, 9)]
    found = examine([write(tmp_path, world(4, {1: late}, usual))])
    assert [verdict.ranks for verdict in found.verdicts] == ([named] if named else [])


def test_all_ranks_in_a_collective_is_no_verdict_but_is_said(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    found = examine([write(tmp_path, world(4, {}, usual))])
    assert found.verdicts == []
    assert "every rank has entered it" in found.unjudged[0].why


def test_the_only_rank_without_a_dump_is_the_culprit_if_all_others_wait(tmp_path: Path) -> None:
    dumps = world(4, {}, [*map(call, range(1, 6)), call(6, done=False)])
    del dumps[3]
    found = examine([write(tmp_path, dumps)])
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("hang", [3])]


def test_two_ranks_without_dumps_cannot_be_told_apart(tmp_path: Path) -> None:
    dumps = world(4, {}, [*map(call, range(1, 6)), call(6, done=False)])
    del dumps[3], dumps[1]
    found = examine([write(tmp_path, dumps)])
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("hang", [])]
    assert "ranks 1 and 3" in found.unjudged[0].why


@pytest.mark.parametrize(("age_s", "hangs"), [(0.1, False), (299.0, False), (301.0, True)])
def test_without_all_dumps_only_a_call_that_was_open_for_half_its_timeout_hangs_for_certain(
    tmp_path: Path, age_s: float, hangs: bool
) -> None:
    dumps = world(4, {}, [*map(call, range(1, 6)), call(6, done=False)])
    del dumps[3], dumps[1]
    write(tmp_path, dumps)
    moment_s = START_NS / 1e9 + 0.006 + age_s
    for path in tmp_path.iterdir():
        os.utime(path, (moment_s, moment_s))
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == ([[]] if hangs else [])
    assert not is_enough_to_judge(found)


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (call(6, sizes=[[1001]], done=False), "size"),
        (call(6, dtype="Double", done=False), "dtype"),
        (call(6, "broadcast", done=False), "operation"),
    ],
)
def test_mismatches_name_the_rank_that_differs(tmp_path: Path, other: dict[str, object], aspect: str) -> None:
    before = [*map(call, range(1, 6))]
    found = examine([write(tmp_path, world(3, {1: [*before, other]}, [*before, call(6, done=False)]))])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("mismatch", [1])
    assert verdict.evidence["differs_in"] == aspect
    assert verdict.evidence["victims"] == "0, 2"


def test_another_order_is_called_that(tmp_path: Path) -> None:
    usual = [call(1), call(2, "all_gather"), call(3, "broadcast"), call(4, done=False)]
    swapped = [call(1), call(2, "broadcast"), call(3, "all_gather"), call(4, done=False)]
    found = examine([write(tmp_path, world(3, {2: swapped}, usual))])
    (verdict,) = found.verdicts
    assert verdict.ranks == [2]
    assert verdict.evidence["differs_in"] == "order"
    assert verdict.evidence["collective_seq_id"] == 2


def test_uneven_all_to_all_is_no_mismatch(tmp_path: Path) -> None:
    own = {1: [call(1, "all_to_all", sizes=[[1200]])]}
    assert examine([write(tmp_path, world(3, own, [call(1, "all_to_all")]))]).verdicts == []


def test_of_two_ranks_that_disagree_neither_is_called_right(tmp_path: Path) -> None:
    own = {1: [call(1), call(2, sizes=[[1001]], done=False)]}
    (verdict,) = examine([write(tmp_path, world(2, own, [call(1), call(2, done=False)]))]).verdicts
    assert verdict.ranks == [0, 1]
    assert "majority" in str(verdict.evidence["who_is_right"])


def test_a_receive_whose_send_was_never_posted_names_the_sender(tmp_path: Path) -> None:
    receive = call(2, "recv 0<-1", p2p=True, done=False)
    (verdict,) = examine([write(tmp_path, world(3, {0: [call(1), receive]}, [call(1)]))]).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert "rank 1 never posted its side" in f"{verdict.cause} {verdict.evidence}"


def test_ranks_that_wait_for_each_other_in_two_groups(tmp_path: Path) -> None:
    groups = {"0": range(2), "1": range(2)}
    dumps = {
        0: dump([call(1), call(2, done=False)], groups),
        1: dump([call(1), call(1, group="1", desc="tp", done=False, at_ms=3)], groups),
    }
    (verdict,) = examine([write(tmp_path, dumps)]).verdicts
    assert (verdict.kind, verdict.ranks) == ("mismatch", [0, 1])


@pytest.mark.parametrize("outer", [(0, 1), (2, 3)])
def test_of_ranks_that_wait_in_circles_those_are_named_that_wait_for_nobody_else(
    tmp_path: Path, outer: tuple[int, int]
) -> None:
    """Two pairs disagree about the order of their two groups; one of the other pair waits for one of theirs as well."""
    inner = (2, 3) if outer == (0, 1) else (0, 1)
    members = {"1": outer, "2": outer, "3": (outer[0], inner[0]), "4": inner, "5": inner}
    enters = {outer[0]: ("1", "3"), outer[1]: ("2",), inner[0]: ("4",), inner[1]: ("5",)}
    dumps = {
        rank: dump(
            [call(1, group=group, desc="tp", done=False, at_ms=int(group)) for group in enters[rank]],
            {"0": range(4)} | {group: ranks for group, ranks in members.items() if rank in ranks},
        )
        for rank in range(4)
    }
    (verdict,) = examine([write(tmp_path, dumps)]).verdicts
    assert (verdict.kind, verdict.ranks) == ("mismatch", list(inner))
    assert verdict.evidence["victims"] == f"{outer[0]}, {outer[1]}"


def test_two_files_of_one_rank_and_one_of_another_job(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6))]
    folder = write(tmp_path, world(4, {}, usual))
    write(tmp_path / "x", {2: dump(usual[:3], {"0": range(4)})})
    (tmp_path / "x" / "nccl_trace_rank_2").rename(folder / "old_rank_2")
    (tmp_path / "x").rmdir()
    write(folder, {9: dump(usual, {"0": range(16)})})
    found = examine([folder])
    lines = {note.file.rpartition("/")[2]: note for note in found.notes}
    assert "second dump of rank 2" in lines["old_rank_2"].text
    assert "another job" in lines["nccl_trace_rank_9"].text
    assert found.verdicts == []
    assert sum(note.used for note in found.notes) == 4


def test_damaged_entries_are_counted_and_the_others_used(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    dumps = world(3, {1: usual[:5]}, usual)
    dumps[0]["entries"].insert(0, {"collective_seq_id": "no number", "process_group": 7})
    found = examine([write(tmp_path, dumps)])
    assert culprits(found) == {1}
    assert any("1 damaged entry left out" in note.text for note in found.notes)


def test_a_dump_that_does_not_say_whose_it_is(tmp_path: Path) -> None:
    (write(tmp_path, {0: dump([call(1)], {"0": range(2)})}) / "nccl_trace_rank_0").rename(tmp_path / "trace")
    (note,) = examine([tmp_path]).notes
    assert not note.used
    assert "name it after its rank" in note.text


def gloo_job(folder: Path, hangs: bool) -> None:
    """Call four all-reduces, rank 0 one more where it hangs; dump what PyTorch's flight recorder holds."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    rank, patience = place().rank, datetime.timedelta(seconds=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=patience)
    for _ in range(4):
        dist.all_reduce(torch.ones(100))
    if hangs and rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(64, 64))
    (folder / "out" / f"nccl_trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())  # type: ignore[attr-defined]


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.core)])
def test_dumps_of_a_real_gloo_job(tmp_path: Path, hangs: bool) -> None:
    """Gloo says nothing of states, and marks what failed as ended; rank 1 never calls the last all-reduce."""
    pytest.importorskip("torch")
    (tmp_path / "out").mkdir()
    with Team(2, {"TORCH_FR_BUFFER_SIZE": "100"}) as team:
        team.run(gloo_job, tmp_path, hangs)
    found = examine([tmp_path / "out"])
    if not hangs:
        assert found.verdicts == []
        return
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert verdict.evidence["input_sizes"] == "[[64, 64]]"


def test_dumps_of_a_running_job_written_one_after_the_other_name_nobody(tmp_path: Path) -> None:
    """Each rank's dump holds two calls more than the one before; the last of each was under way."""
    dumps = {
        rank: dump([*map(call, range(1, 10 + 2 * rank)), call(10 + 2 * rank, done=False)], {"0": range(4)})
        for rank in range(4)
    }
    found = examine([write(tmp_path, dumps)])
    assert found.verdicts == []
    (line,) = [line for line in found.unjudged if line.what.startswith("the culprit, if there is one")]
    assert "dumps of ranks 0-2" in line.why


def test_a_rank_with_calls_in_flight_when_its_dump_was_written_has_no_stopped_device(tmp_path: Path) -> None:
    flying = [*map(call, range(1, 10)), *(call(seq, done=False) for seq in (10, 11, 12))]
    write(tmp_path, world(3, {1: flying}, [*map(call, range(1, 13))]))
    moment_s = (START_NS + 12_500_000) / 1e9
    for path in tmp_path.iterdir():
        os.utime(path, (moment_s, moment_s))
    assert examine([tmp_path]).verdicts == []
    for path in tmp_path.iterdir():
        os.utime(path, (moment_s + 60, moment_s + 60))
    assert [verdict.ranks for verdict in examine([tmp_path]).verdicts] == [[1]]


@pytest.mark.parametrize(("age_s", "named"), [(0.001, []), (0.4, []), (0.6, [2]), (5.0, [2]), (3600.0, [2])])
def test_a_call_that_was_just_made_when_the_dumps_were_written_hangs_nowhere(
    tmp_path: Path, age_s: float, named: list[int]
) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    write(tmp_path, world(4, {2: usual[:5]}, usual))
    moment_s = START_NS / 1e9 + 0.006 + age_s
    for path in tmp_path.iterdir():
        os.utime(path, (moment_s, moment_s))
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == ([named] if named else [])
    assert any("in flight" in line.why for line in found.unjudged) is not bool(named)


@pytest.mark.parametrize("part", [0.5, 0.8, 0.97])
def test_a_dump_in_json_that_breaks_off_is_used_and_its_rank_not_blamed(tmp_path: Path, part: float) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    write(tmp_path, world(4, {2: usual[:5]}, usual), as_json=True)
    broken = tmp_path / "trace_rank_0.json"
    content = json.loads(broken.read_text())
    entries = content.pop("entries")
    text = json.dumps({"entries": entries, **content})  # as PyTorch writes it: in alphabetical order
    broken.write_text(text[: int(len(text) * part)])
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == [[2]]
    (note,) = [note for note in found.notes if note.file == str(broken)]
    assert note.used
    assert "breaks off after" in note.text


@pytest.mark.parametrize(("days", "used"), [(0.9, True), (1.1, False), (-1.1, False)])
def test_a_dump_of_another_day_is_of_another_run(tmp_path: Path, days: float, used: bool) -> None:
    usual = [*map(call, range(1, 6))]
    shifted = [call(seq, at_ms=seq + days * 86_400_000) for seq in range(1, 6)]
    found = examine([write(tmp_path, world(3, {2: shifted}, usual))])
    assert found.verdicts == []
    told = {note.file[-1]: note for note in found.notes}
    assert [told[rank].used for rank in "012"] == [True, True, used]
    assert used or told["2"].text == "is of another run: its last call is 1 days from the others'; left out"


@pytest.mark.parametrize("listed", [True, False])
def test_the_ranks_of_the_whole_job_are_known_where_groups_list_none(tmp_path: Path, listed: bool) -> None:
    """Gloo's `pg_config` is empty: of other groups than the first nobody can tell whom a number stands for."""
    receive = call(2, "recv 0<-1", p2p=True, done=False, backend="gloo")
    other = call(3, "recv 0<-2", group="7", desc="pp", p2p=True, done=False, backend="gloo")
    dumps = world(3, {0: [call(1), receive] if listed else [call(1), other]}, [call(1)])
    for content in dumps.values():
        content["pg_config"] = {}
    found = examine([write(tmp_path, dumps)])
    assert [verdict.ranks for verdict in found.verdicts] == ([[1]] if listed else [])


def test_a_stack_shows_the_users_own_frames_and_the_librarys_where_there_are_no_others(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    own = [{"name": f"f{depth}", "filename": f"/home/me/net{depth}.py", "line": depth} for depth in range(6)]
    for frames, told in (
        ([*usual[5]["frames"][:1], *own], "f0 (net0.py:0) < f1 (net1.py:1) < f2 (net2.py:2) < f3 (net3.py:3)"),
        (usual[5]["frames"][:1], "all_reduce (distributed_c10d.py:3245)"),
        ([], None),
    ):
        waiting = [*usual[:5], {**usual[5], "frames": frames}]
        (verdict,) = examine([write(tmp_path, world(4, {2: usual[:5]}, waiting))]).verdicts
        assert verdict.evidence.get("stack_of_the_waiting") == told


def test_lanes_show_the_last_seconds_and_tables_where_every_rank_stands(tmp_path: Path) -> None:
    """Rank 2 never came to call 4; all calls before took 0.4 ms, and 30 s have passed since the first one."""
    times = {1: 0.0, 2: 28_000.0, 3: 30_000.0, 4: 30_001.0}
    usual = [call(seq, at_ms=times[seq], done=seq < 4) for seq in times]
    found = examine([write(tmp_path, world(3, {2: usual[:3]}, usual))])
    assert [lane.rank for lane in found.lanes] == [0, 1, 2]
    assert [lane.note for lane in found.lanes] == ["", "", "culprit"]
    waits, late = found.lanes[0].spans, found.lanes[2].spans
    assert [(span.kind, span.name) for span in waits] == [
        ("communication", "all_reduce 2 of group 0"),
        ("communication", "all_reduce 3 of group 0"),
        ("wait", "all_reduce 4 of group 0"),
    ]
    assert [span.start_s for span in waits] == pytest.approx([7.999, 9.999, 10.0], abs=1e-4)
    assert waits[0].end_s - waits[0].start_s == pytest.approx(0.0004, rel=1e-3)
    assert waits[-1].end_s == pytest.approx(12.5, abs=1e-3)  # a quarter more than what is shown
    assert [(span.kind, span.name) for span in late][-1] == ("missing", "never entered")
    assert (late[-1].start_s, late[-1].end_s) == pytest.approx((9.9994, 12.5), abs=1e-3)
    (standing,) = found.standings
    assert standing.columns == ["rank", "last entered", "last completed", "open", "collective 4"]
    assert standing.rows == [
        [0, 4, 3, 1, "entered, not completed"], [1, 4, 3, 1, "entered, not completed"],
        [2, 3, 3, 0, "culprit: never entered"],
    ]  # fmt: skip
    assert standing.culprits == [2]
    assert found.sheets[0].rows == [["0", "default_pg", 3, "0, 1", 4, ""]]
