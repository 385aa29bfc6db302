"""The step clock on virtual clocks: what belongs to which phase, and that the phases of a step add up to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ringside.monitor.step_clock import Draft, SyncTimes, Told

from .turned_clock import World


def test_a_plain_step() -> None:
    world = World()
    world.step()
    world.step()
    first, second = world.finished()
    assert (first.step, second.step, first.rank) == (0, 1, 3)
    assert first.data_seconds == 0.25
    assert first.forward_seconds == 2.0
    assert first.backward_seconds == 3.0
    assert first.exposed_seconds == 0.5
    assert first.optimizer_seconds == 1.0
    assert first.step_seconds == 6.75
    assert first.own_seconds == 6.25
    assert (first.wait_seconds, first.sync_seconds, first.wire_seconds) == (0.4, 0.7, 0.2)
    assert (first.payload_bytes, first.collectives, first.samples) == (1000, 2, 8)
    assert first.cpu_seconds == 13.5
    assert first.ended_unix == 1e9 + 106.75
    assert second.step_seconds == 6.75


def test_accumulation_is_one_step() -> None:
    world = World()
    for _ in range(2):  # inside no_sync
        world.forward()
        world.passes(3.0)
    world.forward()
    world.backward()
    world.optimizer()
    (record,) = world.finished()
    assert record.forward_seconds == 6.0
    assert record.backward_seconds == 9.0
    assert record.samples == 24
    assert record.collectives == 2


def test_two_backward_passes_that_synchronise_add_up() -> None:
    world = World()
    world.step()
    for _ in range(2):
        world.forward()
        world.backward()
    world.optimizer()
    record = world.finished()[1]
    assert (record.exposed_seconds, record.wait_seconds, record.sync_seconds) == (1.0, 0.8, 1.4)


def test_two_optimizers_of_one_backward_close_one_step() -> None:
    world = World()
    for _ in range(2):
        world.forward()
        world.backward()
        world.optimizer(1.0)
        world.optimizer(0.5)
    first, second = world.finished()
    assert first.optimizer_seconds == 1.0
    assert second.optimizer_seconds == 1.5  # the first step had ended before its second optimizer


def test_two_models_in_turn_are_two_steps() -> None:
    world = World()
    for _ in range(2):
        world.step()
        world.step()
    assert [record.step for record in world.finished()] == [0, 1, 2, 3]


def test_optimizer_without_synchronisation_closes_nothing() -> None:
    world = World()
    world.forward()
    world.passes(1.0)
    world.optimizer()
    assert world.finished() == []


def test_always_synced_counts_every_update() -> None:
    world = World(always_synced=True)
    world.forward()
    world.passes(1.0)
    world.optimizer()
    (record,) = world.finished()
    assert record.own_seconds == record.step_seconds == 4.0


def test_script_without_torch_optim_ends_steps_at_the_next_forward() -> None:
    world = World()
    for _ in range(3):
        world.passes(0.25)
        world.forward()
        world.backward()
    world.clock.forward_begins()
    records = world.finished()
    assert [record.step for record in records] == [0, 1, 2]
    assert {record.step_seconds for record in records} == {5.75}


def test_loss_logged_after_the_step_belongs_to_it() -> None:
    world = World()
    world.step()
    world.clock.log(loss=1.5, samples=99)
    world.step()
    world.clock.log(loss=1.25)
    first, second = world.finished()
    assert (first.loss, first.samples) == (1.5, 99)
    assert (second.loss, second.samples) == (1.25, 8)


def test_loss_logged_before_backward_belongs_to_the_step_under_way() -> None:
    world = World()
    world.step()
    world.forward()
    world.clock.log(loss=2.0)
    world.backward()
    world.optimizer()
    first, second = world.finished()
    assert first.loss is None
    assert second.loss == 2.0


def test_nothing_is_emitted_before_it_is_complete() -> None:
    world = World()
    world.step()
    assert world.records == []
    world.clock.forward_begins()
    assert len(world.records) == 1


def test_wait_that_is_not_known_stays_unknown() -> None:
    world = World()
    world.forward()
    world.backward(times=SyncTimes(wait_seconds=math.nan))
    world.optimizer()
    (record,) = world.finished()
    assert math.isnan(record.wait_seconds)
    assert record.exposed_seconds == 0.5


def test_wait_is_never_longer_than_what_was_exposed() -> None:
    world = World()
    world.forward()
    world.backward(exposed=0.1, times=SyncTimes(wait_seconds=5.0))
    world.optimizer()
    assert world.finished()[0].wait_seconds == pytest.approx(0.1)


def test_blocked_inside_forward_is_not_own_time() -> None:
    world = World()
    world.clock.forward_begins(8)
    world.passes(0.75)  # buffers are broadcast
    world.clock.blocked(0.75)
    world.passes(2.0)
    world.clock.forward_ends()
    world.backward()
    world.optimizer()
    (record,) = world.finished()
    assert record.forward_seconds == 2.0
    assert record.exposed_seconds == 1.25


def test_want_of_a_cpu_counts_in_own_work_and_not_while_the_rank_is_blocked() -> None:
    world = World()
    world.step()
    world.clock.forward_begins(8)
    world.passes(1.0, run_delay=0.5)
    world.clock.blocks()
    world.passes(1.0, run_delay=0.75)
    world.clock.blocked(1.0)
    world.passes(1.0)
    world.clock.forward_ends()
    world.passes(2.0, run_delay=0.25)
    world.clock.backward_ends()
    world.passes(0.5, run_delay=0.4)
    world.clock.sync_ends(lambda: SyncTimes)
    world.passes(0.5, run_delay=0.125)
    world.optimizer()
    world.step()
    assert [record.run_delay_seconds for record in world.finished()] == [0.0, 0.875, 0.0]


def test_where_another_thread_goes_on_it_is_not_known_and_never_more_than_the_time_that_passed() -> None:
    world = World()
    world.step()
    world.run_delay = float("nan")
    world.step()
    world.run_delay = 70.0
    world.step()
    world.run_delay += 50.0
    world.step()
    assert [record.run_delay_seconds for record in world.finished()] == [0.0, None, None, 0.25]


def test_restart_forgets_what_was_open() -> None:
    world = World()
    world.step()
    world.clock.flush()
    world.passes(1000.0)
    world.clock.restart()
    world.clock.step = 7
    world.step()
    first, second = world.finished()
    assert (first.step, second.step) == (0, 7)
    assert second.step_seconds == 6.75


def slow_listener(world: World) -> Callable[[Draft], None]:
    def listen(draft: Draft) -> None:
        world.records.append(draft.record())
        world.passes(0.125)

    return listen


def test_the_instruments_own_time_is_overhead_and_stays_in_the_step() -> None:
    world = World()
    world.clock.emit = slow_listener(world)

    def take() -> Told:
        world.passes(0.0625)
        return SyncTimes

    world.step()
    world.forward()
    world.passes(3.0)
    world.clock.backward_ends()
    world.clock.sync_ends(take)
    world.optimizer()
    second = world.finished()[1]
    assert second.overhead_seconds == 0.125 + 0.0625
    assert second.forward_seconds == 2.125
    assert second.optimizer_seconds == 1.0625


@pytest.mark.parametrize(("ago", "exposed"), [(0.0, 0.5), (0.125, 0.375), (0.5, 0.0), (7.0, 0.0)])
def test_what_is_done_after_a_synchronisation_is_no_part_of_it(ago: float, exposed: float) -> None:
    """The gradients were there before anybody came to say so: from then on it is the optimizer's time."""
    world = World()
    world.step()
    world.forward()
    world.passes(3.0)
    world.clock.backward_ends()
    world.passes(0.5)
    world.clock.sync_ends(lambda: SyncTimes, ago)
    world.optimizer()
    second = world.finished()[1]
    assert (second.backward_seconds, second.exposed_seconds) == (3.0, exposed)
    assert second.optimizer_seconds == 1.0 + 0.5 - exposed
    assert second.overhead_seconds == 0.0
