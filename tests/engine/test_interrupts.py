"""Ctrl-C while the main thread waits where Python does not hear of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from ringside.engine.runtime.interrupts import interruptible

BOUND_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def listener() -> None:
    """A process has one thread that listens, as long as it lives."""
    with interruptible(int):
        pass


class Wait:
    """What Ctrl-C is to end."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.times = 0

    def abort(self) -> None:
        self.times += 1
        self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.wait(BOUND_S)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(BOUND_S)


def presses_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def outer_ends_first(outer: interruptible, inner: interruptible) -> tuple[Callable[[], None], Callable[[], None]]:
    return outer.__exit__, inner.__exit__


def inner_ends_first(outer: interruptible, inner: interruptible) -> tuple[Callable[[], None], Callable[[], None]]:
    return inner.__exit__, outer.__exit__


@pytest.mark.parametrize("order", [outer_ends_first, inner_ends_first])
def test_one_wait_inside_another_ends_with_it(order: Callable[..., tuple[Callable[[], None], ...]]) -> None:
    before = signal.set_wakeup_fd(-1)
    waits = Wait(), Wait()
    outer, inner = (interruptible(wait.abort) for wait in waits)
    outer.__enter__()
    inner.__enter__()
    presses_ctrl_c()
    assert all(wait.is_over for wait in waits)
    first, second = order(outer, inner)
    first()
    second()
    assert [wait.times for wait in waits] == [1, 1]
    assert signal.set_wakeup_fd(before) == -1, "as it was"


def test_after_a_wait_ctrl_c_is_the_programs_own() -> None:
    wait = Wait()
    once = interruptible(wait.abort)
    for _ in range(3):
        with once:
            pass
    heard = Wait()
    with interruptible(heard.abort):
        presses_ctrl_c()
        assert heard.is_over, "whoever listens tells all that wait"
    assert not wait.times


def test_a_wait_that_another_thread_ends_leaves_the_next_one_sound() -> None:
    """Only the main thread may say where signals are written to; the next wait must not write them to itself."""
    before = signal.set_wakeup_fd(-1)
    first, second = Wait(), Wait()
    one = interruptible(first.abort)
    one.__enter__()
    thread = threading.Thread(target=one.__exit__)
    thread.start()
    thread.join()
    with interruptible(second.abort):
        presses_ctrl_c()
        assert second.is_over
    assert (first.times, second.times) == (0, 1)
    assert signal.set_wakeup_fd(before) == -1
