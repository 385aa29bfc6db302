"""Ctrl-C on one rank while it waits in backward: the others come, it ends the backward, and all can train on."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.sync.training import Plan, ddp_ranks, group, one_step, small_attachment, steps  # noqa: E402

from ringside import _core  # noqa: E402

pytestmark = pytest.mark.skipif(not _core.available(), reason="needs the native core")


def pressed(port: int, engine: str) -> list[Any]:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which comes after that."""
    with group(port) as rank:
        store = torch.distributed.distributed_c10d._get_default_store()
        model, attachment, optimizer = small_attachment(monitor=False, engine=engine)
        steps(model, optimizer, rank, 3)
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            told = "ended"
            if rank == 0:
                carrier: Any = attachment._hook.carrier
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
