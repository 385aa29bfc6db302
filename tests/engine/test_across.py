"""When collectives between hosts go wrong: who hears of it, what they are told, and that nobody waits for ever.

Real processes that pretend to be on several hosts; at the end of the file real ones, in a lab.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.pytorch.groups import communicator, meeting_point
from tests.support import zygote
from tests.support.ranks import PYTHON, Outcome, Team, hear, outcomes_of, place, run_script, say

import ringside
from ringside.errors import ClosedError, PeerLostError, SyncError
from ringside.lab import Lab

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = pytest.mark.native

HOSTS = [0, 0, 1, 1]
FAR_S = 600.0  # a deadline that no test lives to see: what is heard, is heard of the death


def all_named(outcomes: Sequence[Outcome], error: str, culprit: int, but: Sequence[int] = ()) -> None:
    """Check that every rank (but some) raised that error, and that it names the culprit and its host."""
    host = f"#{HOSTS[culprit]}"
    for rank, outcome in enumerate(outcomes):
        if rank not in but:
            story = f"rank {rank}: {outcome.error} {outcome.ranks}: {outcome.message}\n{outcome.trace}"
            assert outcome.error == error, story
            assert outcome.ranks == (culprit,), story
            assert f"rank {culprit} on host " in outcome.message, story
            assert host in outcome.message.split(f"rank {culprit} on host ")[1], story


# ------------------------------------------------------------------------------------------------ kill -9


def until_it_fails(path: str, form: str, count: int) -> None:
    with communicator(path, HOSTS, timeout=FAR_S) as comm:
        x = torch.zeros(count)
        comm.all_reduce(x, algorithm=form)
        say("ready")
        while True:
            comm.all_reduce(x, algorithm=form)


@pytest.mark.parametrize("count", [100_000, 8_000_000])
@pytest.mark.parametrize("form", ["ring", "hosts/ring", "leaders/tree*4", "native", "hosts/native"])
def test_a_rank_is_killed_in_the_middle(form: str, count: int) -> None:
    """Of the larger ones a message is most likely half way, of which Gloo would tell nobody."""
    victim = 3 if form.startswith("leaders") else 1
    with meeting_point() as path, Team(4) as team:
        team.start(until_it_fails, path, form, count)
        team.await_word()
        team.kill(victim)
        outcomes = team.finish()
    assert outcomes[victim].exit_status == -signal.SIGKILL
    all_named(outcomes, "PeerLostError", victim, but=[victim])


def other_until_it_fails(path: str, what: str, count: int) -> None:
    with communicator(path, HOSTS, timeout=FAR_S) as comm:
        x = np.zeros(4 * count, np.float32)
        call = getattr(comm, what)
        call(x)
        say("ready")
        while True:
            call(x)
            if what != "all_gather":
                comm.barrier()  # or who only gives would be far ahead


@pytest.mark.parametrize("count", [10, pytest.param(200_000, marks=pytest.mark.core)])
@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_a_rank_is_killed_in_another_collective(what: str, count: int) -> None:
    with meeting_point() as path, Team(4) as team:
        team.start(other_until_it_fails, path, what, count)
        team.await_word()
        team.kill(3)
        outcomes = team.finish()
    all_named(outcomes, "PeerLostError", 3, but=[3])


def one_after_the_kill(path: str, form: str) -> None:
    with communicator(path, HOSTS, timeout=FAR_S) as comm:
        x = torch.ones(1000)
        comm.all_reduce(x, algorithm=form)
        say("ready")
        hear()
        comm.all_reduce(x, algorithm=form)


@pytest.mark.parametrize("form", ["ring", "hosts/ring"])
def test_a_rank_is_killed_between_collectives(form: str) -> None:
    with meeting_point() as path, Team(4) as team:
        team.start(one_after_the_kill, path, form)
        team.await_word()
        team.kill(2)
        team.processes[2].join(10)
        for rank in (0, 1, 3):
            team.tell(rank, "go on")
        outcomes = team.finish()
    all_named(outcomes, "PeerLostError", 2, but=[2])


def survivors_go_on(path: str) -> tuple[float, list[str]]:
    """After a death the user's own group makes a new one among the survivors."""
    said = []
    with communicator(path, HOSTS) as comm:
        say("ready")
        try:
            while True:
                comm.all_reduce(torch.ones(50_000), algorithm="hosts/ring")
        except PeerLostError as error:
            said.append(type(error).__name__)
        for again in (comm.all_reduce, comm.all_gather):
            try:
                again(torch.ones(3))
            except SyncError as error:
                said.append(type(error).__name__)
        comm.close()
        comm.close()
        try:
            comm.all_reduce(torch.ones(3))
        except ClosedError as error:
            said.append(type(error).__name__)
        group = dist.new_group([0, 1, 2], use_local_synchronization=True)
        x = torch.full((10,), float(comm.rank))
        dist.all_reduce(x, group=group)
        with ringside.communicator(group, timeout=20, algorithm="ring", machine=f"host {comm.rank}") as smaller:
            smaller.all_reduce(x)
        return float(x[0]), said


