from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ringside.commands.doctor import OnStream
from ringside.doctor import Findings, Note, Question, Source, as_json, examine
from ringside.doctor.examine import READERS
from ringside.doctor.files.source import Progress
from ringside.doctor.findings import QUESTIONS, Unjudged, merge
from ringside.doctor.flight_recorder import reader as flight_recorder
from ringside.doctor.nccl_log import reader as nccl_log
from ringside.monitor.verdict import KINDS, Verdict

from .dumps import call, world, write
from .kineto_maker import Job
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


@pytest.mark.parametrize(
    ("fails", "left_out"),
    [
        (lambda names: "3" in names, "3"),
        (lambda names: names & {"2", "5"}, "25"),
        (lambda names: names >= {"1", "4"}, "4"),  # each can be read alone: the one that fails beside those before it
        (lambda names: names >= {"0", "1"}, "1"),
        (lambda names: names >= {"0", "6"}, "6"),
        (lambda names: names >= {"0", "3"} or names >= {"1", "5"}, "35"),
        (lambda names: True, "0123456"),
    ],
)
def test_files_at_which_a_reader_fails_are_left_out_and_all_others_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[set[str]], object], left_out: str
) -> None:
    for number in range(7):
        (tmp_path / f"{number}.log").write_text(job_log([2]))

    def read(sources: Sequence[Source], progress: Progress) -> Findings:
        if fails({Path(source.name).stem for source in sources}):
            raise ZeroDivisionError("of all things\nand more")
        return Findings()

    monkeypatch.setattr(nccl_log, "read", read)
    told = {Path(note.file).stem: note for note in examine([tmp_path]).notes}
    assert "".join(sorted(name for name, note in told.items() if not note.used)) == left_out
    words = "looks like a NCCL log but could not be read: ZeroDivisionError: of all things"
    assert {note.text for note in told.values()} == {words} | ({"read"} if len(left_out) < 7 else set())


def test_where_many_files_fail_one_after_the_other_all_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can be read alone and no two together: a reading for each of them would take for ever."""

    def read(sources: Sequence[Source], progress: Progress) -> Findings:
        if len(sources) > 1:
            raise ZeroDivisionError
        return Findings()

    monkeypatch.setattr(nccl_log, "read", read)
    for number in range(101):
        (tmp_path / f"{number}.log").write_text("NCCL version 2.21.5")
    assert sum(note.used for note in examine([tmp_path]).notes) == 1
    (tmp_path / "101.log").write_text("NCCL version 2.21.5")
    assert sum(note.used for note in examine([tmp_path]).notes) == 0


def test_a_file_that_one_reader_cannot_look_at_may_be_another_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: Source) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(flight_recorder, "matches", fails)
    (tmp_path / "nccl.log").write_text(job_log([2]))
    (note,) = examine([tmp_path]).notes
    assert (note.kind, note.used) == ("NCCL log", True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        # Without a time in them: the cases are named after their bytes, and every worker is to collect the same ones.
        (b"x" * 198 + b"\1\2", "starts with 'xxxx"),  # one in a hundred may be a control character
        (b"x" * 197 + b"\1\2\3", "binary data"),
        (b"\t\n" * 100 + b"x", "starts with ''"),
        (b"x" * 200 + b"\0", "binary data"),
        (b" " * 20 + "é".encode() * 30, f"starts with '{'é' * 10}'"),
        (b"", "is empty"),
        (gzip.compress(b" " * (1 << 20), mtime=0), "-fold, like a compression bomb, and was not unpacked"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"", mtime=0)[:8], "has no complete entry; the gzip breaks off"),
    ],
)
def test_what_nobody_knows_is_described_in_a_few_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "thing").write_bytes(content)
    (note,) = examine([tmp_path / "thing"]).notes
    assert words in note.text
    assert not note.used


def test_a_trace_whose_header_lists_process_groups_is_no_dump(tmp_path: Path) -> None:
    """PyTorch writes `pg_config` into both; any tool that writes a trace anew begins it with a brace."""
    trace = Job(ranks=1, steps=2).traces()[0]
    trace["distributedInfo"]["pg_config"] = [{"pg_name": "0", "pg_desc": "default_pg"}]
    for keys in (["distributedInfo", "traceEvents"], ["schemaVersion", "distributedInfo", "traceEvents"]):
        (tmp_path / "rank0.json").write_text(json.dumps({key: trace[key] for key in keys}))
        (note,) = examine([tmp_path]).notes
        assert (note.kind, note.used) == ("Kineto trace", True)


def test_of_several_replays_the_largest_comes_first_and_an_answer_stays_with_the_first_that_gave_it() -> None:
    parts = [
        Findings(
            what_if={"steps": steps, "workers": workers},
            questions={"small_collectives": Question(answer=None, words=word)},
        )
        for steps, workers, word in ((10, 3, "a"), (8, 4, "b"), (31, 1, "c"))
    ]
    answers = [Question(answer=True, words="d"), Question(answer=False, words="e")]
    merged = merge([*parts, *(Findings(questions={"small_collectives": one}) for one in answers)])
    assert merged.what_if == {"steps": 8, "workers": 4}
    assert [one["steps"] for one in merged.more_what_if] == [31, 10]
    assert merged.questions["small_collectives"].words == "d"
    assert list(as_json(merged)["more_what_if"]) == merged.more_what_if


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [7.0]
    monkeypatch.setattr("ringside.commands.doctor.time.monotonic", lambda: now[0])
    return now


def test_progress_overwrites_its_line_on_a_terminal_and_is_wiped(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = OnStream(stream, terminal=True)
    clock[0] += 0.49
    progress.begin("reading 3 dumps")
    progress.done()
    assert stream.getvalue() == ""  # too early to be worth a line
    clock[0] += 0.01
    progress.advance(2_000_000)
    clock[0] += 0.49
    progress.advance(1_000_000)
    clock[0] += 0.02
    progress.begin("short")
    progress.done()
    line = "reading 3 dumps · 2 MB read"
    assert stream.getvalue().split("\r") == [line, "short · 3 MB read".ljust(len(line)), "", " " * len(line), ""]


def test_progress_in_a_log_is_a_line_every_five_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = OnStream(stream, terminal=False)
    for seconds in (4.9, 0.1, 4.9, 0.1):
        clock[0] += seconds
        progress.begin("reading " + "x" * 200 if seconds == 4.9 else "reading")
        progress.advance(1_000_000)
    progress.done()
    assert stream.getvalue() == "reading · 1 MB read\nreading · 3 MB read\n"
