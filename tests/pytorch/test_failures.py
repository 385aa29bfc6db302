"""When things go wrong while training: every rank gets an error that names the culprit, or goes on and says so once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import Team, place, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.monitor.verdict import Verdict  # noqa: E402
from ringside.pytorch.recording.session import Session  # noqa: E402

from . import namespaces  # noqa: E402
from .training import (  # noqa: E402
    Plan,
    Said,
    compares_models_first,
    ddp_outcomes,
    ddp_ranks,
    free_port,
    group,
    run_directory,
    same_bits,
    small_attachment,
    steps,
    train,
)

pytestmark = pytest.mark.native

BOUND_S = 5.0
"""Survivors know within a second; this leaves room for a busy machine."""


# ------------------------------------------------------------------------------------------------ deaths


class Stop(torch.autograd.Function):
    """In backward: tell the test that this rank is there, and on rank `victim` stay there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, victim: int) -> torch.Tensor:
        ctx.victim = victim
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        say("ready")
        if place().rank == ctx.victim:
            threading.Event().wait(60)
        return gradient, None


def stopped_in_backward(port: int, victim: int, at_step: int, options: dict[str, Any]) -> None:
    """Train until the victim stops in the middle of backward: some buckets have been handed over, some not."""
    with group(port) as rank:
        parts = [nn.Linear(64, 64) for _ in range(4)]
        ddp = DistributedDataParallel(nn.Sequential(*parts), bucket_cap_mb=0.01, **options)
        ringside.attach(ddp, monitor=False)
        for step in range(at_step + 1):
            if step == at_step:
                parts[1].register_forward_hook(lambda _, args, output: Stop.apply(output, victim))
            ddp(torch.randn(4, 64)).square().mean().backward()
        raise AssertionError(f"rank {rank} finished a backward that rank {victim} did not")


@pytest.mark.parametrize(
    ("size", "victim", "at_step", "options"),
    [(3, 1, 3, {}), (2, 0, 0, {"static_graph": True}), (2, 1, 2, {"gradient_as_bucket_view": True})],
    ids=["a middle rank", "rank 0, in a first static backward", "the last rank, with views"],
)
def test_kill_in_backward(size: int, victim: int, at_step: int, options: dict[str, Any]) -> None:
    with Team(size) as team:
        team.start(stopped_in_backward, free_port(), victim, at_step, options)
        team.await_word("ready")
        killed = team.kill(victim)
        outcomes = team.finish()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_status == -9
            continue
        assert outcome.error == "PeerLostError", outcome.trace
        assert outcome.ranks == (victim,)
        assert f"rank {victim}" in outcome.message
        assert outcome.at - killed < BOUND_S


def misses_backward(port: int) -> None:
    os.environ["RINGSIDE_TIMEOUT_S"] = "1"
    try:
        with group(port) as rank:
            ddp, _, optimizer = small_attachment(monitor=False)
            steps(ddp, optimizer, rank, 2)
            store = dist.distributed_c10d._get_default_store()
            if rank == 1:
                store.wait(["given up"])
                return
            try:
                steps(ddp, optimizer, rank, 1)
            finally:
                store.set("given up", "")
    finally:
        del os.environ["RINGSIDE_TIMEOUT_S"]


def test_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    first, second = ddp_outcomes(2, misses_backward)
    assert first.error == "DeadlineError", first.trace
    assert first.ranks == (1,)
    assert "RINGSIDE_TIMEOUT_S" in first.message
    assert second.ok, second.trace


# ------------------------------------------------------------------------------------------------ disagreement


def different(port: int, kind: str) -> None:
    with group(port) as rank:
        model = nn.Linear(64, 8 + 8 * rank if kind == "shape" else 8)
        if kind == "dtype" and rank == 1:
            model.double()
        ddp = DistributedDataParallel(model, init_sync=False)
        ringside.attach(ddp, monitor=False)
        ddp(torch.randn(4, 64, dtype=model.weight.dtype)).square().mean().backward()


