from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ringside.doctor import examine
from ringside.doctor.flight_recorder.dump import ANYONE, UNTOLD, Dump, NotADumpError, is_pickle, load_dump, read_dump

from .dumps import call, dump, world, write


class Hostile:
    """Runs a command when it is unpickled by anything less careful."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_code_in_it_is_refused_and_never_run(tmp_path: Path, protocol: int) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    folder = write(tmp_path / "dumps", world(3, {1: usual[:5]}, usual))
    data = pickle.dumps({"entries": [Hostile(tmp_path / "ran")], "version": "2.9"}, protocol=protocol)
    (folder / "nccl_trace_rank_7").write_bytes(data)
    found = examine([folder])
    assert not (tmp_path / "ran").exists()
    (line,) = [note.text for note in found.notes if not note.used]
    assert "system" in line
    assert "none of it was run" in line
    assert [verdict.ranks for verdict in found.verdicts] == [[1]]


@pytest.mark.parametrize("call_of", [subprocess.Popen, eval, getattr, pickle.loads])
def test_every_global_is_refused(call_of: object) -> None:
    with pytest.raises(NotADumpError, match="asks for"):
        load_dump(pickle.dumps({"entries": [call_of]}))


def test_a_memo_index_that_would_claim_all_memory_is_refused() -> None:
    with pytest.raises(NotADumpError):
        load_dump(b"\x80\x02]r" + struct.pack("<I", 0x7FFFFFF0) + b".")


@pytest.mark.parametrize("cut", [3, 40, 400])
def test_a_pickle_that_breaks_off_is_refused_in_one_line(cut: int) -> None:
    data = pickle.dumps(dump(map(call, range(1, 5)), {"0": range(2)}), protocol=2)
    with pytest.raises(NotADumpError, match="breaks off or is damaged") as caught:
        load_dump(data[:cut])
    assert "\n" not in str(caught.value)


def test_a_pickle_that_is_no_dump_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "list_3").write_bytes(pickle.dumps([1, 2, 3]))
    (note,) = examine([tmp_path]).notes
    assert not note.used
    assert "no `entries`" in note.text


def test_pickles_are_recognised_by_their_first_bytes() -> None:
    for protocol in range(6):
        assert is_pickle(pickle.dumps({"a": [1]}, protocol=protocol)), protocol
    assert not is_pickle(b"node-0:1:1 [0] NCCL INFO")
    assert not is_pickle(b"")


def test_our_own_dumps_hold_no_global() -> None:
    data = pickle.dumps(dump([call(1)], {"0": range(2)}), protocol=2)
    assert not {op.name for op, _, _ in pickletools.genops(data)} & {"GLOBAL", "STACK_GLOBAL", "REDUCE"}
    assert load_dump(data)["version"] == "2.9"


def test_a_pickle_that_refers_to_what_is_outside_of_it_is_refused() -> None:
    class Referring(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return 7 if obj == "outside" else None

    stream = io.BytesIO()
    Referring(stream, protocol=2).dump({"entries": ["outside"]})
    with pytest.raises(NotADumpError, match="refers to objects outside of itself"):
        load_dump(stream.getvalue())


def test_half_characters_become_question_marks_wherever_they_stand_and_shared_values_stay_what_they_are() -> None:
    shared, circle = ("\ud800", 1), ["a\udfff"]
    circle.append(circle)  # type: ignore[arg-type]
    found = load_dump(pickle.dumps({"\ud800": shared, "b": shared, "c": circle, "entries": []}, protocol=2))
    assert (found["?"], found["b"], found["entries"]) == (("?", 1), ("?", 1), [])
    assert found["c"][0] == "a?"
    assert found["c"][1] is found["c"]


@pytest.mark.parametrize(
    ("text", "before", "entries"),
    [
        ('{"version": "2.9", "rank": 3, "entries": [{"a": 1}, {"b": "\\ud800"}, {"c', {"version": "2.9", "rank": 3}, 2),
        ('{"version" "2.9", "entries": [{"a": 1}, {"b', {}, 1),  # what stands before them is no JSON
        ('{"entries": [{"a": 1} {"b": 2}], "version": 3', {}, 2),
        ('{"entries" : [', None, 0),
        ('{"version": "2.9"', None, 0),
        ("{" * 100_000, None, 0),
    ],
)
def test_what_is_whole_of_json_that_breaks_off(text: str, before: dict[str, Any] | None, entries: int) -> None:
    if before is None:
        with pytest.raises(NotADumpError, match="its JSON breaks off or is damaged"):
            load_dump(text.encode())
        return
    found = load_dump(text.encode())
    lost = found.pop("lost")
    assert len(found.pop("entries")) == entries
    assert found == before
    assert lost.startswith(f"its JSON breaks off after {entries} whole calls")


def read(entries: list[Any], **other: Any) -> Dump:
    return read_dump({"version": "2.9", "entries": entries, **other}, "rank_5", 5)


def test_what_is_no_dump_says_why() -> None:
    for content, why in (
        ([], "it has no `entries`"),
        ({"entries": 3}, "no flight-recorder dump that this version can read"),
        ({"entries": [], "pg_config": [1]}, "no flight-recorder dump that this version can read"),
    ):
        with pytest.raises(NotADumpError, match=why):
            read_dump(content, "rank_5", 5)


def test_calls_of_every_version_become_the_same_values() -> None:
    new = call(4, sizes=[[2, 3], [4]], dtype="Half", done=False)
    old = {"process_group": "7", "seq_id": 9, "profiling_name": "gloo:barrier", "retired": True}
    send = {
        "process_group": ["7", "undefined"],
        "p2p_seq_id": 2,
        "profiling_name": "nccl:send 1->3",
        "state": "started",
    }
    both = {**old, "collective_seq_id": 8}
    found = read([new, old, send, both], nccl_version=None, comm_lib_version="2.1")
    one, two, three, four = found.calls
    assert (one.group, one.op, one.backend, one.seq, one.peer, one.p2p) == ("0", "all_reduce", "nccl", 4, -1, False)
    assert one.shape == ("all_reduce", "[[2, 3], [4]]", "[[2, 3], [4]]", "Half,Half")
    assert (one.nbytes, one.done, one.timeout_s, one.ended_s) == (20, False, 600.0, 0.0)
    assert one.created_s == pytest.approx(1_758_610_505.004)
    assert [frame.name for frame in one.frames] == ["all_reduce", "train"]
    assert (two.group, two.op, two.seq, two.done, two.frames, two.created_s) == ("7", "barrier", 9, True, [], 0.0)
    assert (three.op, three.seq, three.peer, three.p2p, three.done) == ("send", 2, 3, True, False)
    assert four.seq == 8  # the newer number counts where both are there
    assert (found.rank, found.library, found.skipped, found.lost) == (5, "2.1", 0, "")
    assert [found.groups[name].title for name in ("0", "7")] == ["default_pg (group 0)", "group 7"]
    assert found.by_group().keys() == {"0", "7"}


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("recv 1<-?", ANYONE),
        ("recv 1<-3", 3),
        ("send 1->?", UNTOLD),
        ("recv", UNTOLD),
        ("coalesced", UNTOLD),
    ],
)
def test_only_a_receive_that_says_so_is_one_from_anyone(name: str, peer: int) -> None:
    assert read([{"profiling_name": f"nccl:{name}", "is_p2p": True}]).calls[0].peer == peer


def test_bytes_are_those_of_all_inputs_as_far_as_their_types_are_known() -> None:
    for sizes, dtypes, nbytes in (
        ([[2, 3], [4]], ["Float"], 40),  # one type for all
        ([[2, 3], [4]], ["Half", "Double"], 44),
        ([[5]], ["Byte"], 5),
        ([[5]], ["ComplexDouble"], 80),
        ([[]], ["Long"], 8),
        ([[3]], [], 0),
        ([[3]], ["Quad"], 0),
        ([[1 << 40, 1 << 40]], ["Byte"], 1 << 50),
    ):
        entry = {**call(1), "input_sizes": sizes, "input_dtypes": dtypes}
        assert read([entry]).calls[0].nbytes == nbytes


def test_parts_of_a_coalesced_call_end_with_it() -> None:
    def part(seq: int, **other: Any) -> dict[str, Any]:
        return {**call(seq, done=False), "state": None, **other}

    whole = {**call(2, "coalesced"), "profiling_name": "nccl:coalesced"}
    found = read([part(2), part(2), part(3), whole, part(2)])
    assert [one.done for one in found.calls] == [True, True, False, True, False]
    assert not any(one.done for one in read([part(2), {**whole, "state": "started", "retired": False}]).calls)
    assert [one.done for one in read([part(2, process_group=("1", "tp")), whole]).calls] == [False, True]


def test_of_calls_without_an_end_the_first_two_thousand_are_kept() -> None:
    found = read([call(seq, done=seq % 2 == 0) for seq in range(4100)])
    assert sum(not one.done for one in found.calls) == 2000
    assert sum(one.done for one in found.calls) == 2050
    assert max(one.seq for one in found.calls if not one.done) == 3999


def test_standings_belong_to_the_group_that_entries_name_or_else_to_that_of_the_same_place() -> None:
    """`pg_status` counts groups as this rank made them, `pg_config` as the job did."""

    def entered(entries: list[Any], status: dict[str, int], names: list[str]) -> dict[str, int]:
        states = {pg_id: {"last_enqueued_collective": last} for pg_id, last in status.items()}
        config = {name: {"name": name, "ranks": "[0, 1]"} for name in names}
        return read(entries, pg_status=states, pg_config=config).entered

    of_5 = {**call(3, group="5"), "pg_id": 1}
    assert entered([of_5], {"0": 4, "1": 6}, ["0", "5"]) == {"0": 4, "5": 6}
    assert entered([], {"0": 4, "1": 6, "10": 7, "9": 8}, ["0", "5", "20", "7"]) == {"0": 4, "5": 6, "7": 8, "20": 7}
    assert entered([of_5], {"0": 4, "1": 6}, ["5", "7"]) == {"5": 6}  # their order says otherwise: only what is known
    assert entered([of_5], {"0": 4, "1": 6}, ["0", "5", "7"]) == {"5": 6}  # nor where there are more of them
    assert entered([of_5], {"0": 4, "1": 6}, ["0", "five"]) == {"5": 6}
    receive = {**call(4, "recv 0<-1", group="5", p2p=True), "pg_id": 1}
    assert entered([of_5, receive], {"0": 4, "1": 6}, ["0", "5"]) == {"0": 4}  # it counts sends and receives, too


def test_a_damaged_entry_is_counted_and_the_others_are_kept() -> None:
    found = read([call(1), 7, {"collective_seq_id": "x"}, {**call(2), "time_created_ns": 1e301}, call(3)])
    assert ([one.seq for one in found.calls], found.skipped) == ([1, 3], 3)
