"""What a rank issues in its groups, and how long it is blocked: adding up, and waits that nobody saw."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.support.waiting import Clock

from ringside.monitor.run.records import Group, GroupUse
from ringside.monitor.step_clock import GroupSums
from ringside.monitor.wait_meter import FEWEST, Issued, WaitMeter, WatchedGroup


class Rank:
    """A rank with a meter, one group of two ranks, and its waits."""

    def __init__(self, rank: int = 0) -> None:
        self.clock, self.waits = Clock(), list[float]()
        self.meter = WaitMeter(rank, self.waits.append, self.clock)
        self.meter.add(WatchedGroup("1", "mesh_dp", lambda: [0, 1]))

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def collective(self, seconds: float = 0.0, peer: int = -1, size_bytes: int = 8) -> Issued:
        issued = self.issue(peer, size_bytes)
        issued.timed(self.sleep, seconds)
        return issued

    def issue(self, peer: int = -1, size_bytes: int = 8) -> Issued:
        issued = self.meter.issue("1", peer, size_bytes)
        assert issued is not None
        return issued

    def step(self) -> GroupSums:
        return self.meter.take().work_out()


def test_a_step_is_added_up_by_group_and_peer() -> None:
    rank = Rank()
    rank.collective(0.5)
    rank.collective(0.25, size_bytes=16)
    rank.collective(0.125, peer=1)
    sums = rank.step()
    assert set(sums.uses) == {GroupUse("1", -1, 2, 24, 0.75), GroupUse("1", 1, 1, 8, 0.125)}
    assert (sums.unseen_seconds, sums.unclear_seconds) == (0.0, 0.0)
    assert rank.waits == [0.5, 0.25, 0.125]
    assert rank.step() == GroupSums(), "a step without anything"


def test_all_to_alls_are_added_up_apart() -> None:
    """Whatever the group: what each rank sends and receives in them is its own."""
    rank = Rank()
    rank.collective(size_bytes=1000)
    for size_bytes in (30, 50):
        rank.meter.issue("1", -1, size_bytes, is_routed=True)
    assert rank.step().routed_bytes == 80
    rank.collective(size_bytes=1000)
    assert rank.step().routed_bytes == 0


def test_what_somebody_else_times_does_not_count() -> None:
    rank = Rank()
    rank.meter.is_muted = True
    assert rank.meter.issue("1", -1, 8) is None
    assert not rank.meter.has_issued
    rank.meter.is_muted = False
    rank.collective()
    assert rank.meter.has_issued


def test_what_is_prefetched_is_waited_for_where_it_is_needed() -> None:
    rank = Rank()
    early = rank.issue()
    rank.sleep(5.0)
    early.timed(rank.sleep, 0.5)
    assert rank.waits == [0.5]


def test_a_wait_that_raises_is_one() -> None:
    rank = Rank()

    def fails() -> None:
        rank.sleep(1.0)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        rank.issue().timed(fails)
    assert rank.waits == [1.0]
    assert rank.meter.waiting is None


def test_another_threads_wait_does_not_hold_training_up() -> None:
    rank = Rank()
    thread = threading.Thread(target=rank.collective, args=(0.5,))
    thread.start()
    thread.join()
    (use,) = rank.step().uses
    assert (use.count, use.blocked_seconds) == (1, 0.0)
    assert rank.waits == []


def test_groups_are_told_once_by_their_first_rank_and_messages_by_everybody() -> None:
    for number, told in ((0, [False]), (1, [])):
        rank = Rank(number)
        rank.collective()
        groups = [Group(name="1", description="mesh_dp", ranks=(0, 1), has_messages=flag) for flag in told]
        assert list(rank.step().new_groups) == groups
        rank.collective()
        assert rank.step().new_groups == ()
        rank.collective(peer=1)
        (group,) = rank.step().new_groups
        assert group.has_messages
    rank.meter.add(WatchedGroup("1", "made again", lambda: [1, 0]))
    rank.collective()
    assert rank.step().new_groups == (Group(name="1", description="made again", ranks=(1, 0)),)


def test_what_the_training_thread_waits_for_is_shown_meanwhile() -> None:
    rank, shown = Rank(), []
    rank.collective()
    rank.issue().timed(lambda: shown.append(rank.meter.awaited()))
    rank.issue(1).timed(lambda: shown.append(rank.meter.awaited()))
    assert shown == [("1", 2, [0, 1]), ("1", 0, [1])]
    assert rank.meter.awaited() is None
    assert rank.meter.counts == {"1": 2}
    assert rank.meter.moves == 6


def unseen(*, waits: bool, late: np.ndarray, work: float = 0.01, jitter: float = 0.02) -> list[GroupSums]:
    """Steps of a rank that issues one collective, may wait for it in C++, works, and issues another that it waits for.

    Args:
        waits: Whether it waits for the first one.
        late: How long the other rank lets it wait, seconds, [steps].
        work: What it works after the first one.
        jitter: How much that varies.
    """
    rank, noise, found = Rank(), np.random.default_rng(0), []
    for seconds in late:
        issued = rank.issue()
        start = rank.clock.now
        rank.clock.now = start + seconds
        issued.ended()
        if not waits:
            rank.clock.now = start
        rank.sleep(work * float(np.exp(noise.normal(0, jitter))))
        rank.clock.now = max(rank.clock.now, issued.over) if waits else rank.clock.now
        rank.collective(0.001)
        found.append(rank.step())
    return found


LATE = np.abs(np.random.default_rng(1).normal(0.004, 0.001, 60))


def test_a_wait_in_cpp_is_inferred_from_what_follows_it() -> None:
    sums = unseen(waits=True, late=LATE)
    assert all(one.unseen_seconds == 0.0 and one.unclear_seconds > 0.001 for one in sums[: FEWEST - 1])
    assert [one.unseen_seconds for one in sums[30:]] == pytest.approx(LATE[30:].tolist())
    assert all(one.unclear_seconds == 0.0 for one in sums[30:])


def test_an_overlapped_collective_is_no_wait() -> None:
    for one in unseen(waits=False, late=LATE)[30:]:
        assert (one.unseen_seconds, one.unclear_seconds) == (0.0, 0.0)


def test_where_nothing_varies_it_is_unclear() -> None:
    """The others are always as late: whether the rank waits cannot be told from it."""
    for one in unseen(waits=True, late=np.full(40, 0.004), jitter=0.3)[30:]:
        assert one.unseen_seconds == 0.0
        assert one.unclear_seconds == pytest.approx(0.004)


def test_a_wait_that_is_seen_is_not_inferred_as_well() -> None:
    rank = Rank()
    for _ in range(40):
        issued = rank.collective(0.25)
        issued.ended()
        assert rank.step().unseen_seconds == 0.0


def test_a_program_that_changes_is_learnt_anew() -> None:
    """What was waited for in Python at the start (parameters that are sent around) says nothing of later steps."""
    rank = Rank()
    for _ in range(3):
        rank.collective(0.25)
    rank.step()
    assert len(rank.meter.seen) == 3
    for late in LATE:
        issued = rank.issue()
        rank.sleep(float(late))
        issued.ended()
        rank.sleep(0.01)
        sums = rank.step()
    assert sums.unseen_seconds == pytest.approx(LATE[-1])


def test_what_is_waited_for_a_step_later_is_seen() -> None:
    rank, before = Rank(), None
    for _ in range(40):
        issued = rank.issue()
        if before is not None:
            before.timed(rank.sleep, 0.5)
        before = issued
        sums = rank.step()
        rank.sleep(1.0)
    assert (sums.unseen_seconds, sums.unclear_seconds) == (0.0, 0.0)
    assert sums.uses[0].blocked_seconds == 0.5


def test_memory_is_bounded_in_a_program_that_changes() -> None:
    rank = Rank()
    for number in range(300):
        for _ in range(number):
            rank.issue(number).ended()
        rank.step()
    assert len(rank.meter.places) <= 4096 + 300
