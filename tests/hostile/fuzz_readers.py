"""Every reader of files and messages from outside, with real files for it, and all that is done with what it read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from tests.doctor import call_logs, dumps, nccl_logs, ras_maker, timeline_maker
from tests.doctor.kineto_maker import Job
from tests.hostile.fuzz import damaged, message
from tests.hostile.fuzz_run import WHOLE, OthersUnreadError, Reader
from tests.recorded_runs import own_times, slow_run, write_run

from ringside import commands
from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError

SHARED = Path(os.environ.get("RINGSIDE_FUZZ_DATA", Path(__file__).parents[1] / "data"))
"""Published files (tests/data/README.md)."""


def _shared(name: str) -> list[Path]:
    """The published files of a folder, without the large ones."""
    return [path for path in sorted((SHARED / name).glob("*")) if path.is_file() and path.stat().st_size < 50_000]


def _copy(files: list[Path], folder: Path) -> None:
    if files:
        folder.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, folder / file.name)


def _command(*arguments: str | Path) -> Iterator[str]:
    """Run one of our commands as the shell does; yield what it writes on both streams."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = commands.main([str(one) for one in arguments])
    assert status in (0, 1, 2, 3), f"exit status {status}"
    for stream in (out, err):
        stream.flush()
        yield stream.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- doctor


def _doctor(folder: Path) -> Iterator[str]:
    """What the command prints, its page, and its JSON, of one examination."""
    from ringside.commands.doctor import print_findings
    from ringside.doctor import as_json, examine
    from ringside.view.html.doctor import doctor_page
    from ringside.view.tui.console import SafeConsole

    found = examine([folder])
    text = io.StringIO()
    print_findings(found, SafeConsole(file=text, highlight=False, soft_wrap=True))
    yield text.getvalue()
    yield json.dumps(as_json(found), indent=2)
    yield doctor_page(found)


def _doctor_each(folder: Path) -> Iterator[str]:
    """The same of files that do not need each other: whole ones are read, or said to be of another job."""
    from ringside.doctor import examine

    yield from _doctor(folder)
    said = {note.file for note in examine([folder]).notes if note.used or "left out" in note.text}
    if unread := WHOLE - said:
        raise OthersUnreadError(f"{sorted(unread)[:3]} were not read")


def _write_dumps(folder: Path) -> None:
    for name in ("gpu_error_1st", "lock_gil_1st"):
        files = [file for file in _shared(f"flight_recorder/{name}") if file.name.startswith("_dump")]
        _copy(files, folder / name)
    late = {2: [dumps.call(seq) for seq in range(5)]}
    others = [dumps.call(seq, done=seq < 5) for seq in range(6)]
    dumps.write(folder / "pickled", dumps.world(4, late, others))
    dumps.write(folder / "json", dumps.world(4, late, others), as_json=True)
    peers = [dumps.call(1), dumps.call(2, "send 0->1", p2p=True, done=False)]
    dumps.write(folder / "peers", dumps.world(3, {1: [dumps.call(1, "broadcast", done=False)]}, peers))


def _write_traces(folder: Path) -> None:
    _copy([file for file in _shared("kineto") if file.suffix == ".gz"], folder / "published")
    Job(ranks=3, steps=6, slow={1: 1.4}, hosts=("a", "b")).write(folder / "nccl")
    Job(ranks=2, steps=5, kernel="", slow={1: 1.4}).write(folder / "gloo", packed=True)
    Job(ranks=2, steps=5, details=False, ranks_as_text=True).write(folder / "old")


def _write_logs(folder: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"network": "NET/Socket/0", "environment": {"NCCL_ALGO": "Ring"}},
        {"complete": False, "extra": TORCH_LINES},
    ]
    for number, option in enumerate(options):
        (folder / f"job{number}").mkdir(parents=True)
        (folder / f"job{number}" / "job.log").write_text(nccl_logs.job_log([4, 4], **option))
    places = nccl_logs.hosts_of([2, 2])
    (folder / "ranks").mkdir()
    for rank in range(4):
        text = "\n".join(nccl_logs.log_of_rank(rank, places)) + "\n"
        (folder / "ranks" / f"nccl.{rank}.log").write_text(text)


