from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringside.doctor import examine

from .torch_logs import error_file


def test_the_first_error_that_is_no_lost_peer_names_the_rank(tmp_path: Path) -> None:
    error_file(tmp_path, 0, "DistBackendError: NCCL error: remote process exited", 100)
    error_file(tmp_path, 2, "RuntimeError: CUDA out of memory", 101)
    error_file(tmp_path, 1, "ValueError: later", 105)
    found = examine([tmp_path])
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("dead_rank", [2])
    assert "out of memory" in verdict.cause
    assert verdict.evidence["victims"] == "0, 1"
    assert all(note.used for note in found.notes)


def test_a_truncated_error_file_has_its_line_and_the_others_are_used(tmp_path: Path) -> None:
    error_file(tmp_path, 0, "ValueError: x", 100)
    error_file(tmp_path, 1, "ValueError: y", 99)
    path = tmp_path / "1" / "error.json"
    path.write_text(path.read_text()[:-5])
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == [[0]]
    assert ["breaks off" in note.text for note in found.notes if not note.used] == [True]


@pytest.mark.parametrize(
    ("name", "content", "ranks", "cause"),
    [
        ("7/error.json", {"message": "died", "errorCode": 1}, [7], "rank 7 raised first: died"),
        ("rank_7/error.json", {"message": {"message": "died", "extraInfo": {}}}, [7], "rank 7 raised first: died"),
        ("rank-12.json", {"message": {"message": "died", "extraInfo": {}}}, [12], "rank 12 raised first: died"),
        ("7/error.json", {"message": {"message": "died", "extraInfo": {"rank": 3}}}, [3], "rank 3 raised first: died"),
        ("x.json", {"message": {"message": "died", "extraInfo": {"rank": "?"}}}, [], "a worker raised first: died"),
        ("x.json", {"message": {"message": 5, "extraInfo": 7}}, [], "a worker raised first: 5"),
    ],
)
def test_whatever_program_wrote_it(tmp_path: Path, name: str, content: Any, ranks: list[int], cause: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    (verdict,) = examine([path]).verdicts
    assert (verdict.ranks, verdict.cause) == (ranks, cause)
    assert verdict.evidence.keys() == {"file", "message"}


def test_the_last_line_of_the_stack_is_shown_and_without_any_whole_file_nobody_is_named(tmp_path: Path) -> None:
    stack = {"py_callstack": "Traceback\n  train()\n\n  loss.backward() \n \n", "timestamp": "100"}
    for rank, extra in ((0, stack), (1, {**stack, "timestamp": 99.5})):
        (tmp_path / str(rank)).mkdir()
        content = {"message": {"message": f"ValueError: {rank}\nand more", "extraInfo": extra}}
        (tmp_path / str(rank) / "error.json").write_text(json.dumps(content))
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.ranks == [1]
    told = {name: verdict.evidence[name] for name in ("message", "stack_ends", "time_unix", "victims")}
    assert told == {
        "message": "ValueError: 1", "stack_ends": "loss.backward()", "time_unix": 99.5, "victims": "0",
    }  # fmt: skip
    for rank in "01":
        path = tmp_path / rank / "error.json"
        path.write_text(path.read_text()[:-4])
    found = examine([tmp_path])
    assert (found.verdicts, [note.used for note in found.notes]) == ([], [False, False])
