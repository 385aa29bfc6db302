from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import RingsideError, UsageError
from ringside.files import replace_file
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import RunReader, RunWriter, decode_record, finite
from ringside.monitor.summary import finish_run
from ringside.view.html.run_report import render_report

Info = Callable[..., RunInfo]


def record(step: int = 0, rank: int = 0, **fields: float) -> StepRecord:
    return StepRecord(step=step, rank=rank, ended_unix=1.0, step_seconds=0.2, own_seconds=0.1, **fields)


def test_what_was_written_is_read_back(tmp_path: Path, make_info: Info) -> None:
    writer = RunWriter(tmp_path / "a" / "b", make_info(2))
    records = [record(step, rank, loss=1.5) for step in range(3) for rank in range(2)]
    writer.append(records[:4])
    reader = RunReader(writer.path)
    assert reader.info == make_info(2)
    assert reader.poll() == records[:4]
    writer.append(records[4:])
    writer.event({"unix": 1.0, "kind": "note", "text": "ü", "value": float("nan")})
    assert reader.poll() == records[4:]
    assert reader.poll() == []
    assert reader.poll_events() == [{"unix": 1.0, "kind": "note", "text": "ü", "value": None}]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400))
def test_cut_at_any_byte_the_whole_lines_are_read(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """SIGKILL or a full disk tears the last line; once it is completed it is read."""
    path = tmp_path_factory.mktemp("run")
    info = RunInfo(schema=1, name="x", started_unix=0, command=[], world_size=1, hosts=["h"], pids=[1], engine="gloo")
    RunWriter(path, info)
    records = [record(step) for step in range(4)]
    data = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
    cut = min(cut, len(data))
    (path / "steps.jsonl").write_bytes(data[:cut])
    reader = RunReader(path)
    first = reader.poll()
    assert first == records[: data[:cut].count(b"\n")]
    with (path / "steps.jsonl").open("ab") as file:
        file.write(data[cut:])
    assert first + reader.poll() == records


def test_damaged_lines_and_unknown_fields_are_skipped(tmp_path: Path, make_info: Info) -> None:
    RunWriter(tmp_path, make_info(1))
    good = msgspec.to_builtins(record(7)) | {"invented_later": [1, {"a": 2}]}
    lines = [b"\x00\x00\x00", b'{"step": 1}', b"[1]", b'"x"', b"{", b"\xff\xfe", msgspec.json.encode(good), b""]
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "events.jsonl").write_bytes(b'{"kind": 3}\n[]\n{"kind": "note"}\nnope\n')
    reader = RunReader(tmp_path)
    assert reader.poll() == [record(7)]
    assert reader.poll_events() == [{"kind": "note"}]


def test_not_a_number_survives_json() -> None:
    again = decode_record(msgspec.json.encode(record(wait_seconds=math.nan)))
    assert again is not None
    assert math.isnan(again.wait_seconds)


def test_numpy_scalars_are_written_as_numbers(tmp_path: Path, make_info: Info) -> None:
    writer = RunWriter(tmp_path, make_info(1))
    writer.append([msgspec.structs.replace(record(), own_seconds=np.float64(0.25))])
    (read,) = RunReader(tmp_path).poll()
    assert read.own_seconds == 0.25


def test_a_disk_that_fails_turns_writing_off_with_one_warning(
    tmp_path: Path, make_info: Info, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RunWriter(tmp_path / "run", make_info(1))
    (tmp_path / "run" / "steps.jsonl").unlink()
    (tmp_path / "run" / "steps.jsonl").mkdir()  # opening it for writing now fails, for root too
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.append([record()])
            writer.event({"kind": "note"})
    assert writer.off
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_a_directory_that_vanishes_stops_nothing(tmp_path: Path, make_info: Info) -> None:
    import shutil

    writer = RunWriter(tmp_path / "run", make_info(1))
    shutil.rmtree(tmp_path / "run")
    writer.append([record()])
    assert writer.off
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_one_stops_nothing(tmp_path: Path, make_info: Info) -> None:
    (tmp_path / "file").write_text("")
    assert RunWriter(tmp_path / "file" / "run", make_info(1)).off


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"schema": "x"}', b"\xff"])
def test_what_is_no_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match="is no run"):
        RunReader(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "events.jsonl"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, make_info: Info, name: str) -> None:
    RunWriter(tmp_path / "run", make_info(1))
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(RingsideError, match=rf"{name} cannot be read: it is no regular file"):
        finish_run(tmp_path / "run", render_report)


@pytest.mark.parametrize("ranks", [-1, 0, 131_073, 10**9])
def test_a_damaged_number_of_ranks_is_refused_before_memory_is(tmp_path: Path, make_info: Info, ranks: int) -> None:
    RunWriter(tmp_path, msgspec.structs.replace(make_info(1), world_size=ranks))
    with pytest.raises(RingsideError, match=f"gives {ranks} ranks: it is damaged"):
        RunReader(tmp_path)