def _write_calls(folder: Path) -> None:
    for name, write in call_logs.WRITERS.items():
        (folder / name).mkdir(parents=True)
        write(call_logs.CallJob(ranks=3, calls=24, late={1: 0.004}), folder / name)


def _write_ras(folder: Path) -> None:
    counts = {rank: {"AllReduce": 40 - (rank == 2)} for rank in range(4)}
    (folder / "ras").mkdir(parents=True)
    for name, missing in (("dead", {4: "considered_dead"}), ("stuck", {})):
        stuck = ras_maker.communicator(counts, missing=missing)
        peer = ras_maker.event("PEER_DEAD", ras_maker.member(1))
        text = ras_maker.reading(0, stuck) + ras_maker.reading(30, stuck) + (peer if missing else "")
        (folder / "ras" / name).write_text(text)


TORCH_LINES = (
    "[rank1]:[E1 ProcessGroupNCCL.cpp:1] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
    "[rank1]:[E1 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work "
    "sequence id: 7 PG status: last enqueued work: 7, last enqueued NCCL work: 8, last completed NCCL work: 6",
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-01-01_00:00:00",
    "  host      : node-1",
    "  rank      : 3 (local_rank: 3)",
    "  exitcode  : -9 (pid: 4242)",
    "  error_file: <N/A>",
    "  traceback : Signal 9 (SIGKILL) received by PID 4242",
)


def _write_errors(folder: Path) -> None:
    for rank, what in enumerate(("DistBackendError: NCCL error: remote process exited", "ValueError: x", "OSError: y")):
        inner = {"message": what, "extraInfo": {"py_callstack": "Traceback\n  train()", "timestamp": str(100 + rank)}}
        (folder / "job" / str(rank)).mkdir(parents=True)
        (folder / "job" / str(rank) / "error.json").write_text(json.dumps({"message": inner}))


def _write_timelines(folder: Path) -> None:
    seconds = {"forward-compute": 0.01, "backward-compute": 0.02, "optimizer": 0.005}
    for name, chunks in (("plain", 1), ("interleaved", 2)):
        shape = timeline_maker.Shape(stages=2, replicas=2, micro_batches=4, chunks=chunks)
        timeline_maker.run(shape, lambda kind, *_: seconds.get(kind, 0.0005))
        (folder / name).mkdir(parents=True)
        (folder / name / "timeline.json").write_text(json.dumps({"traceEvents": shape.events}))
        meta = f"dp_size: 2\npp_size: 2\nvpp_size: {chunks}\ntp_size: 1\n"
        (folder / name / "meta.yaml").write_text(meta)


