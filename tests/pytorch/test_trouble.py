"""When Ringside itself is in trouble, training goes on unharmed, to the bit, and it is said once."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support import zygote  # noqa: E402
from tests.support.ranks import Team, hear, on_ranks, place, say  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from torch.distributed import HashStore, PrefixStore  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.isolation import Guard  # noqa: E402
from ringside.monitor.run.directory import RunReader  # noqa: E402
from ringside.monitor.run.records import StepRecord, Wire  # noqa: E402
from ringside.monitor.summary import finish_run  # noqa: E402
from ringside.processes import Process  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402
from ringside.pytorch.recording.rank0 import Rank0Recorder  # noqa: E402
from ringside.pytorch.recording.record_transport import RecordReceiver, RecordSender  # noqa: E402
from ringside.pytorch.recording.session import RecordingSettings  # noqa: E402
from ringside.view.html.run_report import render_report  # noqa: E402

from .training import (  # noqa: E402
    LIMIT_S,
    Plan,
    Said,
    build,
    digest,
    free_port,
    group,
    one_step,
    small_attachment,
    steps,
)

STEPS = 8


def boom(*_: Any, **__: Any) -> Any:
    raise KeyError("an instrument that breaks")


def kinds_of(path: Path, *kinds: str) -> list[str]:
    events = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [event["verdict"]["kind"] for event in events if event["kind"] in kinds]


def per_rank(path: Path) -> dict[int, list[int]]:
    """Training steps recorded, by rank."""
    found: dict[int, list[int]] = {}
    for record in RunReader(path).poll():
        found.setdefault(record.rank, []).append(record.step)
    return {rank: sorted(steps) for rank, steps in sorted(found.items())}


# ------------------------------------------------------------------------------------------------ inside Ringside

INSTRUMENTS = {
    "a step begins": "ringside.monitor.step_clock:StepClock.forward_begins",
    "forward ends": "ringside.monitor.step_clock:StepClock.forward_ends",
    "backward ends": "ringside.monitor.step_clock:StepClock.backward_ends",
    "what the engine's log says": "ringside.pytorch.ddp.watcher:BackwardWatch.set_apart",
    "what it took": "ringside.pytorch.ddp.watcher:SyncTimes",
    "the update begins": "ringside.monitor.step_clock:StepClock.optimizer_begins",
    "the update ends": "ringside.monitor.step_clock:StepClock.optimizer_ends",
    "buffers": "ringside.monitor.step_clock:StepClock.blocked",
    "a collective begins": "ringside.pytorch.hang_watch.board:ProgressPage.entered",
    "a collective ends": "ringside.pytorch.hang_watch.board:ProgressPage.resumed",
    "the hang watch": "ringside.pytorch.hang_watch.watch:HangWatch.tick",
    "digests": "ringside.pytorch.recording.parameter_digests:ParameterDigests.digest_parameters",
    "comparing": "ringside.pytorch.recording.parameter_digests:DigestComparison.changes",
    "vitals": "ringside.monitor.vitals.process:VitalSigns.since",
    "links": "ringside.monitor.links.sampler:LinkSampler.add_to",
    "the outbox": "ringside.pytorch.recording.record_transport:RecordSender.send",
    "the inbox": "ringside.pytorch.recording.record_transport:RecordReceiver.poll",
    "the collector": "ringside.monitor.collector:StepCollector.add",
    "the detector": "ringside.monitor.slow_rank.detector:Detector.update",
    "alerts": "ringside.monitor.alerts.book:AlertBook.tick",
    "the run directory": "ringside.monitor.run.directory:append_to_file",
    "the summary": "ringside.pytorch.recording.rank0:finish_run",
    "log": "ringside.monitor.step_clock:StepClock.log",
}


def breaks(port: int, path: str, where: str, from_the_start: bool) -> tuple[str, str, list[str], list[str]]:
    """Train once undisturbed, once with an instrument that raises; return both digests and what was said."""
    module, _, names = where.partition(":")
    *owners, name = names.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    with group(port) as rank, Said() as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSIDE_METRICS_PORT", "0")
        expected = trained(rank, monitor=False)
        if from_the_start:
            patch.setattr(owner, name, boom)
        ddp, attachment, optimizer = small_model_with_buffers(run_dir=path, digest_every=2)
        for step in range(STEPS):
            if step == 2:
                patch.setattr(owner, name, boom)
            optimizer.zero_grad()
            one_step(ddp, optimizer, Plan("convolutional"), rank, step)
            optimizer.step()
            ringside.log_step(loss=1.0)
        if where == INSTRUMENTS["the hang watch"]:
            until(lambda: "ringside-watch" not in {thread.name for thread in threading.enumerate()})
        dist.barrier()
        if attachment.session is not None:
            attachment.session.end()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ringside-monitor")]
        return expected, digest(ddp), said.lines, left


def small_model_with_buffers(**how: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(build("convolutional"), bucket_cap_mb=0.01)
    return ddp, ringside.attach(ddp, engine="native", **how), torch.optim.SGD(ddp.parameters(), lr=0.01)


def trained(rank: int, **how: Any) -> str:
    ddp, _, optimizer = small_model_with_buffers(**how)
    for step in range(STEPS):
        optimizer.zero_grad()
        one_step(ddp, optimizer, Plan("convolutional"), rank, step)
        optimizer.step()
    return digest(ddp)


@pytest.mark.parametrize("what", INSTRUMENTS)
def test_an_instrument_that_breaks_harms_no_training_and_is_said_once(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    found = on_ranks(2, breaks, free_port(), str(path), INSTRUMENTS[what], False, limit_s=LIMIT_S)
    for expected, got, lines, left in found:
        assert got == expected
        assert len(lines) <= 1, lines
        assert left == []
    said = [line for *_, lines, _ in found for line in lines]
    assert said, "nobody said it"
    assert any(words in said[0] for words in ("breaks", "dropped", "not recorded any more"))
    assert RunReader(path).info.world_size == 2
    if what not in ("the summary", "the inbox"):
        finish_run(path, render_report)


@pytest.mark.parametrize(
    "where",
    [
        "ringside.pytorch.recording.rank0:RunWriter",
        "ringside.pytorch.recording.rank0:AlertService",
        "ringside.pytorch.recording.session:RankVitals",
        "ringside.pytorch.hang_watch.watch:HangWatch",
    ],
)
def test_a_monitor_that_cannot_start_harms_no_training(tmp_path: Path, where: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSIDE_RUN_DIR", str(tmp_path / "run"))
        found = on_ranks(2, breaks, free_port(), str(tmp_path / "run"), where, True, limit_s=LIMIT_S)
    for expected, got, lines, left in found:
        assert got == expected
        assert len(lines) <= 1, lines
        assert left == []
    assert any("training goes on" in line for *_, lines, _ in found for line in lines)


def odd_values(port: int, path: str) -> list[str]:
    """What a script may hand over that is no number."""
    with group(port) as rank, Said() as said:
        ddp, attachment, optimizer = small_attachment(run_dir=path)
        for loss in (torch.tensor(0.5), float("nan"), 3):
            steps(ddp, optimizer, rank, 1)
            ringside.log_step(loss=loss)
        attachment.session.event("note", thing=object(), more={1: torch.ones(2)})
        attachment.session.event("verdict", what="a kind of the monitor's own")
        ringside.log_step(loss="much")  # type: ignore[arg-type]
        steps(ddp, optimizer, rank, 1)
        dist.barrier()
        attachment.session.end()
        return said.lines


def test_odd_values_from_the_script(tmp_path: Path) -> None:
    for lines in on_ranks(2, odd_values, free_port(), str(tmp_path / "run"), limit_s=LIMIT_S):
        assert len(lines) == 2
        assert "choose another name" in lines[0]
        assert "ringside.log_step()" in lines[1]
    assert kinds_of(tmp_path / "run", "verdict") == []
    losses = [record.loss for record in RunReader(tmp_path / "run").poll() if record.rank == 0]
    assert losses == pytest.approx([0.5, None, 3.0, None], nan_ok=True)


def test_a_fuse_blows_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    guard = Guard("the test")

    @guard.guard
    def call(number: int) -> None:
        calls.append(number)
        if number == 2:
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING):
        for number in range(5):
            call(number)
        guard.run(boom)
    assert calls == [0, 1, 2]
    assert guard.tripped
    assert len(caplog.records) == 1
    with pytest.raises(KeyboardInterrupt):
        Guard("the test").run(interrupt)


def interrupt() -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------ RINGSIDE=off


def is_off(port: int, path: str) -> list[Any]:
    with group(port) as rank, pytest.MonkeyPatch.context() as patch, Said() as said:
        patch.setenv("RINGSIDE", "off")
        before = set(threading.enumerate())
        ddp, attachment, optimizer = small_attachment(run_dir=path)
        steps(ddp, optimizer, rank, 3)
        ringside.log_step(loss=1.0)
        names = [thread.name for thread in set(threading.enumerate()) - before]
        hooks = [len(ddp._comm_hooks), len(ddp._forward_pre_hooks), len(ddp._forward_hooks)]
        attachment.detach()
        found = [names, hooks, sessions.current(), attachment.session, said.lines, os.path.exists(path)]
        del ddp, attachment, optimizer  # a group that goes before its model has been seen to hang in torch
        gc.collect()
        return found


def test_off_is_off(tmp_path: Path) -> None:
    expected = [[], [0, 0, 0], None, None, [], False]
    assert on_ranks(2, is_off, free_port(), str(tmp_path / "run"), limit_s=LIMIT_S) == [expected] * 2


# ------------------------------------------------------------------------------------------------ the store

SERVER = """
import os, sys, torch.distributed as dist, datetime
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, datetime.timedelta(seconds=60), False)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def store_server(port: int) -> Iterator[Process]:
    """A job's store in a process of its own."""
    server = subprocess.Popen(
        [zygote.python(), "-c", SERVER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    store = Process(int(server.stdout.readline()))
    try:
        yield store
    finally:
        store.send(signal.SIGCONT)
        store.close()
        server.stdin.close()
        server.wait(20)
        server.stdout.close()


def without_store(port: int, path: str, again: bool) -> dict[str, Any]:
    """Train on while the store is silent; with `again` it answers again before the end.

    Only rank 0 notices soon: what the others send waits in the kernel's buffers for longer.
    """
    here = place()
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    with Said() as said:
        session = sessions.begin(path, "native", RecordingSettings(silent_s=0.5, goodbye_s=2.0))
        ddp, _, optimizer = small_attachment(run_dir=path, engine="native")
        steps(ddp, optimizer, here.rank, 5)
        dist.barrier()
        say("ready")
        assert hear() == "silent"
        count = train_until(lambda: here.rank > 0 or bool(said.lines), ddp, optimizer, here.rank)
        kept = session.unsent
        if again:
            say("said")
            assert hear() == "answers"
            sent = session.outbox.messages
            count += train_until(lambda: session.outbox.messages > sent + 1, ddp, optimizer, here.rank)
        began = time.monotonic()
        session.end()
        result = {
            "took": time.monotonic() - began,
            "lines": said.about("training goes on"),
            "kept": kept,
            "steps": 5 + count,
        }
    say("ended")
    dist.destroy_process_group()
    return result


def train_until(done: Callable[[], bool], ddp: Any, optimizer: Any, rank: int) -> int:
    """Train until something is so on all ranks; return the number of steps."""
    deadline, count = time.monotonic() + LIMIT_S / 2, 0
    while True:
        steps(ddp, optimizer, rank, 1)
        count += 1
        finished = torch.tensor(float(done() or time.monotonic() > deadline))
        dist.all_reduce(finished, dist.ReduceOp.MIN)
        if finished:
            assert time.monotonic() < deadline
            return count


@pytest.mark.parametrize("again", [False, True])
def test_a_store_that_stops_answering(tmp_path: Path, again: bool) -> None:
    port = free_port()
    with store_server(port) as store, Team(2) as team:
        team.start(without_store, port, str(tmp_path / "run"), again)
        team.await_word("ready")
        store.send(signal.SIGSTOP)
        for rank in (0, 1):
            team.tell(rank, "silent")
        if again:
            team.await_word("said")
            store.send(signal.SIGCONT)
            for rank in (0, 1):
                team.tell(rank, "answers")
        team.await_word("ended")
        store.send(signal.SIGCONT)
        first, second = (outcome.value for outcome in team.finish(LIMIT_S))
    assert [len(first["lines"]), len(second["lines"])] == [1, 0], (first["lines"], second["lines"])
    assert "the job's store has not answered" in first["lines"][0]
    assert first["kept"] > 0
    recorded = per_rank(tmp_path / "run")
    if again:
        assert recorded == {rank: list(range(first["steps"])) for rank in (0, 1)}
    else:
        assert max(recorded[0]) == first["steps"] - 1, "what rank 0 still had of its own is written"
    assert (tmp_path / "run" / "summary.json").exists()


def trains_on(port: int, path: str, breaks: bool) -> tuple[int, int]:
    """Rank 0's monitor is over and both ranks train on; return batches that were sent meanwhile, and records kept."""
    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        session = sessions.begin(path, "native", RecordingSettings(heard_s=0.0, goodbye_s=0.1, records_kept=20))
        ddp, _, optimizer = small_attachment(run_dir=path, engine="native")
        train_until(lambda: rank == 0 or session.presence.is_present, ddp, optimizer, rank)
        if rank == 0 and breaks:
            patch.setattr(Rank0Recorder, "compare", lambda chief: 1 / 0)
            until(lambda: "ringside-monitor" not in {thread.name for thread in threading.enumerate()})
        elif rank == 0:
            session.end()
        dist.barrier()
        train_until(lambda: rank == 0 or not session.presence.is_present, ddp, optimizer, rank)
        before = session.outbox.messages
        steps(ddp, optimizer, rank, 40)
        return session.outbox.messages - before, session.unsent


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_sent_and_little_kept_once_rank_0_takes_nothing_in(tmp_path: Path, breaks: bool) -> None:
    first, second = on_ranks(2, trains_on, free_port(), str(tmp_path / "run"), breaks, limit_s=LIMIT_S)
    assert (first[0], second) == (0, (0, 20))


def test_damaged_batches_are_left_out_and_said_once() -> None:
    store = PrefixStore("test", HashStore())
    inbox, good = RecordReceiver(store, 4), RecordSender(store, 1)
    record = StepRecord(step=1, rank=1, ended_unix=0.0, step_seconds=1.0, own_seconds=1.0)
    with Said() as said:
        no_text = Wire(seconds=1.0, sent_bytes=1, wire_seconds=1.0, local="here")
        told = msgspec.msgpack.encode([msgspec.structs.replace(record, wires=(no_text,))])
        for damaged in (b"\xff\xff\xff", b"\x91\x01", b"\xc1", told.replace(b"here", b"\xff\xfe\xfd\xfc")):
            good.post(damaged)
        good.send([record])
        assert inbox.poll() == [record]
        torn = b"\x01\x00\x00\x00\xff\xff\xff\x7ftorn"  # it ends in the middle
        store.append("box/0", torn)  # type: ignore[attr-defined]  # torch's stubs do not know it
        assert inbox.poll() == []
        good.send([record])
        good.send([])
        assert inbox.poll() == [record]
    assert len(said.lines) == 1, said.lines
    assert inbox.open


# ------------------------------------------------------------------------------------------------ steps and ranks


def skips(port: int, path: str, who: str) -> int:
    with group(port) as rank:
        ddp, attachment, optimizer = small_attachment(run_dir=path, digest_every=0)
        for step in range(30):
            optimizer.zero_grad()
            one_step(ddp, optimizer, Plan(), rank, step)
            if not (step in (7, 8, 20) and (who == "all" or rank == 1)):
                optimizer.step()
        dist.barrier()
        attachment.session.end()
        return int(attachment.session.clock.step)


@pytest.mark.parametrize("who", ["all", "one"])
def test_a_step_that_is_skipped(tmp_path: Path, who: str) -> None:
    path = tmp_path / "run"
    counts = on_ranks(2, skips, free_port(), str(path), who, limit_s=LIMIT_S)
    assert counts == ([27, 27] if who == "all" else [30, 27])
    assert per_rank(path) == {rank: list(range(count)) for rank, count in enumerate(counts)}
    assert "hang" not in kinds_of(path, "verdict")
    assert json.loads((path / "summary.json").read_text())["steps"] == max(counts)


def after_sixty_steps(session: sessions.Session) -> Callable[[list[StepRecord]], None]:
    """Return what takes the place of an outbox's `send`, and holds back what there is to send before step 60."""
    send, held = session.outbox.send, list[StepRecord]()

    def late(records: list[StepRecord]) -> None:
        held.extend(records)
        if held and session.clock.step >= 60:
            send(list(held))
            held.clear()
        if not records:
            send([])

    return late


def comes_late(port: int, path: str) -> list[str]:
    """Rank 1 says who it is, and sends its first records, long after rank 0 has given up waiting for them."""
    with group(port) as rank, pytest.MonkeyPatch.context() as patch, Said() as said:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            patch.setattr(sessions, "host_name", lambda: store.get("rank 0 is through") and "late")
        session = sessions.begin(path, "native", RecordingSettings(hello_s=0.05))
        if rank == 0:
            store.set("rank 0 is through", "yes")
        else:
            patch.setattr(session.outbox, "send", after_sixty_steps(session))
        ddp, _, optimizer = small_attachment(run_dir=path, engine="native")
        steps(ddp, optimizer, rank, 70)
        dist.barrier()
        session.end()
        return said.lines


def test_a_rank_that_joins_late(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, second = on_ranks(2, comes_late, free_port(), str(path), limit_s=LIMIT_S)
    assert len([line for line in first if "rank 1 did not report" in line]) == 1
    assert [line for line in first if "did not report" not in line and "slower" not in line] == []
    assert second == []
    assert per_rank(path) == {rank: list(range(70)) for rank in (0, 1)}
    assert RunReader(path).info.pids[1] == 0


# ------------------------------------------------------------------------------------------------ clocks and disks


def jumps(port: int, path: str) -> list[str]:
    """Every look at the wall clock is a day before or after the last."""
    with group(port) as rank, pytest.MonkeyPatch.context() as patch, Said() as said:
        began, looks = time.time(), [0]

        def wall() -> float:
            looks[0] += 1
            return began + (-1) ** looks[0] * 86_400.0 * looks[0]

        patch.setattr(time, "time", wall)
        ddp, attachment, optimizer = small_attachment(run_dir=path, digest_every=5)
        attachment.session.clock.wall = wall
        if rank == 0:
            attachment.session.rank0.collector.clock = wall
        steps(ddp, optimizer, rank, 40)
        dist.barrier()
        attachment.session.end()
        assert looks[0] >= 40
        return said.lines


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    path = tmp_path / "run"
    began = time.monotonic()
    lines = on_ranks(2, jumps, free_port(), str(path), limit_s=LIMIT_S)
    took = time.monotonic() - began
    assert not [line for said in lines for line in said if "slower" not in line]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["steps"] == 40
    assert 0 < summary["step_seconds"]["p95"] < took
    assert all(0 < rank["own_seconds_median"] < took for rank in summary["ranks"])
    assert (path / "report.html").exists()


def no_room(port: int, path: str) -> tuple[list[str], str, str]:
    """On rank 0 no file may grow beyond a few kilobytes: as on a full disk, without any privilege."""
    with group(port) as rank, Said() as said:
        expected = trained_plainly(rank)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine="native")
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
        try:
            steps(ddp, optimizer, rank, 120)
            dist.barrier()
            attachment.session.end()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return said.about("run directory"), expected, digest(ddp)


def trained_plainly(rank: int) -> str:
    ddp, _, optimizer = small_attachment(monitor=False, engine="native")
    steps(ddp, optimizer, rank, 120)
    return digest(ddp)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, second = on_ranks(2, no_room, free_port(), str(path), limit_s=LIMIT_S)
    assert len(first[0]) == 1
    assert "training goes on" in first[0][0]
    assert second[0] == []
    assert first[1] == first[2]
    assert 0 < (path / "steps.jsonl").stat().st_size <= 12_000
    assert 0 < len(per_rank(path)[0]) < 120
    assert finish_run(path, render_report)["steps"] > 0