def test_the_largest_job_can_be_read(tmp_path: Path, make_info: Info) -> None:
    RunWriter(tmp_path, msgspec.structs.replace(make_info(1), world_size=131_072))
    assert RunReader(tmp_path).info.world_size == 131_072


def test_a_run_of_a_newer_ringside_is_not_guessed_at(tmp_path: Path, make_info: Info) -> None:
    RunWriter(tmp_path, msgspec.structs.replace(make_info(1), schema=2))
    with pytest.raises(
        UsageError, match=r"newer Ringside \(schema 2; this one knows 1\): read it with that one, or update Ringside"
    ):
        RunReader(tmp_path)


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary.json"
    replace_file(target, b"old")

    def full(*names: str, **directories: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_finite_at_every_depth() -> None:
    assert finite({"a": [math.inf, (1, {"b": math.nan})], 3: "x"}) == {"a": [None, [1, {"b": None}]], "3": "x"}


def test_what_lies_too_deep_is_left_out() -> None:
    def nested(value: Any, pairs: int) -> Any:
        for _ in range(pairs):
            value = [{"a": value}]
        return value

    assert finite(nested(1.0, 32)) == nested(1.0, 32)
    assert finite([nested(1.0, 32)]) == [nested([None], 31)]


def test_a_long_run_is_written_at_a_coarser_stride(tmp_path: Path, make_info: Info) -> None:
    """The file grows with the logarithm of the steps, and what is read from it stays right."""
    writer = RunWriter(tmp_path, make_info(2), full_bytes=20_000)
    sizes = {}
    for step in range(8_000):
        writer.append(msgspec.structs.replace(record(step), rank=rank) for rank in (0, 1))
        sizes[step + 1] = (tmp_path / "steps.jsonl").stat().st_size
    assert sizes[8_000] - sizes[4_000] == pytest.approx(sizes[4_000] - sizes[2_000], rel=0.15)
    assert sizes[8_000] < 20_000 * (1 + 0.5 * 9)
    steps = sorted({read.step for read in RunReader(tmp_path).poll() if read.rank == 1})
    assert steps[:3] == [0, 1, 2]
    assert steps[-1] >= 8_000 - 2 * writer.stride
    assert {b - a for a, b in zip(steps[-6:], steps[-5:], strict=False)} == {writer.stride}
    notes = [event["text"] for event in RunReader(tmp_path).poll_events() if event["kind"] == "note"]
    assert len(notes) == math.log2(writer.stride)
    assert finish_run(tmp_path, render_report)["steps"] == pytest.approx(8_000, abs=2 * writer.stride)


@pytest.mark.parametrize("name", [b"run-\xff\xfe", "läuft-\U0001f3c1".encode(), b"with\nnewline"])
def test_a_directory_of_any_name(tmp_path: Path, make_info: Info, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    writer = RunWriter(path, make_info(1))
    writer.append([record(step) for step in range(3)])
    writer.event({"unix": 1.0, "kind": "ended"})
    assert not writer.off
    assert finish_run(path, render_report)["steps"] == 3
    assert (path / "report.html").exists()


ENDLESS = Path(__file__).parent / "scripts" / "endless_collector.py"


def test_a_run_that_is_killed_at_any_moment_is_readable(tmp_path: Path) -> None:
    for moment in range(3):
        path = tmp_path / str(moment)
        with subprocess.Popen([sys.executable, str(ENDLESS), str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            deadline = time.monotonic() + 60
            while (path / "steps.jsonl").stat().st_size < 40_000 * moment + 1:
                assert time.monotonic() < deadline
                time.sleep(0.001)  # a file that grows gives no event to wait for
            process.kill()
        whole = (path / "steps.jsonl").read_bytes().count(b"\n")
        reader = RunReader(path)
        assert len(reader.poll()) == whole
        assert finish_run(path, render_report)["steps"] in (whole // 2, (whole + 1) // 2)
        assert json.loads((path / "summary.json").read_text())["schema"] == 1


def test_a_run_cut_at_any_byte_is_readable(tmp_path: Path, make_info: Info) -> None:
    writer = RunWriter(tmp_path, make_info(1))
    writer.append([record(step) for step in range(3)])
    writer.event({"unix": 1.0, "kind": "note", "text": "\u2028 ü"})
    for name in ("steps.jsonl", "events.jsonl"):
        content = (tmp_path / name).read_bytes()
        for length in range(0, len(content), 3):
            (tmp_path / name).write_bytes(content[:length])
            assert len(RunReader(tmp_path).poll()) == (tmp_path / "steps.jsonl").read_bytes().count(b"\n")
            RunReader(tmp_path).poll_events()
        (tmp_path / name).write_bytes(content)