def _write_archives(folder: Path) -> None:
    real = folder / "real"
    _write_dumps(real)
    _write_logs(real)
    slow_run(real / "run" / "r", steps=20, onset=10)
    for scene in ("pickled", "json", "job2", "run"):
        (folder / scene).mkdir()
        for kind, mode in (("tar", "w"), ("tar.gz", "w:gz")):
            with tarfile.open(folder / scene / f"a.{kind}", mode) as archive:  # type: ignore[call-overload]
                archive.add(real / scene, arcname="job")
        with zipfile.ZipFile(folder / scene / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for path in sorted((real / scene).rglob("*")):
                if path.is_file():
                    packed.write(path, path.relative_to(real))
    shutil.rmtree(real)


# ------------------------------------------------------------------------------------------------- run directories


def _write_runs(folder: Path) -> None:
    slow_run(folder / "slow" / "run", steps=60, onset=30)
    write_run(folder / "healthy" / "run", own_times(24, 3), engine="gloo")
    _with_everything(slow_run(folder / "more" / "run", steps=40, onset=20))


def _with_everything(run: Path) -> None:
    """Add to a run what only some have: vitals, wires, a loss, and events of every kind."""
    lines = (run / "steps.jsonl").read_text().splitlines()
    wire = {
        "seconds": 1.0,
        "sent_bytes": 10**7,
        "wire_seconds": 0.5,
        "local": "10.0.0.1 5",
        "remote": "10.0.0.2 6",
        "peer": 1,
    }
    vitals = {
        "seconds": 1.0,
        "cpu_seconds": 0.9,
        "cpus": 4,
        "ran_seconds": 0.8,
        "waited_seconds": 0.5,
        "gpu_clock_mhz": 900.0,
    }
    vitals |= {"gpu_max_clock_mhz": 1900.0, "steal_ratio": 0.2, "throttled_seconds": 0.2, "quota_cpus": 2.0}
    records = [json.loads(line) for line in lines]
    for record in records:
        record |= {"loss": 1.0, "samples": 8, "busy_seconds": 0.01, "latency_seconds": 1e-4}
        if record["step"] % 5 == 0:
            record |= {"vitals": vitals, "wires": [wire]}
    (run / "steps.jsonl").write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    verdict = {
        "kind": "slow_rank", "ranks": [2], "since_step": 20, "detected_step": 30, "excess_ratio": 0.3, "cause": "x",
        "evidence": {"own_seconds": 0.1, "host": "a"}, "cost_rank_seconds": 3.0, "advice": "y",
    }  # fmt: skip
    link = {**verdict, "kind": "slow_link", "ranks": [0, 1]}
    hang = {**verdict, "kind": "hang", "ranks": [1], "evidence": {"stacks": "stacks/rank1.txt", "victims": "0, 2"}}
    events: list[dict[str, Any]] = [
        {"unix": 1.7e9, "kind": "started", "steps": 40},
        {"unix": 1.7e9 + 1, "kind": "verdict", "verdict": verdict, "number": 1},
        {"unix": 1.7e9 + 2, "kind": "verdict", "verdict": link, "number": 2},
        {"unix": 1.7e9 + 3, "kind": "repaired", "verdict": verdict, "number": 1, "step": 33},
        {"unix": 1.7e9 + 4, "kind": "verdict", "verdict": hang, "number": 3},
        {"unix": 1.7e9 + 4, "kind": "rank_lost", "rank": 3, "text": "it was killed"},
        {"unix": 1.7e9 + 5, "kind": "note", "text": "a note", "stride": 2},
        {"unix": 1.7e9 + 6, "kind": "ended", "steps": 40},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))
    (run / "stacks").mkdir()
    (run / "stacks" / "rank1.txt").write_text('Thread 0x7f (most recent call first):\n  File "train.py", line 3 in x\n')
    from ringside.monitor.summary import finish_run
    from ringside.view.html.run_report import render_report

    finish_run(run, render_report)
    (run / "report.html").unlink()


def _report(folder: Path) -> Iterator[str]:
    run = folder / "run"
    yield from _command("report", run)
    yield from _command("report", run, "--json")
    yield from _command("report", run, "--markdown")
    page = run / "report.html"
    if page.exists():
        yield page.read_text(encoding="utf-8")
    trace = folder / "trace.json"
    yield from _command("report", run, "--perfetto", trace)
    if trace.exists():
        yield trace.read_text()


def _value(folder: Path) -> Iterator[str]:
    """As notebooks, comparisons and the doctor read a run."""
    from ringside.view.run.recorded import Run

    yield from _command("compare", folder / "run", folder / "run", "--warm-up", "2")
    yield from _command("what-if", folder / "run", "--repair", "1", "--json")
    run = Run(folder / "run")
    assert repr(run)
    yield "<!doctype html>" + run._repr_html_()
    json.dumps(run._repr_json_())
    assert run.wait_seconds.shape == run.own_seconds.shape
    run.to_pandas()


