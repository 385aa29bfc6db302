"""What fuzzing found: each once, by name, with the least damage that showed it."""

from __future__ import annotations

import json
import os
import socket
import struct
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.doctor import dumps, timeline_maker
from tests.recorded_runs import own_times, write_run

from ringside import commands
from ringside.doctor import examine
from ringside.engine.cost.network import CostNetwork
from ringside.engine.shm.rendezvous import receive_message
from ringside.engine.tuner.table import Rank, TimingRow, TimingTable
from ringside.errors import RingsideError, UsageError
from ringside.monitor.alerts.book import AlertBook
from ringside.monitor.alerts.counters import MetricCounters
from ringside.monitor.run import registry
from ringside.monitor.run.directory import RunReader
from ringside.predict.tables import read_tables
from ringside.predict.topology.files import load_topology, preset, to_toml
from ringside.view.export.prometheus import render
from ringside.view.html.doctor import doctor_page

DEEP = "[" * 40_000 + "]" * 40_000
ESCAPES = "\x1b[2J\x1b]0;title\x07"


def short(value: Any) -> str:
    """A case's name, of a number with hundreds of digits, too."""
    return str(value)[:20]


def error_file(folder: Path, rank: int, inner: Any, more: str = "") -> None:
    (folder / str(rank)).mkdir(parents=True)
    (folder / str(rank) / "error.json").write_text('{"message": ' + json.dumps(inner) + more + "}")


def probed() -> dict[str, Any]:
    latency = np.array([[0, 2e-5], [2e-5, 0]])
    network = CostNetwork(latency, latency / 1e3, np.full(2, 1e-8), np.full(2, 1e-8), reduce=1e-10, overhead_s=1e-6)
    return network.to_topology(["a", "b"], [1, 1], "measured")


@pytest.mark.parametrize(
    ("extra", "more"),
    [
        ({"timestamp": "100"}, f', "deep": {DEEP}'),
        ({"timestamp": ESCAPES}, ""),
        ({"timestamp": 10**400}, ""),
        (2, ""),
        ({"timestamp": "100", "rank": "x"}, ""),
    ],
)
def test_one_damaged_error_file_leaves_the_others_read(tmp_path: Path, extra: Any, more: str) -> None:
    error_file(tmp_path, 0, {"message": "OSError: y", "extraInfo": {"timestamp": "99"}})
    error_file(tmp_path, 1, {"message": "ValueError: x", "extraInfo": extra}, more)
    notes = {note.file: note for note in examine([tmp_path]).notes}
    assert notes[str(tmp_path / "0" / "error.json")].used
    assert not any("could not be read" in note.text for note in notes.values())


def test_what_is_nested_too_deep_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    (run / "run.json").write_text((run / "run.json").read_text().rstrip()[:-1] + f', "deep": {DEEP}}}')
    with pytest.raises(RingsideError, match=r"run\.json"):
        RunReader(run)
    with pytest.raises(UsageError, match="no selection table"):
        TimingTable.decode(f'{{"key": {{}}, "topology": {{"x": {DEEP}}}}}'.encode())
    (tmp_path / "topology.json").write_text(f'{{"kind": {DEEP}}}')
    with pytest.raises(UsageError):
        load_topology(tmp_path / "topology.json")
    entries = tmp_path / "entries"
    entries.mkdir(mode=0o700)
    (entries / "1.json").write_text(f'{{"path": {DEEP}}}')
    monkeypatch.setattr(registry, "registry_directory", lambda *_: entries)
    assert registry.running_runs() == []


def test_a_line_of_records_nested_too_deep_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    with (run / "steps.jsonl").open("a") as file:
        file.write(f'{{"step": {DEEP}}}\n')
    with (run / "events.jsonl").open("a") as file:
        file.write(f'{{"kind": {DEEP}}}\n')
    reader = RunReader(run)
    assert len(reader.poll()) == 8
    assert [event["kind"] for event in reader.poll_events()] == ["ended"]


