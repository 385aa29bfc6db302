"""Jobs that hang, on real ranks: one verdict on the right rank, while the job hangs; and none where it does not."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from bench.monitor.parallel_jobs import share_the_gpu  # noqa: E402
from tests.support.ranks import Team, hear, place, say  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.ddp.attached_model import backward_of  # noqa: E402
from ringside.pytorch.hang_watch import watch  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402
from ringside.pytorch.recording.session import RecordingSettings  # noqa: E402

from .training import compares_models_first, free_port, group, small_attachment, steps  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
]

ENGINES = ["ringside", "native"]
SHORT_S = 1.5
PAUSES_S = 1.0
PATIENCE_S = 30.0


# ------------------------------------------------------------------------------------------------ on the ranks


def job(port: int, path: str, engine: str, limit_s: float, culprit: int, case: str) -> int:
    """Train, meet, let one rank do something else while the others train on, and train on together."""
    with group(port) as rank:
        sessions.begin(path, engine, RecordingSettings(hang_s=limit_s))
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine=engine)
        steps(ddp, optimizer, rank, 6)
        await_meeting(attachment.session.watch)
        dist.barrier()
        say("ready")
        if rank == culprit and case == "gil":
            keeps_the_gil(f"{path}.gate")
        elif rank == culprit:
            CASES[case]()
        steps(ddp, optimizer, rank, 6)
        dist.barrier()
        attachment.session.end()
        return int(attachment.session.clock.step)


def await_meeting(watch: Any) -> None:
    until(watch.met.is_set, "what the ranks' watchers know of each other")
    if watch.mail is not None:
        until(lambda: all(seen.entered >= 0 for seen in watch.mail.others(time.monotonic())), "news of other hosts")


def waits_for_a_word() -> None:
    hear()


def loops() -> None:
    goes_on = threading.Event()
    threading.Thread(target=lambda: (hear(), goes_on.set()), daemon=True).start()
    while not goes_on.is_set():
        sum(range(1000))


def takes_a_lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (hear(), lock.release()), daemon=True).start()
    lock.acquire(timeout=PATIENCE_S)


def keeps_the_gil(gate: str) -> None:
    """Read from a pipe until the test, which has the stacks then, writes to it; a read goes on after their signal."""
    ctypes.PyDLL(None).read(os.open(gate, os.O_RDWR), ctypes.create_string_buffer(1), 1)


def calls_another_collective() -> None:
    dist.barrier()


CASES: dict[str, Callable[[], None]] = {
    "stopped": waits_for_a_word,
    "never": loops,
    "deadlock": takes_a_lock_twice,
    "different": calls_another_collective,
    "dead": waits_for_a_word,
}


# ------------------------------------------------------------------------------------------------ on the test's side


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (path / "events.jsonl").read_text().splitlines() if (path / "events.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def await_event(path: Path, kind: str) -> None:
    """Return once there is an event of a kind."""
    deadline = time.monotonic() + PATIENCE_S
    while not events(path, kind):
        assert time.monotonic() < deadline, f"no {kind} in {events(path, 'verdict', 'repaired', 'stacks')}"
        time.sleep(0.02)  # a file that grows gives no event to wait for


def begin(team: Team, path: Path, engine: str, case: str, *, culprit: int = 1, limit_s: float = SHORT_S) -> None:
    team.start(job, free_port(), str(path), engine, limit_s, culprit, case)
    team.await_word("ready")


def only_verdict(path: Path) -> dict[str, Any]:
    verdicts = [event["verdict"] for event in events(path, "verdict")]
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def check(verdict: dict[str, Any], kind: str, why: str, culprit: int = 1) -> None:
    evidence = verdict["evidence"]
    assert (verdict["kind"], evidence["why"], verdict["ranks"]) == (kind, why, [culprit]), verdict
    assert str(culprit) in evidence["missing"]
    assert str(1 - culprit) in evidence["arrived"]
    assert evidence["collective"] > 6  # the one after six steps; where only watched, each backward counts as one
    assert evidence["op"] == "all_reduce"
    assert evidence["size_bytes"] > 0
    assert verdict["advice"]


@pytest.mark.parametrize(("engine", "culprit"), [("ringside", 0), ("ringside", 1), ("native", 1)])
def test_a_stopped_rank_is_named_while_it_stands(tmp_path: Path, engine: str, culprit: int) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        begin(team, path, engine, "stopped", culprit=culprit)
        team.kill(culprit, signal.SIGSTOP)
        await_event(path, "verdict")
        await_event(path, "stacks")
        team.kill(culprit, signal.SIGCONT)
        team.tell(culprit, "go on")
        assert [outcome.value for outcome in team.finish()] == [12, 12]
    verdict = only_verdict(path)
    check(verdict, "hang", "stopped", culprit)
    assert verdict["evidence"]["process_state"] == "T"
    stacks = sorted(file.name for file in (path / "stacks").iterdir())
    assert stacks == [f"hang-1-rank-{1 - culprit}.txt"], "a stopped rank cannot give its stacks, the other can"
    assert "test_watch.py" in (path / "stacks" / stacks[0]).read_text()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("case", "why", "line"), [("never", "busy", "in loops"), ("deadlock", "asleep", "in takes_a")])
def test_rank_that_does_not_come(tmp_path: Path, engine: str, case: str, why: str, line: str) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        begin(team, path, engine, case)
        await_event(path, "verdict")
        await_event(path, "stacks")
        team.tell(1, "go on")
        outcomes = team.finish()
    assert [outcome.value for outcome in outcomes] == [12, 12], outcomes
    verdict = only_verdict(path)
    check(verdict, "hang", why)
    assert line in verdict["evidence"]["where"]
    assert line.split()[1] in (path / "stacks" / "hang-1-rank-1.txt").read_text()
    assert (path / "stacks" / "hang-1-rank-0.txt").exists()
    summary = json.loads((path / "summary.json").read_text())
    assert [told["kind"] for told in summary["verdicts"]] == ["hang"]


@pytest.mark.noisy
def test_rank_whose_python_does_not_run_gives_its_stacks(tmp_path: Path) -> None:
    path, gate = tmp_path / "run", tmp_path / "run.gate"
    os.mkfifo(gate)
    with Team(2) as team:
        begin(team, path, "ringside", "gil", limit_s=2.5)
        await_event(path, "stacks")
        gate.write_bytes(b".")
        assert [outcome.value for outcome in team.finish()] == [12, 12]
    check(only_verdict(path), "hang", "no_answer")
    assert "in keeps_the_gil" in (path / "stacks" / "hang-1-rank-1.txt").read_text()
    assert len(events(path, "repaired")) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_call_different_collectives(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        begin(team, path, engine, "different")
        await_event(path, "verdict")
        await_event(path, "stacks")
        team.kill(1)
        assert team.finish()[0].error
    verdict = only_verdict(path)
    check(verdict, "mismatch", "different")
    assert verdict["evidence"]["called"] == "barrier"
    assert sorted(file.name for file in (path / "stacks").iterdir()) == ["hang-1-rank-0.txt", "hang-1-rank-1.txt"]


@pytest.mark.parametrize(("engine", "culprit"), [pytest.param("ringside", 0, marks=pytest.mark.core), ("native", 1)])
def test_dead_rank(tmp_path: Path, engine: str, culprit: int) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        begin(team, path, engine, "dead", culprit=culprit)
        team.kill(culprit)
        assert team.finish()[1 - culprit].error
    verdict = only_verdict(path)
    assert (verdict["kind"], verdict["ranks"]) == ("dead_rank", [culprit])
    assert verdict["evidence"]["why"] == "dead"
    assert verdict["evidence"].get("signal", "SIGKILL") == "SIGKILL"  # seen only before the parent reaps it
    assert verdict["since_step"] == 6


def different_models(port: int, path: str) -> None:
    with group(port) as rank:
        ddp = DistributedDataParallel(nn.Linear(64, 8 + 8 * rank), init_sync=False)
        session = ringside.attach(ddp, run_dir=path).session
        await_meeting(session.watch)
        dist.barrier()
        ddp(torch.randn(4, 64)).square().mean().backward()


@compares_models_first
def test_what_the_engine_found_out_is_a_verdict(tmp_path: Path) -> None:
    with Team(2) as team:
        team.start(different_models, free_port(), str(tmp_path / "run"))
        assert [outcome.error for outcome in team.finish()] == ["MismatchError"] * 2
    verdict = only_verdict(tmp_path / "run")
    assert verdict["kind"] == "mismatch"
    assert "rank 0 called" in verdict["cause"]
    assert verdict["ranks"] == [0, 1]  # of two neither is the odd one out


def pauses(port: int, path: str, engine: str) -> list[str]:
    """Train with a slow first step, a pause of one rank that is short, and one of all ranks that is long."""
    with group(port) as rank:
        sessions.begin(path, engine, RecordingSettings(hang_s=PAUSES_S))
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine=engine)
        await_meeting(attachment.session.watch)
        dist.barrier()
        stall(2 * PAUSES_S if rank == 1 else 0)  # it compiles
        steps(ddp, optimizer, rank, 6)
        stall(PAUSES_S / 3 if rank == 0 else 0)
        steps(ddp, optimizer, rank, 3)
        stall(2 * PAUSES_S)  # all validate
        steps(ddp, optimizer, rank, 3)
        stall(2 * PAUSES_S if rank == 0 else 0)  # rank 0 writes a checkpoint, the others wait in their own barrier
        dist.barrier()
        attachment.session.end()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringside-watch")]


def job_on_two_hosts(*arguments: Any) -> int:
    """The same where no rank sees another's process: only the store is between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "host_key", lambda: f"host of process {os.getpid()}")
        return job(*arguments)


