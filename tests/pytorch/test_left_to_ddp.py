"""DDP waits for buckets itself, between hosts and for those of the group: what it does, and what may go wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.support.ranks import Team, hear, place, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.ddp.attached_model import backward_of, own_hook  # noqa: E402
from ringside.pytorch.ddp.reducers import BucketOutcomes  # noqa: E402

from .training import LIMIT_S, free_port, group  # noqa: E402

pytestmark = pytest.mark.native

SIZE, VICTIM, SAMPLES = 3, 1, 4
BOUND_S = 5.0
"""Survivors know within a second; this leaves room for a busy machine."""


# ------------------------------------------------------------------------------------------------ whose error it is


def test_what_goes_wrong_is_raised_afterwards() -> None:
    left = BucketOutcomes()
    left.clear()
    left.will_wait = True
    assert left.is_empty
    first, second = ValueError("first"), ValueError("second")
    assert left.defer(first)
    assert left.defer(second)
    assert not left.is_empty
    with pytest.raises(ValueError, match="first"):
        left.raise_first()
    left.raise_first()  # told once


def test_where_nobody_asks_the_future_tells() -> None:
    left = BucketOutcomes()
    left.clear()
    assert not left.defer(ValueError("early")), "nobody calls `raise_first`"


def test_a_backward_that_was_broken_off_leaves_nothing_behind() -> None:
    left = BucketOutcomes()
    left.will_wait = True
    left.defer(ValueError("old"))
    left.clear()
    assert left.is_empty
    left.raise_first()


# ------------------------------------------------------------------------------------------------ backward


class Stop(torch.autograd.Function):
    """In backward: the victim stays there until it is told to go on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if place().rank == VICTIM:
            say("stopped")
            hear()
        return gradient


def stops_in_backward(port: int, engine: str, options: dict[str, bool]) -> list[float]:
    """Backward twice; in the second one the victim stops, and the others wait for it, but not idly."""
    os.environ["RINGSIDE_MACHINE"] = f"machine {place().rank}"
    try:
        with group(port) as rank:
            parts = [nn.Linear(64, 64) for _ in range(4)]
            ddp = DistributedDataParallel(nn.Sequential(*parts), bucket_cap_mb=0.01, **options)
            ringside.attach(ddp, engine=engine, monitor=False)
            ddp(torch.randn(SAMPLES, 64)).square().mean().backward()
            ddp.zero_grad()
            parts[1].register_forward_hook(lambda _, args, output: Stop.apply(output))
            if rank != VICTIM:
                says_when_it_waits(ddp, parts[3].bias, engine, options)
            ((rank + 1) * ddp(torch.randn(SAMPLES, 64)).sum()).backward()
            return [float(part.bias.grad.sum()) for part in parts[3:]]
    finally:
        del os.environ["RINGSIDE_MACHINE"]


def says_when_it_waits(ddp: DistributedDataParallel, bias: torch.Tensor, engine: str, options: dict[str, bool]) -> None:
    """Say "left" where backward has no work left, and have a thread tell of copies where DDP does the waiting."""

    def says() -> None:
        say("left")
        if not options:
            threading.Thread(target=tells_of_copies, args=(bias,), daemon=True).start()

    if engine == "native":
        backward: Any = backward_of(ddp)
        backward.board = SimpleNamespace(entered=lambda *_: None, waiting=says, resumed=int, failed=str)
        return
    reducer: Any = own_hook(ddp).reducer
    leave, wait = reducer.defer_wait, reducer.wait

    def leaves() -> bool:
        assert leave()
        says()
        return True

    if options:
        reducer.wait = lambda: (says(), wait())
    else:
        reducer.defer_wait = leaves


def tells_of_copies(bias: torch.Tensor) -> None:
    """Say when the mean lies in the gradients of the layer whose bucket is through."""
    deadline = time.monotonic() + LIMIT_S / 2
    while bias.grad is None or float(bias.grad[0]) != SAMPLES * (SIZE + 1) / 2:
        if time.monotonic() > deadline:
            say("never copied")
            return
        time.sleep(0.01)  # nothing tells of it
    say("copied")


@pytest.fixture(params=["ringside", "native"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stopped(team: Team, engine: str, options: dict[str, bool]) -> None:
    """Have all ranks but the victim wait: in DDP, with the first bucket copied already, unless there are options."""
    team.start(stops_in_backward, free_port(), engine, options)
    assert team.hear(VICTIM) == "stopped"
    for rank in range(SIZE):
        if rank != VICTIM:
            assert team.hear(rank) == "left"
            assert options or team.hear(rank) == "copied"


def test_buckets_are_copied_while_others_are_waited_for(engine: str) -> None:
    with Team(SIZE) as team:
        stopped(team, engine, {})
        team.tell(VICTIM, "go")
        for outcome in team.finish():
            assert outcome.ok, outcome.trace
            assert outcome.value == [64.0 * SAMPLES * (SIZE + 1) / 2]


OPTIONS = pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["left to DDP", "not left"])


@OPTIONS
def test_a_rank_that_dies_meanwhile_is_named(options: dict[str, bool]) -> None:
    with Team(SIZE) as team:
        stopped(team, "ringside", options)
        killed = team.kill(VICTIM)
        outcomes = team.finish()
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            assert outcome.exit_status == -9
            continue
        assert outcome.at - killed < BOUND_S
        assert (outcome.error, outcome.ranks) == ("PeerLostError", (VICTIM,)), outcome.trace


def test_of_what_the_group_carries_its_own_error_comes_through() -> None:
    """When it comes is Gloo's affair: the neighbours hear at once, others when those leave or their time is over."""
    with Team(SIZE) as team:
        stopped(team, "native", {})
        team.kill(VICTIM)
        outcomes = team.finish(LIMIT_S)
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            assert outcome.error == "RuntimeError", outcome.trace
            assert "ringside" not in outcome.message, "it is Gloo's own, as without us"


@OPTIONS
def test_the_second_ctrl_c_ends_the_wait(options: dict[str, bool]) -> None:
    """The victim never goes on: nobody would hear of it within the timeout."""
    with Team(SIZE) as team:
        stopped(team, "ringside", options)
        team.kill(0, signal.SIGINT)
        time.sleep(0.2)  # two that are pending together are one
        pressed = team.kill(0, signal.SIGINT)
        first = team.finish_one(0)
        last = team.finish_one(2)
    assert first.error == "KeyboardInterrupt", first.trace
    assert last.error == "PeerLostError", last.trace
    assert last.ranks == (0,)
    assert max(first.at, last.at) - pressed < BOUND_S