@pytest.mark.parametrize("step", [2**63, 10**19, 10**400])
def test_a_record_of_a_step_beyond_all_numbers_is_left_out(tmp_path: Path, step: int) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    line = (run / "steps.jsonl").read_text().splitlines()[0]
    with (run / "steps.jsonl").open("a") as file:
        file.write(line.replace('"step":0', f'"step":{step}') + "\n")
    assert len(RunReader(run).poll()) == 8
    assert commands.main(["report", str(run), "--json"]) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("collectives", 10**400), ("payload_bytes", -1), ("rank", -(2**63)), ("exposed_seconds", -1e308), ("loss", 1e400)],
    ids=short,
)
def test_a_record_with_a_figure_that_nothing_can_be_counted_with_is_left_out(
    tmp_path: Path, field: str, value: float
) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    record = json.loads((run / "steps.jsonl").read_text().splitlines()[0])
    with (run / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**record, "step": 4, field: value}) + "\n")
    assert len(RunReader(run).poll()) == 8
    for command in (["report", str(run), "--json"], ["what-if", str(run), "--repair", "1", "--json"]):
        assert commands.main(command) in (0, 2)


def test_what_is_not_known_of_a_record_stays_unknown_beside_what_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    record = json.loads((run / "steps.jsonl").read_text().splitlines()[0])
    with (run / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**record, "step": 4, "wait_seconds": None}) + "\n")
        file.write(json.dumps({**record, "step": 5, "wait_seconds": None, "sync_seconds": 1e308}) + "\n")
    newest = RunReader(run).poll()[-1]
    assert newest.step == 4
    assert np.isnan(newest.wait_seconds)
    assert newest.own_seconds == record["own_seconds"]


@pytest.mark.parametrize("unix", ["[bold]", 1e308, -1, None, []])
def test_an_alert_of_no_time_is_told_as_of_now(unix: Any) -> None:
    book = AlertBook("run", wall=lambda: 1700000000.0)
    verdict = {
        "kind": "dead_rank",
        "ranks": [1],
        "since_step": 1,
        "detected_step": 1,
        "excess_ratio": 0.0,
        "cause": "x",
    }
    (alert,) = book.record({"kind": "verdict", "unix": unix, "verdict": verdict})
    assert alert.started_unix == 1700000000.0
    assert book.record({"kind": "ended", "unix": unix}) == []


def test_a_size_in_a_table_of_json_that_no_float_holds_is_a_bad_row(tmp_path: Path) -> None:
    row = {"size": 4096, "out_of_place": {"time": 20.0, "alg_bw": 0.2, "bus_bw": 0.3}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"config": {"devices": [{}, {}]}, "results": [row, {**row, "size": 10**400}]}))
    (table,) = read_tables(path)
    assert len(table.rows) == 1


@pytest.mark.parametrize("number", ["9" * 5000, "²"])
def test_a_dump_whose_groups_have_numbers_that_are_none_is_read(tmp_path: Path, number: str) -> None:
    calls = [*map(dumps.call, range(1, 4))]
    ranks = dumps.world(2, {}, calls)
    for content in ranks.values():
        for part in ("pg_config", "pg_status"):
            content[part] = {number: content[part]["0"]}
    assert all(note.used for note in examine([dumps.write(tmp_path, ranks)]).notes)


def test_a_trace_with_a_deep_header_is_read(tmp_path: Path) -> None:
    from tests.doctor.kineto_maker import Job

    Job(ranks=2, steps=5).write(tmp_path)
    path = tmp_path / "rank1.pt.trace.json"
    path.write_text(path.read_text().rstrip()[:-1] + f', "deep": {DEEP}}}')
    assert all(note.used for note in examine([tmp_path]).notes)