def _watched(folder: Path) -> Iterator[str]:
    """As `ringside top` and `ringside serve` follow a run."""
    from ringside.view.export.prometheus import render
    from ringside.view.server.feed import PageFeed
    from ringside.view.tui.rank_table import SortOrder
    from ringside.view.tui.source import Local, take_snapshot
    from ringside.view.tui.text import as_json, once_lines

    snapshot = take_snapshot(Local(folder / "run"), 1)
    order = SortOrder(sort="excess", reverse=False, filter="")
    yield "\n".join(once_lines(snapshot, order, 100))
    yield json.dumps(as_json(snapshot, order))
    feed = PageFeed(folder / "run", poll_s=0.001, quiet_s=0.0)
    try:
        deadline = threading.Event()
        while not feed.number and not deadline.wait(0.002):
            pass
        json.loads(feed.state()[1])
        feed.rank(1)
        msgspec.json.decode(feed.rows(-1, ""))
        figures = feed.figures()
        if figures is not None:
            yield render(figures)[0].decode()
    finally:
        feed.close()


# ------------------------------------------------------------------------------------------------- predict


def _write_tables(folder: Path) -> None:
    from tests.predict.written_tables import HEADER, LOG, ROWS, result

    (folder / "made").mkdir(parents=True)
    (folder / "made" / "log.txt").write_text(LOG + ROWS)
    rows = "".join(f"x,2,16,ring,{2**k},{20 + 2**k / 1e4},{2**k / 2e4:.2f},{2**k / 1e4:.2f}\n" for k in range(10, 30))
    (folder / "made" / "table.csv").write_text(HEADER + rows)
    device = {"hostname": "a", "device_info": "NVIDIA H100 80GB HBM3"}
    devices = [device, device, {**device, "hostname": "b"}, {**device, "hostname": "b"}]
    results = [result(1 << size, 20 + (1 << size) / 1e5) for size in range(12, 30)]
    (folder / "json").mkdir()
    (folder / "json" / "run.json").write_text(json.dumps({"config": {"devices": devices}, "results": results}))
    for number, file in enumerate(_shared("bandwidth")):
        _copy([file], folder / f"published{number}")


def _tables(folder: Path) -> Iterator[str]:
    yield from _command("predict", "score", folder, "--json", "--points")
    page = folder / "page.html"
    yield from _command("predict", "score", *sorted(folder.iterdir()), "--html", page)
    if page.exists():
        yield page.read_text(encoding="utf-8")


# A thousand ranks on hosts that are not alike take a quarter of a minute to predict, four times as many 16 times that.
MOST_UNLIKE_RANKS = 1000


def _write_topologies(folder: Path) -> None:
    import importlib.resources

    from ringside.engine.cost.network import CostNetwork

    presets = importlib.resources.files("ringside.predict").joinpath("presets")
    for one in presets.iterdir():
        if one.name.endswith(".toml"):
            (folder / one.name).mkdir(parents=True)
            (folder / one.name / "topology").write_text(one.read_text(encoding="utf-8"))
    from ringside.predict.topology import files as topology_toml

    text = (topology_toml.__doc__ or "").partition("::\n\n")[2]
    (folder / "full").mkdir()
    (folder / "full" / "topology").write_text(text)
    latency = np.array([[0, 2e-5, 3e-5], [2e-5, 0, 4e-5], [3e-5, 4e-5, 0]])
    nic = np.array([1e-8, 1e-8, 2e-8])
    network = CostNetwork(latency, latency / 1e3, nic, nic, reduce=1e-10, overhead_s=1e-6)
    probed = network.to_topology(["a", "b", "c"], [2, 1, 1], "measured")
    (folder / "probe").mkdir()
    (folder / "probe" / "topology").write_text(json.dumps(probed))