@compares_models_first
@pytest.mark.parametrize(("kind", "words"), [("shape", ("520", "1040")), ("dtype", ("float32", "float64"))])
def test_ranks_with_different_models(kind: str, words: tuple[str, str]) -> None:
    for outcome in ddp_outcomes(2, different, kind):
        assert outcome.error == "MismatchError", outcome.trace
        assert outcome.ranks == (0, 1)  # of two neither is the odd one out
        assert all(word in outcome.message for word in ("rank 0 called", "rank 1 called", *words)), outcome.message


# ------------------------------------------------------------------------------------------------ listeners


VERDICT = Verdict(
    kind="slow_rank",
    ranks=[1],
    since_step=2,
    detected_step=3,
    excess_ratio=0.2,
    cause="",
    evidence={},
    cost_rank_seconds=0.0,
    advice="",
)


def asked_elsewhere(session: Session) -> None:
    """A listener may wait for a thread of its own that asks for the verdicts."""
    asking = threading.Thread(target=lambda: session.verdicts, daemon=True)
    asking.start()
    asking.join(20.0)
    assert not asking.is_alive()


def bad_listeners(port: int) -> dict[str, Any]:
    heard: list[Any] = []

    def bad(_: Any) -> None:
        heard.append("bad")
        raise KeyError("nobody expected this")

    with group(port) as rank, run_directory() as path, Said() as said:
        ddp, attachment, optimizer = small_attachment(run_dir=path)
        session = attachment.session
        for listener in (bad, lambda record: heard.append(record.step)):
            session.on_record(listener)
        verdicts: list[str] = []
        session.on_verdict(bad)
        session.on_verdict(lambda verdict: verdicts.append(verdict.kind))
        session.on_verdict(lambda _: asked_elsewhere(session))
        steps(ddp, optimizer, rank, 4)
        told = {"kind": "slow_rank", "ranks": [1], "since_step": 2, "detected_step": 3, "excess_ratio": 0.2}
        for _ in range(2):
            verdict = {**told, "cause": "", "evidence": {}, "cost_rank_seconds": 0, "advice": ""}
            if session.rank0 is not None:
                session.rank0.put_event("verdict", {"verdict": verdict})
        session.end()
        written = len((path / "steps.jsonl").read_text().splitlines()) if rank == 0 else 8
    return {"heard": heard, "verdicts": verdicts, "said": said.about("will not be called again"), "written": written}


def test_listener_that_raises_is_dropped_and_the_others_are_kept() -> None:
    first, second = ddp_ranks(2, bad_listeners)
    assert first["heard"].count("bad") == 2  # a record and a verdict
    assert second["heard"].count("bad") == 1
    assert [step for step in first["heard"] if step != "bad"] == [0, 1, 2, 3]
    assert first["verdicts"] == ["slow_rank"] * 2
    assert len(first["said"]) == 2
    assert first["written"] == 8


# ------------------------------------------------------------------------------------------------ disks and memory


def unwritable(port: int) -> tuple[int, list[str]]:
    with group(port) as rank, Said() as said:
        ddp, attachment, optimizer = small_attachment(run_dir="/dev/null/run")
        steps(ddp, optimizer, rank, 3)
        attachment.session.end()
        return attachment.session.clock.step, said.lines


def test_run_directory_that_cannot_be_made() -> None:
    first, second = ddp_ranks(2, unwritable)
    assert first[0] == second[0] == 3
    assert len(first[1]) == 1
    assert "training goes on" in first[1][0]
    assert second[1] == []


@pytest.fixture(scope="module")
def privileged() -> Iterator[Team]:
    """Two ranks that may mount; they are thrown away afterwards."""
    if not namespaces.possible():
        pytest.skip("needs the privilege to make a mount namespace")
    with Team(2) as team:
        yield team