@pytest.mark.parametrize(
    ("case", "culprit", "why", "stacks"), [("deadlock", 1, "asleep", [0, 1]), ("stopped", 0, "unheard", [1])]
)
def test_between_hosts(tmp_path: Path, case: str, culprit: int, why: str, stacks: list[int]) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        team.start(job_on_two_hosts, free_port(), str(path), "native", SHORT_S, culprit, case)
        team.await_word("ready")
        if case == "stopped":  # and with rank 0 the job's store, which lives in it
            team.kill(culprit, signal.SIGSTOP)
        await_event(path, "verdict")
        await_event(path, "stacks")
        if case == "stopped":
            team.kill(culprit, signal.SIGCONT)
        team.tell(culprit, "go on")
        assert [outcome.value for outcome in team.finish()] == [12, 12]
    verdict = only_verdict(path)
    check(verdict, "hang", why, culprit)
    assert events(path, "stacks")[0]["ranks"] == stacks
    assert ("the job's store has not answered" in verdict["cause"]) == (case == "stopped")


def stall(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.noisy
@pytest.mark.parametrize("engine", ENGINES)
def test_pauses_are_no_hang(tmp_path: Path, engine: str) -> None:
    with Team(2) as team:
        assert team.run(pauses, free_port(), str(tmp_path / "run"), engine) == [[], []]
    assert events(tmp_path / "run", "verdict", "repaired", "stacks") == []


class Device:
    """Stands in for a GPU: it has come to marks that are true, and to all others once it is told to."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def reached(self, marks: Sequence[bool]) -> bool:
        return all(marks) or self.done.is_set()


def device_job(port: int, path: str) -> int:
    """A step as on a GPU: gradients are handed over, the host goes on, and stands where it needs a result."""
    with group(port) as rank:
        sessions.begin(path, "native", RecordingSettings(hang_s=SHORT_S))
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine="native")
        steps(ddp, optimizer, rank, 6)
        await_meeting(attachment.session.watch)
        backward: Any = backward_of(ddp)
        device, done = Device(), threading.Event()
        attachment.session.watch.pending = backward.is_pending  # as attach() does for models on a GPU
        dist.barrier()
        say("ready")
        if rank == 1:
            hear()
            done.set()
        else:
            threading.Thread(target=lambda: (hear(), done.set()), daemon=True).start()
        backward.board.entered(1000)
        backward.marks, backward.sync_marks = device, (True, False)  # it is in the synchronisation
        synchronises(done)
        device.done.set()
        backward.marks = None
        steps(ddp, optimizer, rank, 5)
        dist.barrier()
        attachment.session.end()
        return int(attachment.session.clock.step)


def synchronises(done: threading.Event) -> None:
    assert done.wait(PATIENCE_S)


def test_a_device_that_nobody_waits_for_on_the_host(tmp_path: Path) -> None:
    """NCCL itself needs GPUs; this is the way that the watch goes for it, with marks that are not reached."""
    path = tmp_path / "run"
    with Team(2) as team:
        team.start(device_job, free_port(), str(path))
        team.await_word("ready")
        await_event(path, "verdict")
        await_event(path, "stacks")
        for rank in (0, 1):
            team.tell(rank, "go on")
        assert [outcome.value for outcome in team.finish()] == [11, 11]
    check(only_verdict(path), "hang", "asleep")
    assert "synchronises" in (path / "stacks" / "hang-1-rank-0.txt").read_text()
    assert len(events(path, "repaired")) == 1


def gpu_job(port: int, path: str) -> int:
    """Train over NCCL on one GPU; rank 1 stops where it should call the next step, rank 0 in its synchronisation."""
    share_the_gpu(place().rank)
    with group(port) as rank:
        sessions.begin(path, "native", RecordingSettings(hang_s=SHORT_S))
        carrying = dist.new_group(backend="nccl")
        ddp = DistributedDataParallel(nn.Linear(64, 64).cuda(), process_group=carrying)
        attachment = ringside.attach(ddp, run_dir=path)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

        def step() -> None:
            ddp(torch.ones(4, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()

        for _ in range(6):
            step()
        await_meeting(attachment.session.watch)
        dist.barrier()
        say("ready")
        if rank == 1:
            waits_for_a_word()
        for _ in range(6):
            step()
        dist.barrier()
        attachment.session.end()
        dist.destroy_process_group(carrying)
        return int(attachment.session.clock.step)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_missing_rank_of_a_job_on_a_gpu_is_named_with_stacks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Team(2) as team:
        team.start(gpu_job, free_port(), str(path))
        team.await_word("ready")
        await_event(path, "verdict")
        await_event(path, "stacks")
        team.tell(1, "go on")
        assert [outcome.value for outcome in team.finish()] == [12, 12]
    check(only_verdict(path), "hang", "asleep")
    assert "in waits_for_a_word" in (path / "stacks" / "hang-1-rank-1.txt").read_text()
    assert "synchronize" in (path / "stacks" / "hang-1-rank-0.txt").read_text()


def turned_off(port: int, variable: str) -> bool:
    os.environ[variable] = "off"
    try:
        with group(port):
            _, attachment, _ = small_attachment(run_dir="/dev/null/run")
            dist.barrier()
            return attachment.session is None or attachment.session.watch is None
    finally:
        del os.environ[variable]


@pytest.mark.parametrize("variable", ["RINGSIDE", "RINGSIDE_WATCH"])
def test_off_is_off(variable: str) -> None:
    with Team(2) as team:
        assert team.run(turned_off, free_port(), variable) == [True, True]
