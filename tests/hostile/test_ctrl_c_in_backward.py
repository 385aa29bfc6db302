"""Ctrl-C on one rank while it waits in backward: the others come, it ends the backward, and all can train on."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.sync.training import Plan, ddp_ranks, group, one_step, small_attachment, steps  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.errors import RingsideError  # noqa: E402
from ringside.sync.ddp_methods import own_hook  # noqa: E402

pytestmark = pytest.mark.native


def pressed(port: int, engine: str) -> list[Any]:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which comes after that."""
    with group(port) as rank:
        store = torch.distributed.distributed_c10d._get_default_store()
        model, _, optimizer = small_attachment(monitor=False, engine=engine)
        steps(model, optimizer, rank, 3)
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            told = "ended"
            if rank == 0:
                carrier: Any = own_hook(model).carrier
                leave = carrier.leave

                def press() -> None:
                    os.kill(os.getpid(), signal.SIGINT)
                    store.set("pressed", "1")

                def leave_and_press() -> bool:  # the last that is called before the wait
                    carrier.leave = leave
                    threading.Timer(0.5, press).start()
                    return bool(leave())

                carrier.leave = leave_and_press
            else:
                store.wait(["pressed"])
            try:
                one_step(model, optimizer, Plan(), rank, 4)
            except KeyboardInterrupt:
                told = "interrupted"
            handler = signal.getsignal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        gradients = [p.grad.clone() for p in model.parameters()]
        steps(model, optimizer, rank, 2)
        return [told, handler is signal.default_int_handler, [float(g.sum()) for g in gradients]]


@pytest.mark.parametrize("engine", ["ringside", "native"])
def test_the_backward_is_ended_and_all_train_on(engine: str) -> None:
    first, second = ddp_ranks(2, pressed, engine)
    assert first[:2] == ["interrupted", True]
    assert second[:2] == ["ended", True]
    assert first[2] == second[2]


def given_up(port: int) -> list[Any]:
    """Press Ctrl-C on rank 0, and let rank 1 come when rank 0 has long given its buckets up."""
    with group(port) as rank:
        store = torch.distributed.distributed_c10d._get_default_store()
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        attachment = ringside.attach(model, monitor=False, engine="ringside")
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        assert sum(attachment.counters.values()) > 6, "there are several buckets"
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        own_hook(model).interrupt_s = 0.2
        try:
            if rank == 0:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            else:
                store.wait(["given up"])
            told = "ended"
            try:
                model(torch.ones(2, 64)).sum().backward()
            except (KeyboardInterrupt, RingsideError) as error:
                told = type(error).__name__
        finally:
            signal.signal(signal.SIGINT, before)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if rank == 0:
            for gradient in gradients:
                gradient.fill_(7.0)
            store.set("given up", "1")
            store.wait(["has come"])
        else:
            store.set("has come", "1")
        attachment.detach()  # DDP keeps a model whose backward was broken off
        return [told, all(bool((gradient == 7.0).all()) for gradient in gradients)]


def test_who_comes_after_that_hears_of_it_and_writes_into_nobody_elses_buckets() -> None:
    """Of several buckets all but the last are carried by a thread, which Ctrl-C does not reach."""
    first, second = ddp_ranks(2, given_up)
    assert first == ["KeyboardInterrupt", True]
    assert second[0] == "PeerLostError"
