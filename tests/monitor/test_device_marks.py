"""Steps timed by marks on a pretended device: told late, in order, or not at all; never waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import pytest

from ringside.monitor.device_marks import MOST_LAPS, DeviceEvents
from ringside.monitor.run.records import StepRecord
from ringside.monitor.step_clock import KEPT, LOOKS, StepClock, SyncTimes, Told, UnreachedSteps

from .device import FakeDevice

HOST_SECONDS = 0.125  # what the host takes to queue anything


class World:
    """A host that queues steps, and a device that does them later."""

    def __init__(self) -> None:
        self.device, self.time = FakeDevice(), 0.0
        self.errors: list[Exception] = []
        self.marks = DeviceEvents(self.device, self.errors.append)
        self.waiting = UnreachedSteps()
        self.clock = StepClock(
            2, lambda draft: self.waiting.add(draft, True), now=lambda: self.time, cpu=lambda: 0.0, wall=lambda: 0.0
        )
        self.clock.time_by(self.marks)
        self.buckets: list[int] = []

    def queues(self, seconds: float) -> None:
        self.time += HOST_SECONDS
        self.device.work(seconds)

    def take(self) -> Told:
        buckets, self.buckets = self.buckets, []
        return lambda: SyncTimes(payload_bytes=sum(buckets))

    def step(self, exposed: float = 0.5, forwards: int = 1) -> None:
        self.queues(0.25)
        for _ in range(forwards):
            self.clock.forward_begins(8)
            self.queues(2.0)
            self.clock.forward_ends()
        self.queues(3.0)
        self.clock.backward_ends()
        self.queues(exposed)
        self.buckets.append(100)
        self.clock.sync_ends(self.take)
        self.clock.optimizer_begins()
        self.queues(1.0)
        self.clock.optimizer_ends()

    def told(self) -> list[StepRecord]:
        self.clock.flush()
        return [draft.record() for draft, _ in self.waiting.drain()]


def test_phases_are_the_devices() -> None:
    world = World()
    world.step()
    world.step(exposed=4.0)
    world.device.catch_up()
    first, second = world.told()
    assert (first.step, second.step) == (0, 1)
    assert (first.data_seconds, first.forward_seconds, first.backward_seconds) == (0.25, 2.0, 3.0)
    assert (first.exposed_seconds, first.optimizer_seconds, first.step_seconds) == (0.5, 1.0, 6.75)
    assert first.own_seconds == 6.25
    assert first.payload_bytes == 100
    assert (second.exposed_seconds, second.step_seconds, second.own_seconds) == (4.0, 10.25, 6.25)
    assert world.errors == []


def test_a_step_is_told_when_its_last_mark_is_reached_and_not_before() -> None:
    world = World()
    world.step()
    assert world.told() == []
    world.device.done = 6.5  # in the optimizer update
    assert world.told() == []
    world.step()
    assert world.told() == []
    world.device.done = 6.75
    (first,) = world.told()
    assert first.step_seconds == 6.75
    world.device.catch_up()
    assert [record.step for record in world.told()] == [1]
    assert world.told() == []


def test_what_is_not_reached_is_asked_for_once_per_look() -> None:
    world = World()
    world.step()
    world.clock.flush()
    asked = world.device.asked
    assert world.waiting.drain() == []
    assert world.device.asked == asked + 1


def test_several_forward_passes_and_blocks_inside_them() -> None:
    world = World()
    world.step(forwards=3)
    world.queues(0.25)
    world.clock.forward_begins(8)
    world.queues(0.5)
    world.clock.blocks()
    world.queues(0.75)
    world.clock.blocked(0.0)  # the host was not
    world.queues(1.0)
    world.clock.forward_ends()
    world.clock.backward_ends()
    world.clock.sync_ends(world.take)
    world.clock.optimizer_begins()
    world.clock.optimizer_ends()
    world.device.catch_up()
    first, second = world.told()
    assert first.forward_seconds == 6.0
    assert (second.forward_seconds, second.exposed_seconds, second.step_seconds) == (1.5, 0.75, 2.5)


def test_a_mark_that_is_never_reached_leaves_out_its_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    for number in range(5):
        if number in (1, 3):
            world.device.never.add(world.device.queued + 0.25)  # where its forward pass begins
        world.step()
    world.device.catch_up()
    with caplog.at_level(logging.WARNING, logger="ringside"):
        assert [record.step for record in world.told()] == [0, 2, 4]
        world.device.never.clear()  # too late
        world.step()
        world.device.catch_up()
        assert [record.step for record in world.told()] == [5]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["2 steps are not recorded"]
    assert world.errors == []


def test_marks_reached_out_of_order_are_all_waited_for() -> None:
    world = World()
    world.step()
    inner = 0.25 + 2.0
    world.device.never.add(inner)
    world.device.catch_up()
    assert world.told() == []
    world.device.never.clear()
    assert [record.step_seconds for record in world.told()] == [6.75]


def test_a_device_that_goes_on_while_it_is_asked_overtakes_nothing() -> None:
    world = World()
    for _ in range(4):
        world.step()
    reached = world.device.reached

    def reached_later(mark: float) -> bool:
        answer = reached(mark)
        world.device.catch_up()
        return answer

    world.device.reached = reached_later  # type: ignore[method-assign]
    found = [*world.told(), *world.told()]
    assert [record.step for record in found] == [0, 1, 2, 3]


def test_nothing_is_marked_while_a_graph_is_captured() -> None:
    world = World()
    world.step()
    world.device.captured = True
    world.step()
    world.device.captured = False
    world.step()  # nothing says when it began
    world.step()
    world.device.catch_up()
    assert [record.step for record in world.told()] == [0, 3]
    assert world.errors == []


def test_a_step_that_was_captured_in_part_is_left_out() -> None:
    world = World()
    world.queues(0.25)
    world.clock.forward_begins(8)
    world.device.captured = True
    world.clock.forward_ends()
    world.device.captured = False
    world.clock.backward_ends()
    world.clock.sync_ends(world.take)
    world.clock.optimizer_begins()
    world.clock.optimizer_ends()
    world.step()
    world.device.catch_up()
    assert [record.step for record in world.told()] == [1]


def breaks_setting(world: World) -> None:
    world.device.broken = True
    world.step()
    world.device.broken = False


def breaks_asking(world: World) -> None:
    world.step()
    world.clock.flush()
    world.device.broken = True
    assert world.waiting.drain() == []
    world.device.broken = False


@pytest.mark.parametrize("breaks", [breaks_setting, breaks_asking])
def test_a_marker_that_raises_is_dropped_and_never_asked_again(breaks: Callable[[World], None]) -> None:
    world = World()
    breaks(world)
    (error,) = world.errors
    assert "the device is lost" in str(error)
    asked, marked = world.device.asked, world.device.set
    for _ in range(3):
        world.step()
    world.device.catch_up()
    assert world.told() == []
    assert (world.device.asked, world.device.set) == (asked, marked)
    assert len(world.errors) == 1


def test_an_error_between_two_marks_of_a_step_drops_the_step() -> None:
    world = World()
    world.step()
    world.device.catch_up()

    def times(since: float, marks: Collection[float | None]) -> list[float]:
        raise RuntimeError("an event was lost")

    world.device.times = times  # type: ignore[method-assign]
    assert world.told() == []
    assert len(world.errors) == 1


def test_the_last_steps_are_given_a_moment() -> None:
    world = World()
    world.step()
    world.step()
    world.clock.flush()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            world.device.catch_up()

    assert [draft.record().step for draft, _ in world.waiting.drain_last(pause)] == [0, 1]
    assert len(pauses) == 3


def test_what_is_not_reached_at_the_end_is_left_out() -> None:
    world = World()
    world.step()
    world.device.catch_up()
    world.step()
    world.clock.flush()
    pauses: list[float] = []
    assert [draft.record().step for draft, _ in world.waiting.drain_last(pauses.append)] == [0]
    assert len(pauses) == LOOKS
    world.device.catch_up()
    assert world.waiting.drain() == []


def test_steps_that_wait_are_bounded() -> None:
    world = World()
    for _ in range(KEPT + 10):
        world.step()
    world.device.catch_up()
    steps = [record.step for record in world.told()]
    assert steps == list(range(10, KEPT + 10))


def test_a_step_with_a_long_validation_in_it_is_left_out() -> None:
    world = World()
    for _ in range(MOST_LAPS):
        world.clock.forward_begins(0)
        world.clock.forward_ends()
    marked = world.device.set
    assert marked <= MOST_LAPS + 2
    world.step()
    world.step()
    world.device.catch_up()
    assert [record.step for record in world.told()] == [1]


def test_whether_a_step_is_part_of_the_run_is_kept_beside_it() -> None:
    world = World()
    for recorded in (True, False, True):
        world.clock.emit = lambda draft, recorded=recorded: world.waiting.add(draft, recorded)
        world.step()
        world.clock.flush()
    world.device.catch_up()
    assert [recorded for _, recorded in world.waiting.drain()] == [True, False, True]
