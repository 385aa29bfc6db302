"""What is made of the plugin's records: calls, who is late and why."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bench.monitor.nccl_rings import RECORDS, WrittenRing
from tests.native.nccl import play, play_ranks

from ringside import _core
from ringside.monitor.nccl import causes as causes_module
from ringside.monitor.nccl.calls import CALL, GIVEN_UP_NS, MOST_CALLS, SETTLED_NS, UNTOLD_NS, WAIT, WAITS, Calls, Joined
from ringside.monitor.nccl.causes import LATE_RANK, LEAST_CALLS, NOT_KNOWN, SLOW_GPU, SLOW_LINK, Blame, Causes
from ringside.monitor.nccl.report import NcclReport, blame_line, report_lines
from ringside.monitor.nccl.ring import (
    CALLED,
    CHANGED,
    COLLECTIVE,
    KERNEL,
    PREFIX,
    PROXY,
    RECORD,
    SENDS,
    STARTED,
    STEP,
    STOPPED,
    RecordedCommunicator,
)
from ringside.monitor.nccl.watch import NcclWatch, make_folder, plugin_of_user, remove_left
from ringside.processes import start_time

NS = 1_000_000_000
AHEAD = 5 * NS
"""What the GPUs' clocks are ahead here."""


def records(*rows: tuple[int, int, int, int, int, int]) -> np.ndarray:
    """Return records: sequence, kind, what, handle, seconds of the host in ms, GPU nanoseconds."""
    made = np.zeros(len(rows), RECORD)
    for at, (sequence, kind, what, handle, host_ms, gpu_ns) in enumerate(rows):
        made[at]["sequence"], made[at]["kind"], made[at]["what"] = sequence, kind, what
        made[at]["handle"], made[at]["host_ns"], made[at]["gpu_ns"] = handle, host_ms * 1_000_000, gpu_ns
        made[at]["func"], made[at]["flags"] = b"AllReduce", CALLED if kind == COLLECTIVE else 0
    return made


def handle(sequence: int, kind: int) -> int:
    return sequence << 3 | kind


def test_a_call_is_over_when_its_kernels_have_ended_and_nothing_more_comes() -> None:
    calls = Calls()
    first = records((1, COLLECTIVE, STARTED, 0, 0, 0), (2, KERNEL, STARTED, handle(1, COLLECTIVE), 2, 700))
    assert len(calls.add(first, SETTLED_NS + 10**7).calls) == 0
    last = records((3, KERNEL, STOPPED, handle(2, KERNEL), 3, 900))
    assert len(calls.add(last, 10**7).calls) == 0
    (call,) = calls.add(records(), SETTLED_NS + 10**7).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (700, 900)
    assert len(calls.add(records((4, KERNEL, STOPPED, handle(2, KERNEL), 3, 900)), 2 * GIVEN_UP_NS).calls) == 0


def test_what_comes_late_for_a_call_that_is_over_is_no_other_ones() -> None:
    """Of two calls the second is over; its records are gone from between those of the first."""
    calls = Calls()
    both = records(
        (1, COLLECTIVE, STARTED, 0, 0, 0),
        (2, KERNEL, STARTED, handle(1, COLLECTIVE), 1, 700),
        (3, COLLECTIVE, STARTED, 0, 1, 0),
        (4, KERNEL, STARTED, handle(3, COLLECTIVE), 1, 800),
        (5, KERNEL, STOPPED, handle(4, KERNEL), 2, 900),
    )
    both["communicator"][2:] = 1
    (call,) = calls.add(both, 2 * SETTLED_NS).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (800, 900)
    assert len(calls.add(records((6, KERNEL, STOPPED, handle(4, KERNEL), 2, 950)), 3 * SETTLED_NS).calls) == 0
    (call,) = calls.add(records((7, KERNEL, STOPPED, handle(2, KERNEL), 3, 990)), 4 * SETTLED_NS).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (700, 990)


def test_a_call_that_no_kernel_came_to_is_given_up() -> None:
    calls = Calls()
    calls.add(records((1, COLLECTIVE, STARTED, 0, 0, 0)), 10**7)
    assert len(calls.add(records(), GIVEN_UP_NS - 1).calls) == 0
    (call,) = calls.add(records(), GIVEN_UP_NS).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (0, 0)


