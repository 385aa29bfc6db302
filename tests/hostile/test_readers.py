"""Whoever wrote the files that are read: one bad file harms no other, and none takes more than its size is worth."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside import commands
from ringside.doctor.examine import examine
from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings
from ringside.doctor.flight_recorder.dump import P2P
from ringside.doctor.kineto.collector import TraceCollector, TraceEvent
from ringside.doctor.nccl_log.communicators import Communicators
from ringside.doctor.nccl_log.faults import TorchLines, fault_of, is_abort
from ringside.doctor.nccl_log.lines import Line, nccl_lines
from ringside.doctor.nccl_log.settings import NcclSettings
from ringside.errors import UsageError
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.run.table import tabulate
from ringside.monitor.summary import finish_run, summarise
from ringside.predict.tables import osu as tables_osu
from ringside.text import size_bytes
from ringside.view.html.rings import longest_waits
from ringside.view.html.run_report import render_report

from .growth import growth

HUGE = 10**5000
"""Python neither prints it nor makes a float of it."""


# ------------------------------------------------------------------------------------------------------ archives


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("archive", "says"),
    [
        (tar_header("big", 1 << 62) + b"x" * 5000, "breaks off after 1 members"),
        (tar_header("before", -1 << 40) + b"x" * 5000, "negative size"),
        (tar_header("long", 1 << 40, tarfile.GNUTYPE_LONGNAME) + b"x" * 5000, "a header of"),
        (tar_header("back", -1 << 40, tarfile.XHDTYPE) + b"x" * 5000, "a header of"),
        (b"".join(tar_header("l", 512, tarfile.GNUTYPE_LONGNAME) + b"x" * 512 for _ in range(5000)), "recursion"),
    ],
)
def test_no_size_in_a_tar_ends_the_doctor(tmp_path: Path, archive: bytes, says: str) -> None:
    """Hole C1: 2^62 gave a traceback."""
    (tmp_path / "b.tar").write_bytes(archive)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump()))
    found = examine([tmp_path])
    notes = {Path(note.file).name: note for note in found.notes}
    assert says in " ".join(note.text for note in found.notes)
    assert notes["nccl_trace_rank_0"].used


@pytest.mark.parametrize("at", [b"PK\x01\x02", b"PK\x05\x06"])
def test_no_field_of_a_zip_ends_the_doctor(tmp_path: Path, at: bytes) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a/nccl_trace_rank_0", pickle.dumps(dump()))
    whole = packed.getvalue()
    begin = whole.rindex(at)
    for field in range(begin + 4, min(begin + 46, len(whole)), 2):
        for value in (b"\xff\xff", b"\xff\x7f", b"\0\0"):
            (tmp_path / "b.zip").write_bytes(whole[:field] + value + whole[field + 2 :])
            examine([tmp_path / "b.zip"])
    for byte in range(30, 120):
        (tmp_path / "b.zip").write_bytes(whole[:byte] + bytes([whole[byte] ^ 0xFF]) + whole[byte + 1 :])
        examine([tmp_path / "b.zip"])


# ------------------------------------------------------------------------------------- one bad file among many


def dump(**fields: Any) -> dict[str, Any]:
    entry = {
        "record_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "started", "retired": False, "timeout_ms": 600_000,
        "is_p2p": False, "frames": [],
    }  # fmt: skip
    ranks = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.4", "pg_config": ranks, "pg_status": {}, "entries": [{**entry, **fields}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"time_created_ns": HUGE}, {"time_discovered_completed_ns": HUGE}, {"timeout_ms": HUGE},
        {"input_sizes": [[HUGE]]}, {"collective_seq_id": HUGE}, {"record_id": HUGE},
        {"time_created_ns": float("inf")}, {"input_sizes": [[1 << 60] * 400]},
        {"is_p2p": True, "profiling_name": f"nccl:send {'9' * 5000}->{'9' * 5000}"},
    ],
)  # fmt: skip
def test_one_bad_dump_leaves_the_others_readable(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Hole C2: all of them were unread."""
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(**fields)))
    for rank in (1, 2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump()))
    used = {Path(note.file).name: note.used for note in examine([tmp_path]).notes}
    assert used["nccl_trace_rank_1"]
    assert used["nccl_trace_rank_2"]