def full_disk(port: int) -> tuple[int, list[str], int]:
    with group(port) as rank, run_directory() as path, Said() as said:
        path.mkdir()
        if rank == 0:
            namespaces.enter_own()
            namespaces.mount_small(str(path), 64 << 10)
        ddp, attachment, optimizer = small_attachment(run_dir=path / "run")
        steps(ddp, optimizer, rank, 300)
        attachment.session.end()
        written = sum(file.stat().st_size for file in path.rglob("*.jsonl"))
        if rank == 0:
            os.system(f"umount {path}")
        return attachment.session.clock.step, said.about("run directory"), written


def test_disk_that_fills_up(privileged: Team) -> None:
    first, second = privileged.run(full_disk, free_port())
    assert first[0] == second[0] == 300
    assert len(first[1]) == 1
    assert "training goes on" in first[1][0]
    assert first[2] > 0, "what there was room for was written"


BIG = {"bucket_cap_mb": 3, "gradient_as_bucket_view": True}


def big_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 1024), *(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 8))


def small_shm(port: int, where: str, size_bytes: int) -> tuple[bool, dict[str, int], list[str]]:
    """Train with Gloo and with Ringside where /dev/shm is small: on both ranks (the same one), or on rank 1 only."""
    from . import training

    with group(port) as rank, Said() as said:
        training.MODELS["big"] = big_model
        store = dist.distributed_c10d._get_default_store()
        if rank == (0 if where == "both" else 1):
            namespaces.enter_own()  # from here on it sees nothing of what others mount
            namespaces.mount_small("/dev/shm", size_bytes)
            store.set("mounted", str(os.getpid()))
        elif where == "both":
            namespaces.enter_that_of(int(store.get("mounted")))
        elif rank == 0:  # whatever an earlier test has mounted
            namespaces.enter_own()
            namespaces.mount_small("/dev/shm", 256 << 20)
        dist.barrier()
        plan = Plan("big", options=BIG)
        stock, ours = train(plan, rank, attach=False), train(plan, rank, attach=True)
        same = stock.difference(ours) == "" and all(same_bits(stock.state[k], ours.state[k]) for k in ours.state)
        left = os.listdir("/dev/shm") if where == "both" else []
        assert not left, left
        return same, ours.counters, said.lines


@pytest.mark.parametrize("size_bytes", [64 << 10, 8 << 20])
def test_small_dev_shm(privileged: Team, size_bytes: int) -> None:
    """Buckets take nothing of it, however small it is."""
    for same, counters, lines in privileged.run(small_shm, free_port(), "both", size_bytes):
        assert same
        assert all(name.startswith("ringside/") for name in counters)
        assert counters["ringside/push"] > 0
        assert not lines


@pytest.mark.core
def test_small_dev_shm_on_one_rank(privileged: Team) -> None:
    for same, counters, lines in privileged.run(small_shm, free_port(), "second", 64 << 10):
        assert same
        assert counters["ringside/push"] > 0
        assert not lines


def without_memfds(port: int) -> tuple[bool, dict[str, int], list[str]]:
    """Train where the system gives rank 1 no memory that can be mapped, once Ringside's own is there."""
    from ringside.pytorch import shared_storage as storage

    from . import training

    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    with group(port) as rank, Said() as said, pytest.MonkeyPatch.context() as patch:
        training.MODELS["big"] = big_model
        stock = train(Plan("big", options=BIG), rank, attach=False)
        if rank == 1:
            patch.setattr(storage.os, "memfd_create", refuse)
        ours = train(Plan("big", options=BIG), rank, attach=True)
        return stock.difference(ours) == "", ours.counters, said.lines


def test_buckets_that_cannot_be_shared_are_copied() -> None:
    first, second = ddp_ranks(2, without_memfds)
    for same, counters, _ in (first, second):
        assert same
        assert "ringside/push" not in counters
        assert counters["ringside/staged"] > 0
    assert first[2] == []
    assert len(second[2]) == 1
    assert "copied instead" in second[2][0]