@pytest.mark.parametrize("last", [False, True])
def test_a_trace_with_deep_arguments_loses_that_event_alone(tmp_path: Path, last: bool) -> None:
    from tests.doctor.kineto_maker import Job

    Job(ranks=2, steps=5).write(tmp_path)
    path = tmp_path / "rank1.pt.trace.json"
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    events[-1 if last else len(events) // 2]["args"] = {"deep": "HERE"}
    path.write_text(json.dumps(trace).replace('"HERE"', DEEP))
    notes = examine([tmp_path]).notes
    assert [note.used for note in notes] == [True, True]
    lost = f"breaks off after {len(events) - 1} whole events" if last else "1 events are damaged and were left out"
    assert lost in str(notes[1])


@pytest.mark.parametrize("times", [1e300, 1e307])
def test_times_without_measure_are_left_out_and_warn_of_nothing(tmp_path: Path, times: float) -> None:
    run = write_run(tmp_path / "run", own_times(60, 4))
    lines = []
    for number, line in enumerate((run / "steps.jsonl").read_text().splitlines()):
        record = json.loads(line)
        if number % 7 == 0:
            record |= {name: times * value for name, value in record.items() if name.endswith("seconds")}
        lines.append(json.dumps(record))
    (run / "steps.jsonl").write_text("\n".join(lines) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert commands.main(["report", str(run)]) == 0
    assert "e+30" not in (run / "report.html").read_text()


def test_pages_and_metrics_hold_no_control_characters(tmp_path: Path) -> None:
    error_file(tmp_path / "errors", 0, {"message": f"OSError: {ESCAPES}", "extraInfo": {"timestamp": "99"}})
    assert "\x1b" not in doctor_page(examine([tmp_path / "errors"]))
    run = write_run(tmp_path / "run", own_times(4, 2))
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "name": ESCAPES, "hosts": [ESCAPES, "b"]}))
    assert commands.main(["report", str(run)]) == 0
    assert "\x1b" not in (run / "report.html").read_text()
    assert b"\x1b" not in render(MetricCounters(RunReader(run).info).snapshot([], {}, {}))[0]


def test_an_error_that_quotes_a_file_is_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "topology.toml"
    path.write_text('schema = 1\n"a\\u001b[2J" = 3\n')
    assert commands.main(["predict", "--topology", str(path)]) == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "there is no such key" in said.err


@pytest.mark.parametrize("unix", [-1e308, 1e308, 1e300])
def test_a_run_that_began_at_no_time_of_a_calendar_has_its_page_and_its_place_in_the_list(
    tmp_path: Path, unix: float
) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "started_unix": unix}))
    assert commands.main(["report", str(run), "--json"]) == 0
    pytest.importorskip("starlette")
    from tests.view.served import ask, serving

    with serving(run, under=tmp_path) as url:
        assert "<b>run</b>" in ask(url, "/runs")[2].decode()


def test_a_record_of_a_rank_that_is_not_there_is_no_part_of_a_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", own_times(4, 2))
    line = (run / "steps.jsonl").read_text().splitlines()[0]
    with (run / "steps.jsonl").open("a") as file:
        for rank in ("2", "-1", "9007199254740993"):
            file.write(line.replace('"rank":0', f'"rank":{rank}') + "\n")
    trace = tmp_path / "trace.json"
    assert commands.main(["report", str(run), "--perfetto", str(trace)]) == 0
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_a_carriage_return_inside_a_row_of_a_table_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"size_bytes,time_us\n1024,10\n20\r48,11\n4096,12\n" + b'"' + b"9" * 200_000 + b"\n")
    (table,) = read_tables(path)
    assert [row.size_bytes for row in table.rows] == [1024, 4096]
    assert len(table.flags) >= 1


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e999999999999", "inf", "nan", "9" * 5_000, "²"])
def test_a_number_that_no_float_holds_makes_one_bad_row(tmp_path: Path, number: str) -> None:
    path = tmp_path / "table.csv"
    for row in (f"{number},11,2", f"2048,{number},2", f"2048,11,{number}"):
        path.write_text(f"size_bytes,time_us,gpus\n1024,10,2\n{row}\n4096,12,2\n")
        commands.main(["predict", "score", str(path), "--json"])
        rows = [row for table in read_tables(path) for row in table.rows]
        assert {1024, 4096} <= {row.size_bytes for row in rows}


@pytest.mark.parametrize("stage", ["7", "9" * 5_000])
def test_a_pipeline_with_a_stage_that_is_missing_is_said_to_be_so(tmp_path: Path, stage: str) -> None:
    shape = timeline_maker.Shape(stages=2, replicas=2, micro_batches=4)
    timeline_maker.run(shape, lambda *_: 0.01)
    text = json.dumps({"traceEvents": shape.events}).replace("PP rank 1", f"PP rank {stage}")
    (tmp_path / "timeline.json").write_text(text)
    (note,) = examine([tmp_path]).notes
    assert "could not be read" not in note.text