def test_survivors_can_go_on_in_a_smaller_group() -> None:
    with meeting_point() as path, Team(4) as team:
        team.start(survivors_go_on, path)
        team.await_word()
        team.kill(3)
        outcomes = team.finish()
    for rank in (0, 1, 2):
        assert outcomes[rank].ok, outcomes[rank].trace
        assert outcomes[rank].value == (9.0, ["PeerLostError", "PeerLostError", "PeerLostError", "ClosedError"])


# ------------------------------------------------------------------------------------------------ Ctrl-C


def waiting_for_rank_2(path: str, form: str) -> None:
    with communicator(path, HOSTS, timeout=FAR_S) as comm:
        comm.all_reduce(torch.ones(10), algorithm=form)
        say("ready")
        if comm.rank == 2:
            hear()
        comm.all_reduce(torch.ones(1000), algorithm=form)


@pytest.mark.parametrize("form", ["ring", "hosts/ring", "native"])
def test_ctrl_c_on_one_rank(form: str) -> None:
    """It ends the wait of that rank at once, and the others hear that it gave up, though they wait for rank 2."""
    outcomes = while_all_wait_for_rank_2(form, signal.SIGINT)
    assert outcomes[0].error == "KeyboardInterrupt", outcomes[0].trace
    all_named(outcomes, "PeerLostError", 0, but=[0])
    # Gloo's own all-reduce ends when its connections close, which may be before the word has arrived.
    assert "gave up" in outcomes[1].message or (form == "native" and "cannot be reached" in outcomes[1].message)


class LosesCtrlC:
    """An object whose destructor runs until Ctrl-C comes: Python prints what is raised there, and drops it."""

    def __del__(self) -> None:
        for _ in range(2000):
            time.sleep(0.01)


def waiting_in_a_destructor(path: str, form: str) -> None:
    real, to_lose = dist.Work.wait, [LosesCtrlC()]

    def wait(work: Any, *args: Any) -> Any:
        if place().rank == 0 and to_lose:
            say("ready")
            to_lose.pop()
        return real(work, *args)

    with communicator(path, HOSTS, timeout=FAR_S) as comm, pytest.MonkeyPatch.context() as patch:
        comm.all_reduce(torch.ones(10), algorithm=form)
        patch.setattr(dist.Work, "wait", wait)
        if comm.rank != 0:
            say("ready")
        if comm.rank == 2:
            hear()
        comm.all_reduce(torch.ones(1000), algorithm=form)


def test_ctrl_c_that_python_drops_is_raised_all_the_same() -> None:
    outcomes = while_all_wait_for_rank_2("native", signal.SIGINT, waiting_in_a_destructor)
    assert outcomes[0].error == "KeyboardInterrupt", outcomes[0].trace
    all_named(outcomes, "PeerLostError", 0, but=[0])


def test_a_death_is_heard_by_those_who_wait_for_somebody_else() -> None:
    outcomes = while_all_wait_for_rank_2("ring", signal.SIGKILL)
    all_named(outcomes, "PeerLostError", 0, but=[0])


def while_all_wait_for_rank_2(
    form: str, number: int, function: Callable[[str, str], None] = waiting_for_rank_2
) -> list[Outcome]:
    """Send rank 0 a signal; return what became of all, those in the collective before rank 2 comes."""
    with meeting_point() as path, Team(4) as team:
        team.start(function, path, form)
        team.await_word()
        team.kill(0, number)
        found = {rank: team.finish_one(rank) for rank in (0, 1, 3)}
        team.tell(2, "go on")
        found[2] = team.finish_one(2)
    return [found[rank] for rank in range(4)]


# ------------------------------------------------------------------------------------------------ mismatch


