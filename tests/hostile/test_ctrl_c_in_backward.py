"""Ctrl-C in backward on one rank: as with stock DDP over Gloo, all ranks end that backward, and all can train on.

The second one ends the wait for the others. After that, as after any other error of ours in backward, the next step
says what to do, and that helps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.groups import own_machines  # noqa: E402
from tests.pytorch.training import LIMIT_S, Plan, ddp_ranks, group, one_step, small_attachment, steps  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.engine.runtime import interrupts  # noqa: E402
from ringside.errors import RingsideError  # noqa: E402
from ringside.pytorch.ddp.attached_model import backward_of, own_hook  # noqa: E402

pytestmark = pytest.mark.native


def job_store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def pythons_own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class WhenSaid(logging.Handler):
    """Calls something when the rank says that it holds Ctrl-C back."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if "press it again" in record.getMessage():
            self._call()

    def __enter__(self) -> None:
        logging.getLogger("ringside").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ringside").removeHandler(self)


def place(between: bool) -> contextlib.AbstractContextManager[None]:
    return own_machines() if between else contextlib.nullcontext()


def waits_and(model: DistributedDataParallel, do: Any) -> None:
    """Have a thread do something once this rank has begun to wait in backward."""
    if own_hook(model) is None:  # only watched
        backward: Any = backward_of(model)
        waiting: Any = lambda: threading.Timer(0.3, do).start()  # noqa: E731
        backward.board = SimpleNamespace(entered=lambda *_: None, waiting=waiting, resumed=int, failed=str)
        return
    reducer: Any = own_hook(model).reducer
    before = reducer.defer_wait, reducer.wait

    def then(call: Any) -> Any:  # one of these is the last that is called before the wait
        reducer.defer_wait, reducer.wait = before
        threading.Timer(0.3, do).start()
        return call()

    reducer.defer_wait = lambda: then(before[0])
    reducer.wait = lambda: then(before[1])


# ------------------------------------------------------------------------------------------------ the first


