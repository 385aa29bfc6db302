from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run_directory import RunReader, RunWriter, decode_record, finite, write_atomically

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


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary.json"
    write_atomically(target, b"old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_finite_at_every_depth() -> None:
    assert finite({"a": [math.inf, (1, {"b": math.nan})], 3: "x"}) == {"a": [None, [1, {"b": None}]], "3": "x"}