def _topologies(folder: Path) -> Iterator[str]:
    from ringside.errors import UsageError
    from ringside.predict.topology.files import load_topology

    with contextlib.suppress(UsageError):
        if load_topology(folder / "topology").ranks > MOST_UNLIKE_RANKS:
            return
    yield from _command("predict", "--topology", folder / "topology", "--model", "1B", "--compute-seconds", "1")
    yield from _command("predict", "simulate", "ring", "--topology", folder / "topology", "--bytes", "1M", "--json")
    yield from _command("what-if", "--topology", folder / "topology", "--bytes", "1M", "--slow-rank", "0=10%")


# ------------------------------------------------------------------------------------------------- survive


def _state() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    half = torch.ones(3, dtype=torch.bfloat16)
    return {"step": 7, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "half": half, "text": "x"}


def _write_checkpoints(folder: Path) -> None:
    from ringside.survive.state.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "job" / "checkpoints")
    for step in (5, 7):
        checkpoints.write({**_state(), "step": step})


def _checkpoints(folder: Path) -> Iterator[str]:
    """The newest that is whole; where one is damaged, the other one, and never anything else."""
    from ringside.survive.state.checkpoint import Checkpoints
    from ringside.survive.state.state import digest_of

    found = Checkpoints(folder / "checkpoints").newest()
    both = (folder / "checkpoints" / f"step-{step:08d}" for step in (5, 7))
    whole = [one for one in both if (files := {str(path) for path in one.glob("*")}) and files <= WHOLE]
    if found is None:
        if whole:
            raise OthersUnreadError(f"{whole[0].name} is whole, and was not read")
    elif digest_of(found) != digest_of({**_state(), "step": found["step"]}):
        raise AssertionError("another state than was written")
    yield ""


def _write_trees(folder: Path) -> None:
    from ringside.survive.state.state import pack, packed_size

    memory = np.zeros(packed_size(_state()), dtype=np.uint8)
    pack(_state(), memory)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "packed").write_bytes(memory.tobytes())


def _trees(folder: Path) -> Iterator[str]:
    from ringside.survive.state.state import unpack

    unpack(np.frombuffer((folder / "packed").read_bytes(), dtype=np.uint8))
    yield ""


def _damaged_tree(content: bytes, random: Random) -> bytes:
    """The head of a packed state is a MessagePack behind its length."""
    if random.random() < 0.3:
        return damaged(content, random)
    length = int.from_bytes(content[:8], "little")
    head = message(content[8 : 8 + length], random)
    return len(head).to_bytes(8, "little") + head + content[8 + length :]


# ------------------------------------------------------------------------------------------------- messages


def _write_messages(folder: Path) -> None:
    """What ranks, workers and their keepers say to each other, as the code that says it writes it."""
    from ringside.monitor.hang.attribution import Failure, RankState, WaitingCall
    from ringside.pytorch.hang_watch.store_channel import HostReport
    from ringside.survive.protocol.decision import Commit, Decided, MemberId, encode
    from ringside.survive.protocol.generation import Generation

    seats = (MemberId(0, 1), MemberId(1, 2))
    pack = msgspec.msgpack.Encoder().encode
    standing = RankState(rank=1, step=4, entered=9, waiting_s=3.0, still_s=3.0, failure=Failure("lost", [0], "it died"))
    calls = [WaitingCall(9, "all_reduce", 1000)]
    records = msgspec.json.decode(b"[" + b",".join(_records(4)) + b"]")
    for name, content in {
        "generation": encode(Generation(1, 2, 30, 0, seats, (0, 1), broken=((0, 1),), left=(MemberId(0, 0),))),
        "decision": encode(Decided().after(3, Commit(seats, 0, 64, 64, "f7ab"))),
        "founders": pack(seats),
        "letter": pack(HostReport(1, 0, [standing, msgspec.structs.replace(standing, rank=0, calls=calls)])),
        "records": pack(records),
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / name).write_bytes(content)
    (folder / "hello").mkdir()
    hello = msgspec.msgpack.encode(({"rank": 1, "ranks": 2, "protocol": 3, "settings": (1, 2)}, 0, None))
    (folder / "hello" / "hello").write_bytes(struct.pack("!I", len(hello)) + hello)
    problem = msgspec.msgpack.encode((None, 0, ("PeerLostError", "rank 1 died", (1,))))
    (folder / "problem").mkdir()
    (folder / "problem" / "hello").write_bytes(struct.pack("!I", len(problem)) + problem)