def pressed(port: int, engine: str, between: bool, options: dict[str, bool]) -> list[Any]:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which comes when rank 0 has said that it goes on waiting."""
    with place(between), group(port) as rank, pytest.MonkeyPatch.context() as patch, pythons_own_handler():
        patch.setattr(interrupts, "SAID_S", 0.3)
        store = job_store()
        model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.01, **options
        )
        attachment = ringside.attach(model, monitor=False, engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps(model, optimizer, rank, 3)
        told = "ended"
        if rank == 0:
            waits_and(model, press)
        else:
            store.wait(["said"])
        # Where DDP waits, Python hears of nothing before the others come.
        is_heard = rank == 0 and not between and engine == "ringside"
        with WhenSaid(lambda: store.set("said", "1")) if is_heard else contextlib.nullcontext():
            if rank == 0 and not is_heard:
                threading.Timer(1.0, store.set, ("said", "1")).start()
            try:
                one_step(model, optimizer, Plan(), rank, 4)
            except KeyboardInterrupt:
                told = "interrupted"
        handler = signal.getsignal(signal.SIGINT)
        gradients = [p.grad.clone() for p in model.parameters()]
        steps(model, optimizer, rank, 2)
        attachment.detach()
        return [told, handler is signal.default_int_handler, [float(g.sum()) for g in gradients]]


@pytest.mark.parametrize(
    ("engine", "between", "options"),
    [
        ("ringside", False, {}),
        ("ringside", False, {"find_unused_parameters": True}),
        ("ringside", True, {}),
        ("native", False, {}),
    ],
    ids=["one host", "unused parameters", "between hosts", "only watched"],
)
def test_the_backward_is_ended_and_all_train_on(engine: str, between: bool, options: dict[str, bool]) -> None:
    first, second = ddp_ranks(2, pressed, engine, between, options)
    assert first[:2] == ["interrupted", True]
    assert second[:2] == ["ended", True]
    assert first[2] == second[2]


def pressed_while_it_computes(port: int, engine: str, detached: bool) -> list[Any]:
    """Press Ctrl-C on rank 0 in the middle of backward, where no Python runs until ours does."""
    with group(port) as rank, pythons_own_handler():
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4))), bucket_cap_mb=2)
        attachment = ringside.attach(model, monitor=False, engine=engine)
        batch = torch.ones(2000, 1000)
        for _ in range(2):
            model(batch).sum().backward()
        if detached:
            attachment.detach()
        output = model(batch)
        begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        presses = threading.Thread(target=lambda: begun.get() is None or press())
        told = "ended"
        if rank == 0:
            presses.start()
            output.register_hook(begun.put)  # no Python
        try:
            output.sum().backward()
        except KeyboardInterrupt:
            told = "interrupted"
        if rank == 0:
            presses.join()
        gradient = float(model.module[0].bias.grad.sum())
        model(batch).sum().backward()
        attachment.detach()
        return [told, gradient, float(model.module[0].bias.grad.sum())]


@pytest.mark.parametrize(
    ("engine", "detached"),
    [("ringside", False), ("native", False), ("ringside", True)],
    ids=["ours", "watched", "detached"],
)
def test_pressed_while_it_computes_it_waits_for_the_end_of_backward_too(engine: str, detached: bool) -> None:
    first, second = ddp_ranks(2, pressed_while_it_computes, engine, detached)
    assert (first[0], second[0]) == ("interrupted", "ended")
    assert first[1:] == second[1:]


def pressed_elsewhere(port: int) -> list[str]:
    """Press Ctrl-C between forward and backward: there it ends what is under way at once, as ever."""
    with group(port) as rank, pythons_own_handler():
        model, attachment, optimizer = small_attachment(monitor=False)
        steps(model, optimizer, rank, 2)
        output = model(torch.ones(4, 64))
        told = "nothing"
        try:
            press()
            threading.Event().wait(LIMIT_S)
        except KeyboardInterrupt:
            told = "interrupted"
        output.sum().backward()
        attachment.detach()
        return [told]


def test_pressed_outside_of_backward_it_is_raised_at_once() -> None:
    assert ddp_ranks(2, pressed_elsewhere) == [["interrupted"]] * 2


# ------------------------------------------------------------------------------------------------ after an error


def fails(port: int, how: str, between: bool, options: dict[str, Any], then: str) -> list[Any]:
    """Let a backward fail on both ranks, and do what the next step says."""
    with place(between), group(port) as rank, pytest.MonkeyPatch.context() as patch, pythons_own_handler():
        if how == "late":
            patch.setenv("RINGSIDE_TIMEOUT_S", "1")
        store = job_store()
        own = dist.new_group(timeout=dist.distributed_c10d.default_pg_timeout)  # none of its own
        model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.01, process_group=own, **options
        )
        attachment = ringside.attach(model, monitor=False, engine="ringside")
        patch.undo()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        first = 0 if how == "in the first backward" else 3
        steps(model, optimizer, rank, first)
        if rank == 1:
            store.wait(["given up"])
        elif how != "late":

            def press_twice() -> None:
                press()
                deadline = time.monotonic() + 1.0  # where DDP waits, nothing tells
                while not interrupts.ctrl_c.came and time.monotonic() < deadline:
                    time.sleep(0.01)
                press()

            waits_and(model, press_twice)
        told = ["", "", ""]
        try:
            one_step(model, optimizer, Plan(), rank, 4)
        except (KeyboardInterrupt, RingsideError) as error:
            told[0] = type(error).__name__
        if rank == 0:
            store.set("given up", "1")
        for step in (5, 6):
            try:
                one_step(model, optimizer, Plan(), rank, step)
            except RuntimeError as error:
                told[step - 4] = type(error).__name__ + (" helps" if "detach()" in str(error) else f": {error}")
        with torch.no_grad():
            model(torch.ones(4, 64))  # to look at it is always allowed
        if then == "attach":
            again = ringside.attach(model, monitor=False, engine="ringside")
            assert again is not attachment
            assert again.engine == "ringside"
        else:
            attachment.detach()
        steps(model, optimizer, rank, 3)
        return [told, [float(p.grad.sum()) for p in model.parameters()], [float(p.sum()) for p in model.parameters()]]


CASES = {
    "one host": ("pressed twice", False, {}),
    "views": ("pressed twice", False, {"gradient_as_bucket_view": True}),
    "unused parameters": ("pressed twice", False, {"find_unused_parameters": True}),
    "static graph": ("pressed twice", False, {"static_graph": True}),
    "a first static backward": ("in the first backward", False, {"static_graph": True}),
    "a first backward": ("in the first backward", False, {}),
    "between hosts": ("pressed twice", True, {}),
    "between hosts, unused parameters": ("pressed twice", True, {"find_unused_parameters": True}),
    "a deadline": ("late", False, {}),
    "a deadline between hosts": ("late", True, {}),
}


AGAIN = ("one host", "unused parameters", "a first static backward", "between hosts")


@pytest.mark.parametrize(
    ("case", "then"), [*((case, "detach") for case in CASES), *((case, "attach") for case in AGAIN)]
)
def test_after_an_error_in_backward_the_next_step_says_what_helps(case: str, then: str) -> None:
    how, between, options = CASES[case]
    first, second = ddp_ranks(2, fails, how, between, options, then)
    helps = "ClosedError helps"
    assert first[0] == ["DeadlineError" if how == "late" else "KeyboardInterrupt", helps, helps]
    assert second[0][0] in ("PeerLostError", "DeadlineError")
    assert second[0][1:] == [helps, helps]
    assert first[1:] == second[1:]


# ------------------------------------------------------------------------------------------------ late ranks


def given_up(port: int) -> list[Any]:
    """Press Ctrl-C twice on rank 0, and let rank 1 come when rank 0 has long given its buckets up."""
    with group(port) as rank, pythons_own_handler():
        store = job_store()
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        attachment = ringside.attach(model, monitor=False, engine="ringside")
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        assert sum(attachment.counters.values()) > 6, "there are several buckets"
        if rank == 0:
            for seconds in (0.5, 1.0):
                threading.Timer(seconds, press).start()
        else:
            store.wait(["given up"])
        told = "ended"
        try:
            model(torch.ones(2, 64)).sum().backward()
        except (KeyboardInterrupt, RingsideError) as error:
            told = type(error).__name__
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if rank == 0:
            for gradient in gradients:
                gradient.fill_(7.0)
            store.set("given up", "1")
            store.wait(["has come"])
        else:
            store.set("has come", "1")
        attachment.detach()
        return [told, all(bool((gradient == 7.0).all()) for gradient in gradients)]


def test_who_comes_after_that_hears_of_it_and_writes_into_nobody_elses_buckets() -> None:
    """Of several buckets all but the last are carried by a thread, which Ctrl-C does not reach."""
    first, second = ddp_ranks(2, given_up)
    assert first == ["KeyboardInterrupt", True]
    assert second[0] == "PeerLostError"