def test_a_call_whose_kernel_waits_is_kept_with_what_was_called_after_it() -> None:
    """A rank that comes 70 s late is the very one to be named."""
    calls = Calls()
    first = records((1, COLLECTIVE, STARTED, 0, 0, 0), (2, KERNEL, STARTED, handle(1, COLLECTIVE), 2, 700))
    calls.add(np.concatenate([first, records((3, COLLECTIVE, STARTED, 0, 3, 0))]), 10**7)
    assert len(calls.add(records(), 2 * GIVEN_UP_NS).calls) == 0
    end = records((4, KERNEL, STOPPED, handle(2, KERNEL), 2 * GIVEN_UP_NS // 10**6, 900))
    (call,) = calls.add(end, 2 * GIVEN_UP_NS + SETTLED_NS).calls[:1]
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (700, 900)


def test_a_kernel_whose_stop_is_not_told_is_over_with_a_later_call() -> None:
    """Such calls were kept for ever, up to a thousand, and read again each time."""

    def whole(sequence: int, ms: int) -> np.ndarray:
        return records(
            (sequence, COLLECTIVE, STARTED, 0, ms, 0),
            (sequence + 1, KERNEL, STARTED, handle(sequence, COLLECTIVE), ms, ms * 10**6 + 800),
            (sequence + 2, KERNEL, STOPPED, handle(sequence + 1, KERNEL), ms, ms * 10**6 + 900),
        )

    calls = Calls()
    rows = [(1, COLLECTIVE, STARTED, 0, 0, 0), (2, KERNEL, STARTED, handle(1, COLLECTIVE), 1, 700)]
    assert len(calls.add(records(*rows), 2 * GIVEN_UP_NS).calls) == 0
    elsewhere = whole(3, 2)
    elsewhere["communicator"] = 1
    assert len(calls.add(elsewhere, UNTOLD_NS + 10**7).calls) == 1
    assert len(calls.add(whole(6, 3), UNTOLD_NS + 10**7).calls) == 1  # which may have been of the same kernel
    assert len(calls.add(whole(9, 6000), 6000 * 10**6).calls) == 0
    first, second = calls.add(records(), 6000 * 10**6 + SETTLED_NS).calls
    assert (first["arrived_gpu_ns"], first["ended_gpu_ns"]) == (700, 0)
    assert (second["arrived_gpu_ns"], second["ended_gpu_ns"]) == (6000 * 10**6 + 800, 6000 * 10**6 + 900)


def test_a_later_call_that_was_over_first_is_remembered() -> None:
    calls = Calls()
    rows = [(1, COLLECTIVE, STARTED, 0, 0, 0), (2, KERNEL, STARTED, handle(1, COLLECTIVE), 1, 700)]
    rows += [(3, COLLECTIVE, STARTED, 0, 1500, 0), (4, KERNEL, STARTED, handle(3, COLLECTIVE), 1500, 2 * 10**9)]
    rows += [(5, KERNEL, STOPPED, handle(4, KERNEL), 1500, 2 * 10**9 + 100)]
    assert len(calls.add(records(*rows), 2000 * 10**6).calls) == 1
    (untold,) = calls.add(records(), UNTOLD_NS + 10**7).calls
    assert (untold["arrived_gpu_ns"], untold["ended_gpu_ns"]) == (700, 0)


def test_of_too_many_calls_that_wait_the_oldest_are_given_up() -> None:
    calls = Calls()
    rows = [(1, COLLECTIVE, STARTED, 0, 0, 0), (2, KERNEL, STARTED, handle(1, COLLECTIVE), 2, 700)]
    rows += [(3 + at, COLLECTIVE, STARTED, 0, 3, 0) for at in range(MOST_CALLS)]
    (call,) = calls.add(records(*rows), 10**7).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (700, 0)


def test_a_call_that_lost_the_start_of_a_channel_has_no_end() -> None:
    """Its stay would be too short, and its rank named for that."""
    made = records(
        (1, COLLECTIVE, STARTED, 0, 0, 0),
        (2, KERNEL, STARTED, handle(1, COLLECTIVE), 2, 700),
        (3, KERNEL, STOPPED, handle(2, KERNEL), 3, 900),
    )
    made["channels"][0] = 2
    calls = Calls()
    assert len(calls.add(made, 2 * SETTLED_NS).calls) == 0
    (call,) = calls.add(records(), 2 * GIVEN_UP_NS).calls
    assert (call["arrived_gpu_ns"], call["ended_gpu_ns"]) == (700, 0)


def test_what_steps_wait_for_is_summed_and_the_network_also_as_one_time() -> None:
    """Three sends of two peers, all waiting for the network: 10 to 14 and 12 to 17 ms to peer 1, 12 to 13 to peer 2."""
    rows = [(1, COLLECTIVE, STARTED, 0, 0, 0), (2, PROXY, STARTED, handle(1, COLLECTIVE), 5, 0)]
    rows += [(3, PROXY, STARTED, handle(1, COLLECTIVE), 5, 0), (4, STEP, STARTED, handle(2, PROXY), 8, 0)]
    rows += [(5, STEP, STARTED, handle(2, PROXY), 8, 0), (6, STEP, STARTED, handle(3, PROXY), 8, 0)]
    rows += [(7, STEP, CHANGED, handle(4, STEP), 10, 0), (8, STEP, CHANGED, handle(5, STEP), 12, 0)]
    rows += [(9, STEP, CHANGED, handle(6, STEP), 12, 0), (10, STEP, STOPPED, handle(6, STEP), 13, 0)]
    rows += [(11, STEP, STOPPED, handle(4, STEP), 14, 0), (12, STEP, STOPPED, handle(5, STEP), 17, 0)]
    made = records(*rows)
    made["peer"][1], made["peer"][2], made["flags"][1:3] = 1, 2, SENDS
    made["state"][6:9], made["count"][6:9] = next(state for state, name in WAITS.items() if name == "send"), 100
    waits = Calls().add(made, 0, is_last=True).waits
    told = {int(row["peer"]): (row["steps"], row["size_bytes"], row["send"], row["network"]) for row in waits}
    assert told == {1: (2, 200, pytest.approx(0.009), pytest.approx(0.007)), 2: (1, 100, *[pytest.approx(0.001)] * 2)}


def test_a_step_that_names_no_operation_harms_nothing() -> None:
    """A ring that a process has damaged."""
    made = records((1, COLLECTIVE, STARTED, 0, 0, 0), (2, STEP, CHANGED, handle(1, COLLECTIVE), 1, 0))
    assert len(Calls().add(made, SETTLED_NS, is_last=True).calls) == 1


def made_calls(stays: Sequence[float] | np.ndarray, queued: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return calls of one rank, which all ranks leave every 100 ms.

    Args:
        stays: Seconds in each.
        queued: Seconds from each call of the API to the arrival.
    """
    made = np.zeros(len(stays), CALL)
    left = NS + (np.arange(len(stays)) * 0.1 * NS).astype(np.int64)
    at = left - (np.array(stays) * NS).astype(np.int64)
    made["func"], made["number"], made["is_called"] = b"AllReduce", np.arange(len(stays)), True
    made["enqueued_ns"] = at - (np.array(queued) * NS).astype(np.int64)
    made["arrived_gpu_ns"], made["ended_gpu_ns"] = at + AHEAD, left + AHEAD
    return made


def blamed(*ranks: np.ndarray, waits: Sequence[np.ndarray] = ()) -> list[Blame]:
    causes = Causes()
    for rank, calls in enumerate(ranks):
        made = waits[rank] if waits else np.zeros(0, WAIT)
        causes.add({0: RecordedCommunicator(9, len(ranks), rank, "dp")}.get, rank + 10, Joined(calls, made))
    return causes.blames()


N = 50
LONG, SHORT, NO = np.full(N, 0.030), np.full(N, 0.001), np.full(N, 1e-5)


def test_who_is_in_it_for_the_shortest_time_came_last_and_its_host_was_late() -> None:
    (blame,) = blamed(made_calls(LONG, NO), made_calls(SHORT, NO), made_calls(LONG, NO))
    assert (blame.cause, blame.rank) == (LATE_RANK, 11)
    assert blame.seconds == pytest.approx(N * 0.029)
    assert blame.host_seconds == pytest.approx(N * 0.029, rel=0.01)


def test_a_gpu_that_had_been_given_it_long_before_is_slow() -> None:
    (blame,) = blamed(made_calls(LONG, NO), made_calls(SHORT, NO + 0.029), made_calls(LONG, NO))
    assert (blame.cause, blame.rank) == (SLOW_GPU, 11)
    assert blame.gpu_seconds == pytest.approx(N * 0.029, rel=0.01)


def test_a_host_that_is_late_is_so_where_every_gpu_has_much_to_do() -> None:
    """Each rank's call waits 400 ms for its GPU; one host calls 29 ms after the others."""
    deep = np.full(N, 0.4)
    (blame,) = blamed(made_calls(LONG, deep), made_calls(SHORT, deep), made_calls(LONG, deep))
    assert (blame.cause, blame.rank) == (LATE_RANK, 11)
    assert blame.host_seconds == pytest.approx(N * 0.029, rel=0.01)


def test_repairing_one_rank_saves_no_more_than_the_second_last_allows() -> None:
    blames = blamed(made_calls(LONG, NO), made_calls(SHORT, NO), made_calls(SHORT + 0.0005, NO))
    assert blames == []


def test_whoever_is_late_because_another_rank_held_it_up_elsewhere_is_not_named() -> None:
    """Ranks 2 and 3 wait for each other before 0 and 2, and 1 and 3, do: 2 is as late as 3, which it has waited for."""
    causes = Causes()
    waits, in_time, queued = [0.021] * 60, [0.001] * 60, [0.0] * 60
    groups = [((0, 1), in_time), ((2, 3), waits), ((0, 2), waits), ((1, 3), waits)]
    for number, (ranks, of_first) in enumerate(groups):
        for rank, (name, stay) in enumerate(zip(ranks, (of_first, in_time), strict=True)):
            communicator = RecordedCommunicator(number, 2, rank, "")
            joined = Joined(made_calls(stay, queued), np.zeros(0, WAIT))
            causes.add(lambda _, found=communicator: found, name, joined)  # type: ignore[misc]
    causes.compare()
    assert [blame.rank for blame in causes.blames()] == [3, 3]


def test_what_version_4_does_not_tell_leaves_the_cause_open() -> None:
    ranks = [made_calls(LONG, NO), made_calls(SHORT, NO)]
    for calls in ranks:
        calls["is_called"] = False
    (blame,) = blamed(*ranks)
    assert (blame.cause, blame.host_seconds, blame.gpu_seconds) == (NOT_KNOWN, 0.0, 0.0)
    assert "not known" in blame_line(blame)


def test_how_many_calls_came_from_captured_graphs_is_said() -> None:
    causes = Causes()
    for rank, stays in enumerate((LONG, SHORT)):
        calls = made_calls(stays, NO)
        calls["is_captured"][:40], calls["is_called"][:40] = True, False
        causes.add({0: RecordedCommunicator(9, 2, rank, "dp")}.get, rank, Joined(calls, np.zeros(0, WAIT)))
    counts = {"processes": 2, "interface": 6, "records": 1, "dropped": 0, "torn": 0}
    late, captured = report_lines(NcclReport(**counts, blames=causes.blames(), communicators=causes.seen()))
    assert late.endswith("rank 1 (whether its host or its GPU is not known)")
    assert captured == "NCCL: 80 calls came from captured graphs, of which no call of a host is told"


def test_a_rank_seen_in_fewer_than_half_of_its_calls_blames_nobody() -> None:
    ranks = [made_calls(LONG, NO), made_calls(SHORT, NO)[::3]]
    assert blamed(*ranks) == []
    assert len(blamed(ranks[0], made_calls(SHORT, NO)[: N // 2 + 1])) == 1


def test_calls_without_times_count_as_not_seen() -> None:
    ranks = [made_calls(LONG, NO), made_calls(SHORT, NO)]
    ranks[1]["ended_gpu_ns"][::3] = ranks[1]["ended_gpu_ns"][1::3] = 0
    assert blamed(*ranks) == []
    ranks = [made_calls(LONG, NO), made_calls(SHORT, NO)]
    ranks[0]["arrived_gpu_ns"][5] = 0
    (blame,) = blamed(*ranks)
    assert blame.seconds == pytest.approx((N - 1) * 0.029)


def test_a_warm_up_or_a_few_calls_name_nobody() -> None:
    stays = np.full(1000, 0.001)
    late = stays.copy()
    late[0] = 20.0
    assert blamed(made_calls(late, np.full(1000, 1e-5)), made_calls(stays, np.full(1000, 1e-5))) == []
    few = LEAST_CALLS - 1
    assert blamed(made_calls(LONG[:few], NO[:few]), made_calls(SHORT[:few], NO[:few])) == []


def test_a_rank_that_is_late_in_very_many_calls_is_named() -> None:
    calls = 1001
    (blame,) = blamed(*(made_calls(np.full(calls, stay), np.full(calls, 1e-5)) for stay in (0.03, 0.001)))
    assert (blame.rank, blame.seconds) == (11, pytest.approx(calls * 0.029))


def test_of_too_many_communicators_those_that_were_called_long_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(causes_module, "MOST_KNOWN", 2)
    causes = Causes()
    for number in (3, 1, 2):
        calls = made_calls(SHORT, NO)
        calls["enqueued_ns"] += number
        causes.add({0: RecordedCommunicator(number, 2, 0, "dp")}.get, 0, Joined(calls, np.zeros(0, WAIT)))
    assert [seen.id[-1] for seen in causes.seen()] == ["2", "3"]


def test_collectives_that_ranks_leave_apart_are_not_compared() -> None:
    ranks = [made_calls(LONG, NO), made_calls(SHORT, NO)]
    for calls in ranks:
        calls["func"] = b"Broadcast"
    assert blamed(*ranks) == []


def made_waits(peer: int, send_s: float) -> np.ndarray:
    made = np.zeros(1, WAIT)
    made["peer"], made["sends"], made["steps"], made["size_bytes"] = peer, True, 200, 10**8
    made["send_gpu"], made["send_peer"], made["send"], made["network"] = 0.5, 0.1, 3 * send_s, send_s
    return made


def test_a_link_is_slow_beside_the_others_of_its_communicator() -> None:
    equal = [made_calls(LONG, NO)] * 4
    waits = [made_waits((rank + 1) % 4, 2.0 if rank == 2 else 0.5) for rank in range(4)]
    (blame,) = blamed(*equal, waits=waits)
    assert (blame.cause, blame.rank, blame.peer, blame.seconds) == (SLOW_LINK, 12, 13, pytest.approx(1.5))
    assert "from rank 12 to rank 13" in blame_line(blame)
    assert blamed(*equal[:2], waits=waits[:2]) == []  # of two links nobody can say which is slow


def test_a_link_to_another_host_is_judged_and_named_in_its_communicator() -> None:
    """Here are two of four ranks: no collective is compared, but what their proxies waited for is known."""
    causes = Causes()
    for rank in range(2):
        waits = np.concatenate([made_waits((rank + 1) % 4, 0.5), made_waits(3, 2.0 if rank else 0.5)])
        causes.add({0: RecordedCommunicator(9, 4, rank, "dp")}.get, rank + 10, Joined(made_calls(LONG, NO), waits))
    (blame,) = causes.blames()
    assert (blame.cause, blame.rank, blame.peer, blame.in_communicator) == (SLOW_LINK, 1, 3, True)
    assert "from rank 1 to rank 3 of communicator 0x0000000000000009" in blame_line(blame)


@pytest.mark.native
@pytest.mark.noisy
@pytest.mark.parametrize(("how", "cause"), [("host", LATE_RANK), ("gpu", SLOW_GPU)])
def test_the_rank_that_comes_last_is_named_with_its_cause(how: str, cause: str, tmp_path: Path) -> None:
    """Three processes play the ranks of a job; the plugin of each writes, and one watch reads."""
    play_ranks(_core.nccl_plugin(), tmp_path, 6, 120, how, ranks=range(4, 7))
    watch = NcclWatch(tmp_path)
    watch.poll(is_last=True)
    report = watch.report()
    late, link = report.blames
    if late.cause == SLOW_LINK:
        late, link = link, late
    assert (late.cause, late.rank) == (cause, 5)
    assert (link.cause, link.rank, link.peer) == (SLOW_LINK, 6, 4)
    assert (report.processes, report.interface, report.dropped, report.torn) == (3, 6, 0, 0)
    (seen,) = report.communicators
    assert (seen.calls, seen.ranks_seen, seen.seen_ratio) == (120, 3, 1.0)
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    assert len(report_lines(report)) == 2


@pytest.mark.native
def test_ranks_on_other_hosts_are_said_to_be_missing(tmp_path: Path) -> None:
    play(_core.nccl_plugin(), tmp_path, "work", 5, 5, 0, 3, "host")
    (tmp_path / f"{PREFIX}1-1").write_bytes(b"no ring")
    watch = NcclWatch(tmp_path)
    watch.poll()
    watch.poll(is_last=True)
    assert "1 of 3 ranks were seen here: not compared" in report_lines(watch.report())[-1]


def test_rings_that_went_round_are_read_as_they_were_written(tmp_path: Path) -> None:
    """What is not over at one reading is taken up at the next one, also where records lie in two parts of a ring."""
    rings = [WrittenRing(tmp_path, rank, 2, channels=24) for rank in range(2)]
    watch, turns, calls = NcclWatch(tmp_path), 9, 200
    for turn in range(turns):
        for call in range(calls):
            for rank, ring in enumerate(rings):
                ring.add(turn * calls + call, time.monotonic_ns(), 1_000_000 * rank)
        watch.poll()
    assert watch.records == turns * calls * 2 * 49 > 2 * 2 * RECORDS
    watch.poll(is_last=True)
    (seen,) = watch.report().communicators
    assert seen.calls == turns * calls
    assert seen.late_seconds == {1: pytest.approx(turns * calls * 0.001)}


def test_a_ring_of_another_version_is_refused_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"{PREFIX}1-1").write_bytes(b"RNGNCCL2" + b"\0" * 1_000_000)
    watch = NcclWatch(tmp_path)
    watch.poll()
    watch.poll(is_last=True)
    assert watch.report().processes == 0
    assert caplog.text.count("has version 2 of the layout") == 1


def test_why_nothing_was_recorded_is_told_by_nccls_log_where_there_is_one(tmp_path: Path) -> None:
    watch = NcclWatch(tmp_path)
    assert "older than 2.27" in watch.why_silent({})
    (tmp_path / "nccl.host.17").write_text("NCCL INFO Bootstrap\nNCCL INFO External profiler plugin x is unsupported\n")
    told = watch.why_silent({"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p")})
    assert told == "NCCL's log says NCCL INFO External profiler plugin x is unsupported"
    assert report_lines(watch.report()) == []


def test_a_plugin_that_nccls_files_name_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment comes first, then the user's file, then the system's; comments count for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    system, named = tmp_path / "nccl.conf", tmp_path / "named.conf"
    assert plugin_of_user({}, system) == ("", "")
    system.write_text("# NCCL_PROFILER_PLUGIN=no\nNCCL_DEBUG=INFO\n NCCL_PROFILER_PLUGIN = inspector \n")
    assert plugin_of_user({}, system) == ("inspector", str(system))
    (tmp_path / ".nccl.conf").write_text("NCCL_PROFILER_PLUGIN=mine")
    assert plugin_of_user({}, system) == ("mine", str(tmp_path / ".nccl.conf"))
    named.write_bytes(b"\xff\nNCCL_PROFILER_PLUGIN=\n")
    assert plugin_of_user({"NCCL_CONF_FILE": str(named)}, system) == ("inspector", str(system))
    assert plugin_of_user({"NCCL_PROFILER_PLUGIN": "set"}, system) == ("set", "the environment")


def test_folders_that_a_killed_run_has_left_are_removed(tmp_path: Path) -> None:
    held = make_folder(tmp_path)
    written, left, other = (tmp_path / f"{PREFIX}{name}" for name in (f"{os.getpid()}-1-a", f"{os.getpid()}-1-b", "e"))
    for folder in (written, left):
        folder.mkdir()
    (written / f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}").touch()
    (left / f"{PREFIX}{os.getpid()}-1").touch()
    other.symlink_to(held)
    remove_left(tmp_path)
    remove_left(tmp_path / "missing")
    assert set(tmp_path.iterdir()) == {held, written, other}
