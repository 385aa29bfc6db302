from __future__ import annotations

import os
import pickle
import pickletools
import struct
import subprocess
from pathlib import Path

import pytest

from ringside.doctor import examine
from ringside.doctor.flight_recorder.dump import NotADumpError, is_pickle, load_dump

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