def something_else(path: str, form: str, what: str) -> None:
    with communicator(path, HOSTS) as comm:
        comm.all_reduce(torch.ones(10), algorithm=form)
        if comm.rank != 2:
            comm.all_reduce(torch.ones(100), algorithm=form)
        elif what == "collective":
            comm.broadcast(torch.ones(100), 0)
        elif what == "algorithm":
            comm.all_reduce(torch.ones(100), algorithm="one_shot")
        else:
            count = {"elements": 101, "nothing": 0}.get(what, 100)
            dtype = torch.float64 if what == "dtype" else torch.float32
            comm.all_reduce(torch.ones(count, dtype=dtype), "max" if what == "op" else "sum", algorithm=form)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("ring", "elements"),
        ("ring", "nothing"),
        ("ring", "op"),
        ("ring", "algorithm"),
        ("hosts/ring", "elements"),
        ("hosts/ring", "dtype"),
        ("hosts/ring", "algorithm"),
        ("hosts/ring", "collective"),
    ],
)
def test_a_rank_that_calls_something_else(form: str, what: str) -> None:
    with meeting_point() as path:
        outcomes = outcomes_of(4, something_else, path, form, what)
    all_named(outcomes, "MismatchError", 2)
    theirs = {
        "elements": "101 elements",
        "nothing": "0 elements",
        "dtype": "float64",
        "op": "max",
        "algorithm": "one_shot",
        "collective": "broadcast",
    }[what]
    called = "called all_reduce(sum, float32, {} elements) by " + form
    told = [f"ranks 0, 1 and 3 {called.format(100)}"]
    if form.startswith("hosts/"):  # found inside a host, before the other one may have left the collective before
        told.append(f"ranks 0 and 1 {called.format(10)}; rank 2 called ")
    for outcome in outcomes:
        assert any(text in outcome.message for text in told), outcome.message
        assert theirs in outcome.message.split("rank 2 called ")[1], outcome.message


# ------------------------------------------------------------------------------------------------ deadlines


def without(path: str, form: str, absent: int, behind: int = -1) -> None:
    with communicator(path, HOSTS, timeout=1.5) as comm:
        comm.all_reduce(torch.ones(10), algorithm=form)
        say("ready")
        if comm.rank == absent:
            hear()
        if comm.rank == behind:
            time.sleep(0.5)
        comm.all_reduce(torch.ones(5000), algorithm=form)


@pytest.mark.parametrize(
    ("form", "absent", "behind"),
    [
        ("ring", 0, 2),
        ("tree*4", 3, -1),
        ("hosts/ring", 1, -1),
        ("leaders/tree", 3, -1),
        ("leaders/tree", 3, 2),
        ("native", 0, -1),
        ("hosts/native", 3, 2),
    ],
)
def test_a_rank_that_never_comes_is_named(form: str, absent: int, behind: int) -> None:
    """And not its neighbours, which wait themselves: the one behind still does when the others' patience is over."""
    with meeting_point() as path, Team(4) as team:
        team.start(without, path, form, absent, behind)
        team.await_word()
        found = {rank: team.finish_one(rank) for rank in range(4) if rank != absent}
        team.tell(absent, "go on")
        found[absent] = team.finish_one(absent)
    all_named([found[rank] for rank in range(4)], "DeadlineError", absent)


# ------------------------------------------------------------------------------------------------ at the start


def with_settings(path: str, name: str, value: str) -> None:
    before = os.environ.get(name)
    if place().rank == 2:
        os.environ[name] = value
    try:
        with communicator(path, HOSTS, algorithm=None):
            pass
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RINGSIDE_ALGORITHM", "hosts/tree"),
        ("RINGSIDE_WIRE_DTYPE", "bfloat16"),
        ("RINGSIDE_REPRODUCIBLE", "1"),
    ],
)
def test_different_settings_are_refused(name: str, value: str) -> None:
    with meeting_point() as path:
        outcomes = outcomes_of(4, with_settings, path, name, value)
    for outcome in outcomes:
        assert outcome.error == "MismatchError", outcome.trace
        assert outcome.ranks == (2,)
        assert "rank 2 on host " in outcome.message
        assert name.removeprefix("RINGSIDE") in outcome.message


# ------------------------------------------------------------------------------------------------ leaks, order, exit


