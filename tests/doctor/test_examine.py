from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringside.doctor import Findings, Note, Question, Source, as_json, examine
from ringside.doctor.examine import READERS
from ringside.doctor.files.progress import OnStream, Progress
from ringside.doctor.findings import QUESTIONS, Unjudged, merge
from ringside.monitor.verdict import KINDS, Verdict

from .dumps import call, world, write
from .nccl_logs import job_log


def verdict(kind: str = "hang", ranks: Sequence[int] = (1,)) -> Verdict:
    return Verdict(kind=kind, ranks=list(ranks), since_step=-1, detected_step=-1, excess_ratio=0.0)


def test_every_reader_offers_what_a_reader_must() -> None:
    for reader in READERS:
        assert reader.KIND
        assert callable(reader.matches)
        assert callable(reader.read)


def test_a_reader_that_fails_costs_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    write(tmp_path, world(3, {1: usual[:5]}, usual))
    (tmp_path / "nccl.log").write_text(job_log([2]))
    from ringside.doctor.nccl_log import reader as nccl_log

    def fail(sources: Sequence[Source], progress: Progress) -> Findings:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(nccl_log, "read", fail)
    found = examine([tmp_path])
    assert [verdict.ranks for verdict in found.verdicts] == [[1]]
    (line,) = [note.text for note in found.notes if not note.used]
    assert "ZeroDivisionError: of all things" in line


def test_dumps_and_logs_of_one_job_are_told_together(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    write(tmp_path, world(4, {1: usual[:5]}, usual))
    (tmp_path / "nccl.log").write_text(job_log([2, 2], order=[0, 2, 1, 3]))
    assert [verdict.kind for verdict in examine([tmp_path]).verdicts] == ["hang", "broken_ring"]


def test_merging_keeps_order_drops_repetitions_and_prefers_answers() -> None:
    open_question, answered = Question(answer=None, words="?"), Question(answer=False, words="no")
    first = Findings(verdicts=[verdict()], questions={"small_collectives": open_question}, notes=[Note(file="a")])
    second = Findings(
        verdicts=[verdict(), verdict("mismatch")],
        questions={"small_collectives": answered},
        unjudged=[Unjudged(what="x", why="y")],
        notes=[Note(file="b")],
        what_if={"slowdown": 1.2},
    )
    merged = merge([first, second])
    assert [found.kind for found in merged.verdicts] == ["hang", "mismatch"]
    assert merged.questions["small_collectives"].answer is False
    assert [note.file for note in merged.notes] == ["a", "b"]
    assert merged.what_if == {"slowdown": 1.2}


def test_json_has_the_monitors_verdicts_and_all_four_questions() -> None:
    content = as_json(Findings(verdicts=[verdict()], what_if={"slowdown": float("nan")}))
    assert set(Verdict.__struct_fields__) == set(content["verdicts"][0])
    assert content["verdicts"][0]["kind"] in KINDS
    assert set(content["questions"]) == set(QUESTIONS)
    assert content["what_if"] == {"slowdown": None}


def test_progress_overwrites_its_line_on_a_terminal_and_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("ringside.doctor.files.progress.time.monotonic", lambda: float(next(now)))
    stream = io.StringIO()
    progress = OnStream(stream, terminal=True)
    progress.begin("reading 3 dumps")
    progress.advance(2_000_000)
    progress.done()
    assert "reading 3 dumps · 2 MB read" in stream.getvalue()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r")