@pytest.mark.parametrize("value", [10**400, "x"])
def test_a_probe_with_a_figure_that_is_none_is_refused_in_words(tmp_path: Path, value: Any) -> None:
    probe = probed()
    for damaged in (
        {**probe, "reduce_bytes_per_s": value},
        {**probe, "links": [{**probe["links"][0], "alpha_s": value}]},
    ):
        path = tmp_path / "probe.json"
        path.write_text(json.dumps(damaged))
        with pytest.raises(UsageError):
            CostNetwork.from_topology(damaged)
        with pytest.raises(UsageError):
            load_topology(path)


@pytest.mark.parametrize("rate", [[[]], "x", 10**400, -1.0], ids=short)
def test_a_probe_whose_host_has_a_rate_that_is_none_is_refused_in_words(tmp_path: Path, rate: Any) -> None:
    hosts = [{**host, "out_bytes_per_s": 1e8, "in_bytes_per_s": rate} for host in probed()["hosts"]]
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({**probed(), "hosts": hosts}))
    with pytest.raises(UsageError):
        load_topology(path)


@pytest.mark.parametrize("sizes", [(4, -4), (1024, 4), (0, 4), (4, 1 << 63)])
def test_a_selection_table_whose_sizes_do_not_ascend_is_none(sizes: tuple[int, ...]) -> None:
    rows = (TimingRow("native", 1e-4, None, 1e-4, True),)
    table = TimingTable({}, probed(), tuple(Rank(size, "native", "x", rows) for size in sizes))
    with pytest.raises(UsageError, match="ascend"):
        TimingTable.decode(msgspec.json.encode(table))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x92\xc0\x01",
        b"\x93\x84\xc0\xc0\xc0",
        b"\x93\xc0\x00\x05",
        b"\xa2\xff\xfe",
        b"\x93\x00\xc0\xc0",
        b"\x91" * 9_999,
    ],
)
def test_what_is_no_message_of_ranks_that_meet_is_a_broken_connection(body: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack("!I", len(body)) + body)
        with pytest.raises(OSError, match="no message of ours"):
            receive_message(here)


def test_dumps_with_text_that_cannot_be_encoded_are_read_without_it(tmp_path: Path) -> None:
    behind = [dumps.call(seq, done=seq < 4) for seq in range(5)]
    made = dumps.world(3, {1: behind}, [dumps.call(seq, done=seq < 5) for seq in range(6)])
    for content in made.values():
        content["pg_config"]["0"]["desc"] = "\ud800"
        for call in content["entries"]:
            call["process_group"] = ("0", "\ud800")
            call["frames"] = [{"name": "\ud800", "filename": "train.py", "line": 3}]
    found = examine([dumps.write(tmp_path / "job", made)])
    assert [note.used for note in found.notes] == [True] * 3
    assert [verdict.kind for verdict in found.verdicts] == ["hang"]


def test_nothing_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from tests.hostile.fuzz import Bomb

    monkeypatch.setenv("RINGSIDE_FUZZ_SIGN", str(tmp_path / "executed"))
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "trace_rank_0").write_bytes(pickle.dumps({"entries": [Bomb()], "version": "2.9"}))
    assert not any(note.used for note in examine([tmp_path / "dumps"]).notes)
    assert not os.path.exists(tmp_path / "executed")


def test_a_rate_whose_inverse_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(to_toml(preset("ethernet-10g")) + "\n[sharp]\nalpha_s = 0\nbytes_per_s = 1e-320\n")
    with pytest.raises(UsageError, match=r"sharp\.bytes_per_s: bytes per second, at least 1e-06, not 9.99989e-321"):
        load_topology(path)


def test_a_topology_of_more_hosts_than_an_integer_holds(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text("schema = 1\nhosts = 99999999999999999999\nranks_per_host = 4\n")
    with pytest.raises(UsageError, match="hosts: at most 1,000,000"):
        load_topology(path)