def _records(steps: int) -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        run = write_run(Path(scratch) / "run", own_times(steps, 2))
        return (run / "steps.jsonl").read_bytes().splitlines()


def _messages(folder: Path) -> Iterator[str]:
    (path,) = folder.iterdir()
    _HEARD[path.name](path.read_bytes())
    yield ""


def _hear_generation(content: bytes) -> None:
    from ringside.survive.protocol.generation import decode_generation

    assert all(rank >= 0 for rank in decode_generation(content).ranks)


def _hear_decision(content: bytes) -> None:
    from ringside.survive.protocol.decision import decode_decided

    decode_decided(content)


def _hear_founders(content: bytes) -> None:
    from ringside.survive.cluster.rendezvous import Rendezvous

    class Registers:
        def read(self, key: str) -> bytes:
            return content

    Rendezvous(Registers(), 2).founders(1, 0.0, lambda seat: True)


def _hear_letter(content: bytes) -> None:
    """What another host says of its ranks, and the verdict on it."""
    from ringside.monitor.hang.detector import HangDetector
    from ringside.pytorch.hang_watch import store_channel as watch_mail

    try:
        standings = watch_mail.decode_report(content).standings
    except UNDECODABLE:
        return  # the thread that reads letters says so, and ends
    machine = HangDetector([1, 2])
    for now in (0.0, 100.0, 200.0):
        machine.check(standings, now)


def _hear_records(content: bytes) -> None:
    """What ranks send to rank 0: it collects, judges and counts them."""
    from ringside.monitor.alerts.counters import MetricCounters
    from ringside.monitor.collector import StepCollector, standard_watchers
    from ringside.monitor.run.records import RunInfo
    from ringside.pytorch.recording import record_transport as delivery
    from ringside.view.export.prometheus import render

    try:
        records = delivery.decode(content)
    except UNDECODABLE:
        return
    info = RunInfo(schema=1, name="x", started_unix=0.0, world_size=2, hosts=["a", "b"], engine="gloo")
    collector, tally = StepCollector(2, watchers=standard_watchers(2, ["a", "b"])), MetricCounters(info)
    collector.add(records)
    tally.add(records, collector)
    render(tally.snapshot((), {}, {}))


def _hear_hello(content: bytes) -> None:
    from ringside.engine.shm.rendezvous import receive_message

    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=_send, args=(there, content))
        sender.start()
        try:
            receive_message(here)
        except (OSError, EOFError, RingsideError):
            pass  # a connection that does not speak our language is closed; an error that was sent is raised
        finally:
            here.close()
            sender.join()


