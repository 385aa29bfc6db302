from __future__ import annotations

from pathlib import Path

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
