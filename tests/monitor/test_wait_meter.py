"""What a rank issues in its groups, and how long it is blocked: adding up, and waits that nobody saw."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.support.waiting import Clock

from ringside.monitor.device_marks import DeviceEvents
from ringside.monitor.run.records import Group, GroupUse
from ringside.monitor.step_clock import Draft, StepClock
from ringside.monitor.wait_meter import FEWEST, GroupSums, Issued, WaitMeter, WatchedGroup

from .device import FakeDevice


class Rank:
    """A rank with a meter, one group of two ranks, and its waits."""

    def __init__(self, rank: int = 0) -> None:
        self.clock, self.waits = Clock(), list[float]()
        self.meter = WaitMeter(rank, self._waited, self.clock)
        self.meter.add(WatchedGroup("1", "mesh_dp", lambda: [0, 1]))

    def _waited(self, began: float, ended: float) -> None:
        self.waits.append(ended - began)

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
        return self.meter.end_step()()


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


def test_a_wait_that_is_seen_in_between_counts_once() -> None:
    """What the others issue late holds up both: the collective that nobody waits for and the one that is seen."""
    rank, noise = Rank(), np.random.default_rng(3)
    for seconds in LATE:
        gathered = rank.issue(peer=1)
        overlapped = rank.issue()
        gathered.timed(rank.sleep, float(seconds))
        overlapped.ended()
        rank.sleep(0.01 * float(np.exp(noise.normal(0, 0.02))))
        sums = rank.step()
    assert (sums.unseen_seconds, sums.unclear_seconds) == (0.0, 0.0)
    assert sum(use.blocked_seconds for use in sums.uses) == pytest.approx(LATE[-1])


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


# ------------------------------------------------------------------------------------------------ on a device


class DeviceRank(Rank):
    """A rank that trains on a device: time is what is queued there."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.errors = FakeDevice(), list[Exception]()
        self.meter.use_device(DeviceEvents(self.device, self.errors.append))

    def sleep(self, seconds: float) -> None:
        self.device.work(seconds)

    def beside(self, ends: float) -> Issued:
        """Issue a collective on a queue of its own, as FSDP2 does, which is over at some time of the device's."""
        issued = self.issue()
        issued.is_inline, self.device.is_here, self.device.beside = True, False, ends
        issued.timed(lambda: None)
        self.device.is_here = True
        return issued

    def step(self) -> GroupSums:
        taken = self.meter.end_step()
        self.device.catch_up()
        return taken()


def test_a_wait_on_a_device_is_read_when_it_is_over() -> None:
    rank = DeviceRank()
    rank.sleep(1.0)
    inline = rank.issue()
    inline.is_inline = True
    rank.sleep(0.25)  # the collective itself is queued where it is issued
    inline.timed(lambda: None)
    early = rank.issue()
    rank.sleep(1.0)
    early.timed(rank.sleep, 0.5)
    assert rank.waits == [0.25, 0.5]
    (use,) = rank.step().uses
    assert (use.count, use.blocked_seconds) == (2, 0.75)
    assert rank.device.settled == 1
    assert rank.errors == []


def test_where_every_wait_is_seen_a_device_gets_two_marks_for_each() -> None:
    rank = DeviceRank()
    for _ in range(3):
        set_before = rank.device.set
        for _ in range(10):
            rank.collective(0.5)
        assert rank.step().uses[0].blocked_seconds == 5.0
    assert rank.device.set - set_before == 2 * 10 + 1, "and one at the end of the step"


def test_no_marks_are_set_while_a_graph_is_captured() -> None:
    rank = DeviceRank()
    rank.device.captured = True
    for _ in range(3):
        rank.collective(0.5)
    rank.beside(1.0)
    sums = rank.step()
    assert (sums.uses[0].count, sums.uses[0].blocked_seconds) == (4, 0.0)
    assert (sums.unseen_seconds, rank.waits, rank.errors) == (0.0, [], [])


def test_what_a_device_is_not_done_with_is_waited_for() -> None:
    rank = DeviceRank()
    rank.sleep(1.0)
    rank.collective(0.5)
    rank.beside(4.0)
    rank.sleep(1.0)
    assert rank.meter.awaited() == ("1", 1, [0, 1])
    rank.device.catch_up()
    assert rank.meter.awaited() == ("1", 2, [0, 1]), "the one beside training ends later"
    rank.device.done = 4.0
    assert rank.meter.awaited() is None
    late = rank.issue()
    rank.meter.unfinished.append(late)
    assert rank.meter.awaited() == ("1", 3, [0, 1])
    late.ended()
    assert rank.meter.awaited() is None


def test_collectives_of_host_tensors_are_only_counted_where_training_is_on_a_device() -> None:
    rank = DeviceRank()
    rank.meter.issue_on_host("1")
    assert rank.meter.counts == {"1": 1}
    assert rank.step() == GroupSums()


@pytest.mark.parametrize("late", [0.0, 0.006])
def test_training_waits_for_what_was_issued_before_the_last(late: float) -> None:
    """FSDP2's backward pass: the next layer's all-gather is issued before the gradients of this one are reduced."""
    rank, noise = DeviceRank(), np.random.default_rng(2)
    found, true = [], []
    for _ in range(60):
        start, blocked = rank.device.queued, 0.0
        for _ in range(4):
            gathered = rank.device.queued + max(late + noise.normal(0, 0.001), 0.0) + 0.011
            rank.beside(gathered)
            rank.sleep(0.01 * float(np.exp(noise.normal(0, 0.02))))  # this layer's backward pass
            rank.beside(rank.device.queued + 0.001)
            waits = max(gathered - rank.device.queued, 0.0)
            rank.sleep(waits)
            blocked += waits
            rank.sleep(0.002)
        found.append(rank.step())
        true.append(blocked)
        assert rank.device.queued > start
    low = [one.unseen_seconds for one in found[30:]]
    high = [one.unseen_seconds + one.unclear_seconds for one in found[30:]]
    for least, most, blocked in zip(low, high, true[30:], strict=True):
        assert least <= blocked + 1e-4
        assert most >= blocked - 1e-4
    assert sum(low) >= 0.8 * sum(true[30:])


def test_waits_on_a_device_are_part_of_the_phase_they_lie_in() -> None:
    device, drafts = FakeDevice(), list[Draft]()
    clock = StepClock(0, drafts.append, now=lambda: 0.0, cpu=lambda: 1.0, wall=lambda: 0.0)
    events = DeviceEvents(device, pytest.fail)
    clock.time_by(events)
    for phase in (clock.forward_begins, clock.forward_ends):
        device.work(1.0)
        began = events.mark()
        device.work(0.5)
        clock.waited(began, events.mark())
        device.work(2.0)
        phase()
    device.work(4.0)
    clock.step_ends()
    clock.flush()
    device.catch_up()
    assert drafts[0].settled()
    record = drafts[0].record()
    assert (record.data_seconds, record.forward_seconds, record.compute_seconds) == (3.0, 3.0, 4.0)
    assert (record.exposed_seconds, record.own_seconds, record.step_seconds) == (1.0, 10.0, 11.0)
    assert np.isnan(record.cpu_seconds), "a host that waits for its device is not descheduled"