def _send(there: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        there.sendall(content)
        there.shutdown(socket.SHUT_WR)


_HEARD = {
    "generation": _hear_generation,
    "decision": _hear_decision,
    "founders": _hear_founders,
    "letter": _hear_letter,
    "records": _hear_records,
    "hello": _hear_hello,
}


def _damaged_message(content: bytes, random: Random) -> bytes:
    """A MessagePack with its length before it, where it has one."""
    if content[:2] != b"\0\0" or random.random() < 0.2:
        return message(content, random)
    inner = message(content[4:], random)
    return struct.pack("!I", len(inner)) + inner


# ------------------------------------------------------------------------------------------------- this host


def _write_pages(folder: Path) -> None:
    """Pages of the hang watch, an entry of the registry, and a table of choices."""
    from ringside.engine.tuner.table import Rank, TimingRow, TimingTable
    from ringside.monitor.run import registry
    from ringside.pytorch.hang_watch.board import PAGE_BYTES, ProgressPage

    board = ProgressPage()
    try:
        for seq in range(12):
            board.entered(1000 * seq)
            board.waiting()
        board.write("where", "train.py:30 in step")
        board.failed(ValueError("x"))
        (folder / "page").mkdir(parents=True)
        (folder / "page" / "page").write_bytes(os.pread(board.fd, PAGE_BYTES, 0))
    finally:
        board.close()
    rows = (TimingRow("native", 1e-4, 1.1e-4, 1.1e-4, True), TimingRow("ring", 2e-4, None, 2e-4, False))
    ranks = tuple(Rank(size, "native", "it is the fastest", rows) for size in (4, 1024, 1 << 20))
    table = TimingTable({"world": "2"}, _probed(), ranks)
    (folder / "table").mkdir()
    (folder / "table" / "table").write_bytes(table.encode())
    entry = registry.Entry(path=b"/runs/x", pid=os.getpid(), born=1, started_unix=1.7e9, world_size=4)
    (folder / "entry").mkdir()
    (folder / "entry" / "1.json").write_bytes(msgspec.json.encode(entry))


def _probed() -> dict[str, Any]:
    from ringside.engine.cost.network import CostNetwork

    latency = np.array([[0, 2e-5, 3e-5], [2e-5, 0, 4e-5], [3e-5, 4e-5, 0]])
    nic = np.array([1e-8, 1e-8, 2e-8])
    network = CostNetwork(latency, latency / 1e3, nic, nic, reduce=1e-10, overhead_s=1e-6)
    return network.to_topology(["a", "b", "c"], [2, 1, 1], "measured")


def _pages(folder: Path) -> Iterator[str]:
    (path,) = folder.iterdir()
    {"page": _look_at_page, "table": _look_at_table, "1.json": _look_at_entry}[path.name](path)
    yield ""


def _look_at_page(path: Path) -> None:
    from ringside.monitor.hang.detector import HangDetector
    from ringside.pytorch.hang_watch.board import PAGE_BYTES, ProgressView

    view = ProgressView(1, path.read_bytes()[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    machine = HangDetector([1, 2])
    for now in (0.0, 1e5, 2e5):
        machine.check([msgspec.structs.replace(view.standing(now), rank=0), view.standing(now)], now)


def _look_at_table(path: Path) -> None:
    from ringside.engine.cost.network import CostNetwork
    from ringside.engine.tuner.cache import load_table

    table = load_table(path, {"world": "2"}, CostNetwork.from_topology(_probed()))
    if table is not None:
        for size in (1, 5000, 1 << 40):
            table.at(size)
            table.expected_s(size, "native")
        table.timings(), table.prices()


def _look_at_entry(path: Path) -> None:
    from ringside.monitor.run import registry

    os.chmod(path.parent, 0o700)
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "registry_directory", lambda *_: path.parent)
        assert registry.running_runs() == []  # nobody has been alive since the first tick


READERS = {
    reader.name: reader
    for reader in (
        Reader("dumps", _write_dumps, _doctor_each, damaged),
        Reader("traces", _write_traces, _doctor_each, damaged),
        Reader("logs", _write_logs, _doctor_each, damaged),
        Reader("errors", _write_errors, _doctor_each, damaged),
        Reader("calls", _write_calls, _doctor, damaged),
        Reader("ras", _write_ras, _doctor, damaged),
        Reader("timelines", _write_timelines, _doctor, damaged),
        Reader("archives", _write_archives, _doctor, damaged),
        Reader("runs-doctor", _write_runs, _doctor, damaged),
        Reader("runs-report", _write_runs, _report, damaged),
        Reader("runs-value", _write_runs, _value, damaged),
        Reader("runs-live", _write_runs, _watched, damaged),
        Reader("tables", _write_tables, _tables, damaged),
        Reader("topologies", _write_topologies, _topologies, damaged),
        Reader("checkpoints", _write_checkpoints, _checkpoints, damaged),
        Reader("states", _write_trees, _trees, _damaged_tree),
        Reader("messages", _write_messages, _messages, _damaged_message),
        Reader("pages", _write_pages, _pages, damaged),
    )
}