def many_small_ones(path: str, count: int) -> list[int]:
    """Mixed algorithms and sizes, synchronous and not; returns checksums."""
    rng = np.random.default_rng(5)
    forms = ("ring", "tree*2", "one_shot", "direct", "hosts/ring", "hosts/one_shot", "leaders/two_tree", "native")
    sums, works = [], []
    with communicator(path, HOSTS) as comm:
        for k in range(count):
            size, form = int(rng.integers(0, 3000)), forms[int(rng.integers(len(forms)))]
            x = torch.arange(size, dtype=torch.float64) + comm.rank + k
            later = bool(rng.integers(2))
            work = comm.all_reduce(x, algorithm=form, async_op=later)
            if later:
                works.append((k, work))
            elif size:
                assert (x == 4 * (torch.arange(size) + k) + 6).all(), f"{k}: {form} of {size}"
                sums.append(int(x.sum()))
        for k, work in works:
            x = work.result()
            assert (x == 4 * (torch.arange(len(x)) + k) + 6).all()
    return sums


def test_hundreds_of_small_ones() -> None:
    with meeting_point() as path:
        outcomes = outcomes_of(4, many_small_ones, path, 300)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)


def open_and_close(path: str, times: int) -> list[tuple[int, int]]:
    seen = []
    with communicator(path, HOSTS) as outer:
        for _ in range(times):
            with ringside.communicator(algorithm="ring", machine=f"host {HOSTS[outer.rank]}", timeout=20) as comm:
                comm.all_reduce(torch.ones(10), async_op=True, algorithm="hosts/native").wait()
                comm.all_reduce(torch.ones(3_000_000), algorithm="hosts/ring")
            del comm
            outer.barrier()
            seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return seen


def test_nothing_grows() -> None:
    with meeting_point() as path:
        for outcome in outcomes_of(4, open_and_close, path, 5):
            assert outcome.ok, outcome.trace
            fds, tasks = zip(*outcome.value, strict=True)
            assert max(fds[2:]) <= max(fds[:2]), f"descriptors after each: {fds}"
            assert max(tasks[2:]) <= max(tasks[:2]), f"threads after each: {tasks}"


@pytest.mark.parametrize("end", ["at once", "waited", "without its group", "forgotten"])
def test_a_script_that_does_not_close_ends_well(end: str, tmp_path: Path) -> None:
    """All are started as a user starts them: how an interpreter ends is what is tested."""
    script = SCRIPTS / "ends_without_close.py"
    for rank, ended in enumerate(run_script(2, script, tmp_path / "store", end, python=PYTHON)):
        assert (ended.status, ended.out) == (0, "end\n"), f"rank {rank}: {ended}"
        assert "terminate" not in ended.err


@pytest.mark.parametrize(("number", "told"), [("SIGKILL", "(1,)"), ("SIGSTOP", "(0,)")])
def test_a_script_whose_native_all_reduce_broke_off_ends_soon(number: str, told: str, tmp_path: Path) -> None:
    """A thread of Gloo's may still wait for the rest of a message, until its time is over: nobody waits for that."""
    # It is given 60 of the 300 seconds.
    script, python = SCRIPTS / "native_breaks_off.py", [zygote.python()]
    ended = run_script(3, script, tmp_path / "store", number, python=python)
    assert ended[1].status == -signal.SIGKILL
    first = told if number == "SIGKILL" else "interrupted"
    assert (ended[0].status, ended[0].out) == (0, f"{first}\n"), ended[0]
    assert (ended[2].status, ended[2].out) == (0, f"{told}\n"), ended[2]


# ------------------------------------------------------------------------------------------------ a host vanishes


@pytest.mark.parametrize(
    ("form", "count"), [("hosts/tree", 20_000), ("native", 20_000), ("hosts/ring", 4_000_000), ("native", 4_000_000)]
)
def test_a_host_that_vanishes(form: str, count: int) -> None:
    """Its cable is pulled: nobody closes a connection, and all that is left is silence, and messages half way."""
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab(hosts=3, ranks_per_host=[2, 1, 1], rate="1gbit") as lab:
        ready: list[int] = []

        def sink(place: Any, _stream: str, line: str) -> None:
            if "ready" in line:
                ready.append(place.rank)
                if len(ready) == 4:
                    lab.cut(host=2)

        command = [zygote.python(), str(SCRIPTS / "vanishes.py"), form, str(count)]
        result = lab.run(command, timeout_s=150, sink=sink)
    for rank in result.ranks[:3]:
        assert rank.stdout.endswith("]\n"), (rank.stdout, rank.stderr)
        kind, ranks, message = json.loads(rank.stdout.splitlines()[-1])
        assert (kind, ranks) == ("PeerLostError", [3]), message
        assert "rank 3 on host " in message