def test_a_reader_that_fails_at_one_file_reads_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fault is: also one that nobody has thought of."""
    from ringside.doctor.flight_recorder import reader as flight_recorder

    load = flight_recorder.load_dump

    def failing(data: bytes) -> Any:
        if b"odd" in data:
            raise ZeroDivisionError("nobody thought of it")
        return load(data)

    monkeypatch.setattr(flight_recorder, "load_dump", failing)
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(state="odd" if rank == 1 else "started")))
    notes = {Path(note.file).name: note for note in examine([tmp_path]).notes}
    assert [notes[f"nccl_trace_rank_{rank}"].used for rank in range(3)] == [True, False, True]
    assert "nobody thought of it" in notes["nccl_trace_rank_1"].text


def test_a_reader_that_fails_at_two_files_together_reads_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringside.doctor.flight_recorder import reader as flight_recorder

    read = flight_recorder.read

    def failing(sources: list[Source], progress: Progress) -> Findings:
        if sum(b"odd" in source.head for source in sources) > 1:
            raise ZeroDivisionError("these do not go together")
        return read(sources, progress)

    monkeypatch.setattr(flight_recorder, "read", failing)
    for rank in range(6):
        state = "odd" if rank in (1, 4) else "started"
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(state=state)))
    notes = {Path(note.file).name: note.used for note in examine([tmp_path]).notes}
    assert [notes[f"nccl_trace_rank_{rank}"] for rank in range(6)] == [True, True, True, True, False, True]


@pytest.mark.parametrize("ranks", ["9" * 5000, "[0, " + "9" * 5000 + "]"])
def test_ranks_of_any_length_can_be_read(tmp_path: Path, ranks: str) -> None:
    bad = {**dump(), "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(bad))
    assert examine([tmp_path]).notes


# ------------------------------------------------------------------------------------------ time grows with size


def line(text: str, level: str = "WARN") -> Line:
    return Line(host="h", pid=1, tid=1, device=0, level=level, text=text, number=1)


def take(text: str) -> None:
    """All that looks at a line of a log."""
    Communicators().add(line(text))
    NcclSettings().add(line(text))
    fault_of(line(text), 0)
    is_abort(line(text))
    TorchLines().add(text)


WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=x "
HOSTILE: dict[str, Callable[[int], str]] = {
    "a word": lambda n: "NCCL INFO " + "a" * n,
    "a word before": lambda n: "a" * n + " NCCL INFO x",
    "words with colons": lambda n: "NCCL INFO " + "a:1:" * n,
    "prefixes": lambda n: "h:1:2 [0] NCCL INFO " * (n // 10),
    "half prefixes": lambda n: "]0[ NCCL INFO " * (n // 10) + "h:1:2 [0] NCCL INFO x",
    "points": lambda n: "." * n + ":1:2 [0] NCCL INFO x",
    "digits": lambda n: "comm 0x1 rank 0 nranks " + "9" * n,
    "hexes": lambda n: "comm 0x" + "f" * n + " rank 0 nranks 2",
    "spaces": lambda n: "comm 0x1 rank 0 nranks 2" + " " * n + "x",
    "communicators": lambda n: "comm 0x1 rank 0 nranks 2 " * (n // 10),
    "plugins": lambda n: "NET" * n,
    "nets": lambda n: "NET/a" * n,
    "peers": lambda n: "timed out " + "to " * n,
    "peers and spaces": lambda n: "timed out to" + " " * n,
    "watchdogs": lambda n: WATCHDOG * (n // 40),
    "standings": lambda n: "[PG 0 Rank 0] " * (n // 5),
    "groups": lambda n: "[PG " + "a" * n,
    "channels": lambda n: "Channel 00 :" + " 1" * n + " x",
    "trees": lambda n: "Trees " + "[0] 1/1" * n,
    "hops": lambda n: "Channel 00 : 0 -> 1 via x" + " comm 0x" * n,
    "variables": lambda n: "NCCL_A" * n + " set by environment to" + " x" * n,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_line_of_a_log_takes_more_than_its_length(name: str) -> None:
    """Hole C3: 100 kB in one word took half a minute."""

    def work(size: int) -> None:
        text = HOSTILE[name](size)
        take(text)
        list(nccl_lines(text, 1, set()))

    assert growth(work, 10_000) < 9


def scanned(text: bytes) -> None:
    list(Scan(io.BytesIO(text), TraceEvent).batches())


@pytest.mark.parametrize(
    "work",
    [
        lambda n: scanned(b'{"traceEvents": [' + b" " * n),
        lambda n: scanned(b'{"traceEvents": [{"ph": "X"}' + b" " * n),
        lambda n: TraceCollector().add_batch([TraceEvent(ph="X", cat="kernel", name="nccl" * n + " Kernel")]),
        lambda n: commands.main(["predict", "--preset", "p5", "--model", "1" * n + "x"]),
        lambda n: P2P.search("send " + "1" * n),
        lambda n: tables_osu.read("# OSU MPI" + "a" * n, "x"),
        lambda n: tables_osu.read("# OSU MPI x" + " " * n, "x"),
    ],
)
def test_no_other_pattern_takes_more_than_linear_time(work: Callable[[int], object]) -> None:
    assert growth(work, 20_000) < 9


def test_hosts_that_touch_other_words_are_found_in_the_time_of_their_names() -> None:
    def work(count: int) -> None:
        hosts: set[str] = set()
        for number in range(count):
            list(nccl_lines(f"ab:1:2 [0] NCCL INFO okh{number}:1:2 [0] NCCL INFO x", 1, hosts))

    assert growth(work, 1000) < 9


_OLD = re.compile(
    r"(?P<host>[A-Za-z0-9_<][\w.\-<>]*):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>-?\d+)\] "
    r"(?:(?P<where>[\w./\-]+:\d+) )?NCCL (?P<level>INFO|WARN|ERROR|TRACE) "
)
PIECES = st.sampled_from(
    ["h", "ip-1.x", "<stdout>", ":", ":1", ":2", " ", "[0]", "[-1]", " [3] ", "NCCL INFO ", "NCCL WARN ", "src/a.cc:7 ",
     "-", ".", "a:1:2 [0] NCCL INFO ", "node-7:11:12 [1] init.cc:4 NCCL WARN ", "x", "\u00e9", "9"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=600, deadline=None)
def test_prefixes_are_those_that_were_found_from_the_front(text: str) -> None:
    found = list(nccl_lines(text, 1, set()))
    expected = list(_OLD.finditer(text))
    assert [(one.pid, one.tid, one.device, one.level) for one in found] == [
        (int(match["pid"]), int(match["tid"]), int(match["device"]), match["level"]) for match in expected
    ]
    assert all(match["host"].endswith(one.host) for one, match in zip(found, expected, strict=True))


# --------------------------------------------------------------------------------------------------- many ranks


def test_a_run_of_many_ranks_is_summed_up_in_the_time_of_its_ranks() -> None:
    """Hole C3: `world_size` alone made it quadratic; nothing may be of [ranks, ranks]."""
    unknown: dict[str, Any] = {"name": "a", "command": [], "hosts": [], "pids": [], "engine": "", "algorithm": ""}
    from ringside.monitor.run.records import RunInfo

    def work(ranks: int) -> None:
        records = [
            StepRecord(step=step, rank=rank, ended_unix=1.0, step_seconds=1.0, own_seconds=1.0 + rank)
            for step in (0, 5)
            for rank in (0, ranks - 1)
        ]
        info = RunInfo(schema=1, started_unix=1.0, world_size=ranks, versions={}, **unknown)
        table = tabulate(records, ranks)
        render_report(summarise(info, table, []), info, table)

    assert growth(work, 2000) < 9


@given(st.lists(st.one_of(st.floats(0.01, 100.0), st.just(float("nan"))), min_size=1, max_size=9))
@settings(deadline=None)
def test_the_excess_of_a_rank_is_over_the_median_of_the_others(own: list[float]) -> None:
    records = [
        StepRecord(step=0, rank=rank, ended_unix=1.0, step_seconds=1.0, own_seconds=seconds)
        for rank, seconds in enumerate(own)
    ]
    info = RunInfo(schema=1, name="x", engine="gloo", started_unix=1.0, world_size=len(own))
    ranks = summarise(info, tabulate(records, len(own)), [])["ranks"]
    for rank, found in enumerate(np.nan if one["excess_ratio"] is None else one["excess_ratio"] for one in ranks):
        others = [seconds for other, seconds in enumerate(own) if other != rank and np.isfinite(seconds)]
        expected = own[rank] / float(np.median(others)) - 1.0 if others else np.nan
        np.testing.assert_allclose(found, expected)


def test_a_communicator_of_many_ranks_costs_no_more_than_what_is_said_of_it(tmp_path: Path) -> None:
    def work(count: int) -> None:
        said = "".join(
            f"h:1:{number} [0] NCCL INFO comm 0x{number:x} rank 0 nranks 131072 - Init START\n"
            f"h:1:{number} [0] NCCL INFO Channel 00 : 0\n"
            for number in range(count)
        )
        (tmp_path / "n.log").write_text(said)
        examine([tmp_path / "n.log"])

    assert growth(work, 100) < 9


def test_the_longest_waits_need_no_matrix_of_all_ranks() -> None:
    ranks = 1 << 17
    own, waits = np.full((2, ranks), 1.0), np.full((2, ranks), 0.5)
    own[:, 7] = 2.0
    assert len(longest_waits(own, waits, 3)) == 3


def test_sizes_are_read_as_before() -> None:
    assert tuple(size_bytes(text, "--bytes") for text in ("1.5KiB", ".5K", "12")) == (1536, 512, 12)


# ----------------------------------------------------------------------------------------------- run directories

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000
RUN_JSON = (
    '{"schema":1,"name":"a","started_unix":1,"command":[],"world_size":2,"hosts":[],"pids":[],"engine":"",'
    '"algorithm":"","versions":{},"odd":%s}'
)
STEP = '{"step":%s,"rank":0,"ended_unix":1,"step_seconds":%s,"own_seconds":1,"odd":%s}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("steps.jsonl", STEP % (1, 1, DEEP)),
        ("steps.jsonl", STEP % (1, "null", DEEP)),
        ("steps.jsonl", STEP % (LONG, LONG, 1)),
        ("events.jsonl", f'{{"kind":"verdict","verdict":{DEEP}}}\n'),
        ("events.jsonl", f'{{"kind":"note","stride":{LONG}}}\n'),
        ("summary.json", f'{{"loss":{DEEP}}}'),
        ("summary.json", f'{{"injected":{DEEP[99_100:100_900]}}}'),
        ("summary.json", '{"comparison":' + '{"a":' * 900 + "1" + "}" * 901),
    ],
)
def test_no_file_of_a_run_ends_its_report(tmp_path: Path, name: str, content: str) -> None:
    """Lists in lists in lists gave a traceback."""
    (tmp_path / "run.json").write_text(RUN_JSON % 1)
    (tmp_path / "steps.jsonl").write_text(STEP % (0, 1, 1) + STEP % (2, 1, 1))
    with (tmp_path / name).open("a") as file:
        file.write(content)
    assert finish_run(tmp_path, render_report)["steps"] == 3


def test_a_run_that_cannot_be_read_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RUN_JSON % DEEP)
    with pytest.raises(UsageError, match="no run that this version can read"):
        finish_run(tmp_path, render_report)
