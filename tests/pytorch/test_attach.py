"""What `attach` does beside gradients: engines, hooks, several models, coming and going."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ringside  # noqa: E402
from ringside import _core  # noqa: E402
from ringside.engine.runtime.queue import QueuedCollective  # noqa: E402
from ringside.errors import SyncError  # noqa: E402
from ringside.pytorch.ddp.attached_model import own_hook  # noqa: E402
from ringside.pytorch.store import OwnTimeout  # noqa: E402

from .training import (  # noqa: E402
    Plan,
    Said,
    build,
    ddp_outcomes,
    ddp_ranks,
    digest,
    group,
    one_step,
    run_directory,
    small_attachment,
    steps,
    train,
)

pytestmark = pytest.mark.native


def is_ours(counters: dict[str, int]) -> bool:
    """Tell whether Ringside carried everything, and something at all."""
    return bool(counters) and all(name.startswith("ringside/") for name in counters)


# ------------------------------------------------------------------------------------------------ several models


def gan(rank: int, attach: bool) -> tuple[list[str], list[dict[str, int]]]:
    """Train a generator and a discriminator in turn, then both in one backward."""
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64)), nn.Linear(64, 1)]
    generator, judge = (DistributedDataParallel(part, bucket_cap_mb=0.005) for part in parts)
    held = [ringside.attach(model, monitor=False) for model in (generator, judge)] if attach else []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, judge)]
    noise = torch.Generator().manual_seed(rank)
    for _ in range(3):
        fake = generator(torch.randn(4, 16, generator=noise))
        optimizers[1].zero_grad()
        (judge(fake.detach()).mean() - judge(torch.randn(4, 64, generator=noise)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judge(fake).mean().neg().backward()
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    judge(generator(torch.randn(4, 16, generator=noise))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    return [digest(generator), digest(judge)], [attachment.counters for attachment in held]


def several(port: int) -> bool:
    with group(port) as rank:
        stock, _ = gan(rank, attach=False)
        ours, counters = gan(rank, attach=True)
        return stock == ours and all(is_ours(each) for each in counters)


def test_two_models_in_turn_and_in_one_backward() -> None:
    assert ddp_ranks(2, several) == [True, True]


def mappings() -> int:
    """Return how many pieces of shared memory of models this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("torch_" in line or "ringside" in line for line in lines)


def come_and_go(port: int) -> list[tuple[int, int, int]]:
    held = []
    with group(port) as rank:
        for round_ in range(8):
            trained = train(Plan(steps=3), rank, attach=True)
            assert is_ours(trained.counters)
            steps(*forgotten(), rank, 3)  # never detached
            gc.collect()
            dist.barrier()
            if round_ >= 1:
                held.append(settled(held[0] if held else (0, 0, 0)))
    return held


def settled(least: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return what this process holds: a thread that was told to end may need a moment for it."""
    deadline = time.monotonic() + 5.0
    while (now := (mappings(), threads(), len(os.listdir("/proc/self/fd")))) > least or now[1]:
        if time.monotonic() > deadline or (not now[1] and not any(least)):
            break
        time.sleep(0.01)  # the end of a thread that nobody holds gives no event
    return now


def forgotten() -> tuple[Any, Any]:
    ddp, _, optimizer = small_attachment(monitor=False)
    return ddp, optimizer


def threads() -> int:
    return sum(thread.name.startswith("ringside") for thread in threading.enumerate())


def test_models_that_come_and_go_leave_nothing() -> None:
    for held in ddp_ranks(2, come_and_go):
        assert held[-1] == held[0], held
        assert held[-1][1] == 0, "threads of communicators are left"


def rebuilt(port: int) -> tuple[bool, dict[str, int]]:
    """Models of different sizes one after the other: their buckets get each other's addresses and descriptors."""
    same, kept = True, {}
    with group(port) as rank:
        for cap in (0.005, 0.02, 0.01, 0.04, 0.005):
            plan = Plan("transformer", steps=3, options={"bucket_cap_mb": cap, "gradient_as_bucket_view": True})
            stock, ours = train(plan, rank, attach=False), train(plan, rank, attach=True)
            same = same and stock.difference(ours) == "" and is_ours(ours.counters)
            kept = ours.counters
    return same, kept


def test_rebuilt_buckets_on_old_addresses() -> None:
    for same, counters in ddp_ranks(2, rebuilt):
        assert same
        assert counters.get("ringside/push", 0) > 0


# ------------------------------------------------------------------------------------------------ who carries


def alone(port: int) -> tuple[str, dict[str, int]]:
    with group(port) as rank:
        stock, ours = train(Plan(), rank, attach=False), train(Plan(), rank, attach=True)
        return stock.difference(ours), ours.counters


def test_world_size_one() -> None:
    (difference, counters), *_ = ddp_ranks(1, alone)
    assert difference == ""
    assert set(counters) == {"ringside/local"}


def in_pairs(port: int) -> tuple[str, dict[str, int], str]:
    with group(port) as rank:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        plan = Plan(options={"process_group": pairs[rank // 2]})
        stock, ours = train(plan, rank, attach=False), train(plan, rank, attach=True)
        return stock.difference(ours), ours.counters, ours.digest


def test_process_groups_of_some_ranks_each() -> None:
    results = ddp_ranks(4, in_pairs)
    for difference, counters, _ in results:
        assert difference == ""
        assert is_ours(counters)
    digests = [digest for *_, digest in results]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def only_two(port: int) -> tuple[list[str], bool]:
    """Ranks 0 and 1 train a model of theirs; rank 2 trains nothing and never attaches."""
    with group(port) as rank, run_directory() as path, Said() as said:
        pair = dist.new_group([0, 1])
        if rank == 2:
            dist.barrier()
            return [], False
        ddp = DistributedDataParallel(build("mlp"), process_group=pair)
        attachment = ringside.attach(ddp, run_dir=path)
        steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank, 3)
        dist.barrier()
        assert attachment.session is None
        assert is_ours(attachment.counters)
        return said.about("not recorded"), path.exists() and any(path.iterdir())


def test_a_model_that_only_some_ranks_train_is_carried_and_not_compared() -> None:
    results = ddp_ranks(3, only_two)
    assert [len(said) for said, _ in results] == [1, 0, 0]
    assert not any(written for _, written in results)


def choices(port: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with group(port) as rank:
        native = train(Plan(), rank, attach=True, engine="native")
        os.environ["RINGSIDE_ENGINE"] = "native"
        by_environment = train(Plan(), rank, attach=True)
        beaten = train(Plan(), rank, attach=True, engine="ringside")
        del os.environ["RINGSIDE_ENGINE"]
        os.environ["RINGSIDE"] = "off"
        off = ringside.attach(DistributedDataParallel(build("mlp")))
        del os.environ["RINGSIDE"]
        seen.update(native=native.counters, environment=by_environment.counters, argument=beaten.counters)
        seen.update(off=(off.session, off.engine, off.why, off.counters))
        off.detach()
    return seen


def test_engine_by_argument_and_environment() -> None:
    for seen in ddp_ranks(2, choices):
        assert set(seen["native"]) == set(seen["environment"]) == {"gloo"}
        assert is_ours(seen["argument"])
        assert seen["off"][:4] == (None, "gloo", "RINGSIDE=off", {})


def impossible(port: int, engine: str) -> tuple[str, dict[str, int], list[str]]:
    with group(port) as rank, Said() as said, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_core, "available", lambda: False)
        ddp, attachment, optimizer = small_attachment(monitor=False, engine=engine)
        steps(ddp, optimizer, rank, 2)
        return attachment.engine, attachment.counters, said.about("only watches")


def test_where_one_rank_has_no_core_all_are_only_watched_and_told_once() -> None:
    first, second = ddp_ranks(2, impossible, "auto")
    assert first[0] == second[0] == "gloo"
    assert set(first[1]) == {"gloo"}
    assert len(first[2]) == 1
    assert "rank 1: the native core is not installed" in first[2][0]
    assert second[2] == []


def test_engine_ringside_where_it_cannot_be_is_an_error_on_all_ranks() -> None:
    for outcome in ddp_outcomes(2, impossible, "ringside"):
        assert outcome.error == "UnsupportedError"
        assert "native core" in outcome.message


def on_hosts(port: int, ranks_per_host: int, engine: str) -> tuple[dict[str, int], bytes]:
    with group(port) as rank:
        os.environ["RINGSIDE_MACHINE"] = str(rank // ranks_per_host)
        try:
            ddp, attachment, optimizer = small_attachment(monitor=False, engine=engine)
            steps(ddp, optimizer, rank, 4)
            attachment.detach()
            return attachment.counters, torch.cat([p.detach().flatten() for p in ddp.parameters()]).numpy().tobytes()
        finally:
            del os.environ["RINGSIDE_MACHINE"]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_ranks_on_several_hosts_are_carried_by_us_with_gloo_results(ranks_per_host: int) -> None:
    ours = ddp_ranks(4, on_hosts, ranks_per_host, "auto")
    theirs = ddp_ranks(4, on_hosts, ranks_per_host, "native")
    assert len({parameters for _, parameters in ours}) == 1
    for counters, parameters in ours:
        assert is_ours(counters)
        expected = np.frombuffer(theirs[0][1], dtype=np.float32)
        np.testing.assert_allclose(np.frombuffer(parameters, dtype=np.float32), expected, rtol=1e-5, atol=1e-7)


def cannot_open(port: int) -> tuple[str, str]:
    """Rank 1 can offer the engine and then fails to open it (no pidfd, no memory)."""
    import ringside.pytorch.ddp.attach as module

    class Failing(module.HostCommunicator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.close()
            raise OSError(12, "out of memory")

    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(module, "HostCommunicator", Failing)
        ddp, attachment, optimizer = small_attachment(monitor=False)
        steps(ddp, optimizer, rank, 2)
        return attachment.engine, attachment.why


def test_engine_that_fails_to_open_on_one_rank_is_used_on_none() -> None:
    for engine, why in ddp_ranks(2, cannot_open):
        assert engine == "gloo"
        assert why.startswith("rank 1:")
        assert "out of memory" in why


def test_attach_refuses_what_is_no_ddp_model() -> None:
    with pytest.raises(ringside.UsageError, match="DistributedDataParallel, not a Linear"):
        ringside.attach(nn.Linear(2, 2))


def unknown_engine(port: int) -> None:
    with group(port):
        small_attachment(engine="nccl")


def test_unknown_engine_is_refused_with_what_exists() -> None:
    for outcome in ddp_outcomes(1, unknown_engine):
        assert outcome.error == "UsageError"
        assert "auto, ringside, native" in outcome.message


# ------------------------------------------------------------------------------------------------ coming and going


def late(port: int) -> tuple[bool, dict[str, int]]:
    with group(port) as rank:
        digests = []
        for attach in (False, True):
            ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            steps(ddp, optimizer, rank, 2)
            attachment = ringside.attach(ddp, monitor=False) if attach else None
            steps(ddp, optimizer, rank, 3)
            digests.append(digest(ddp))
        assert attachment is not None
        return digests[0] == digests[1], attachment.counters


def test_attach_after_the_first_backward() -> None:
    for same, counters in ddp_ranks(2, late):
        assert same
        assert is_ours(counters)


def again(port: int) -> dict[str, Any]:
    with group(port) as rank, Said() as said:
        ddp, first, optimizer = small_attachment(monitor=False)
        same = ringside.attach(ddp, monitor=False) is first
        hooks = len(ddp._forward_pre_hooks)
        steps(ddp, optimizer, rank, 3)
        ours = first.counters
        first.detach()
        first.detach()
        steps(ddp, optimizer, rank, 2)
        detached = first.counters
        second = ringside.attach(ddp, monitor=False)
        steps(ddp, optimizer, rank, 2)
        second_counters = second.counters
        third = ringside.attach(ddp, monitor=False, engine="native")
        steps(ddp, optimizer, rank, 1)
        stock = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
        other = torch.optim.SGD(stock.parameters(), lr=0.01)
        for count in (3, 2, 2, 1):
            steps(stock, other, rank, count)
        return {
            "same": same,
            "hooks": (hooks, len(ddp._forward_pre_hooks)),
            "ours": ours,
            "detached": detached,
            "second": second_counters,
            "third": third.counters,
            "attached": (first.attached, second.attached, third.attached),
            "equal": digest(ddp) == digest(stock),
            "said": said.lines,
        }


def test_attach_twice_detach_and_attach_again() -> None:
    for seen in ddp_ranks(2, again):
        assert seen["same"]
        assert seen["hooks"] == (0, 0)
        assert is_ours(seen["ours"])
        assert seen["detached"]["gloo"] > 0
        assert is_ours(seen["second"])
        assert set(seen["third"]) == {"gloo"}
        assert seen["attached"] == (False, False, True)
        assert seen["equal"]
        assert seen["said"] == []


# ------------------------------------------------------------------------------------------------ the script's hooks


def hook_after(port: int) -> dict[str, Any]:
    with group(port) as rank, Said() as said:
        results = []
        for attach in (False, True):
            ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
            attachment = ringside.attach(ddp, monitor=False) if attach else None
            ddp.register_comm_hook(None, fp16_compress_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            steps(ddp, optimizer, rank, 3)
            results.append(digest(ddp))
        assert attachment is not None
        counters, why = attachment.counters, attachment.why
        attachment.detach()  # the script's hook stays
        steps(ddp, optimizer, rank, 1)
        repeated = ringside.attach(ddp, monitor=False)
        steps(ddp, optimizer, rank, 1)
        return {
            "equal": results[0] == results[1],
            "counters": counters,
            "why": why,
            "said": said.about("own communication hook"),
            "later": repeated.counters,
            "engine": repeated.engine,
        }


def test_hook_registered_after_attach_runs_and_is_watched() -> None:
    first, second = ddp_ranks(2, hook_after)
    for seen in (first, second):
        assert seen["equal"]
        assert set(seen["counters"]) == {"hook:fp16_compress_hook"}
        assert "fp16_compress_hook" in seen["why"]
        assert seen["later"]["hook:fp16_compress_hook"] > seen["counters"]["hook:fp16_compress_hook"]
        assert seen["engine"] == "gloo"
    assert len(first["said"]) == 1
    assert second["said"] == []


def hook_before(port: int) -> dict[str, Any]:
    with group(port) as rank, run_directory() as path, Said() as said:
        ddp = DistributedDataParallel(build("mlp"))
        ddp.register_comm_hook(None, fp16_compress_hook)
        attachment = ringside.attach(ddp, run_dir=path)
        steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), rank, 3)
        attachment.session.end()
        lines = len((path / "steps.jsonl").read_text().splitlines()) if rank == 0 else None
        return {"engine": attachment.engine, "why": attachment.why, "said": said.about("only watches"), "lines": lines}


def test_hook_registered_before_attach_keeps_the_gradients() -> None:
    first, second = ddp_ranks(2, hook_before)
    assert first["engine"] == second["engine"] == "gloo"
    assert "already has a communication hook" in second["why"]
    assert len(first["said"]) == 1
    assert first["lines"] == 6  # steps are recorded all the same


# ------------------------------------------------------------------------------------------------ odd backwards


class Checkpointed(nn.Module):
    """Backward runs a backward of its own inside (reentrant checkpoint)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x.relu(), use_reentrant=True)
        return x


def reentrant(port: int) -> tuple[bool, dict[str, int]]:
    with group(port) as rank:
        digests = []
        for attach in (False, True):
            torch.manual_seed(1)
            ddp = DistributedDataParallel(Checkpointed(), bucket_cap_mb=0.01)
            attachment = ringside.attach(ddp, monitor=False) if attach else None
            steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), rank, 3)
            digests.append(digest(ddp))
        assert attachment is not None
        return digests[0] == digests[1], attachment.counters


def test_reentrant_checkpoint() -> None:
    for same, counters in ddp_ranks(2, reentrant):
        assert same
        assert is_ours(counters)


def uneven(port: int) -> tuple[bool, dict[str, int], int]:
    with group(port) as rank:
        digests = []
        for attach in (False, True):
            ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
            attachment = ringside.attach(ddp, monitor=False) if attach else None
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            with Join([ddp]):
                for step in range(3 + 4 * rank):
                    one_step(ddp, optimizer, Plan(), rank, step)
                    optimizer.step()
            digests.append(digest(ddp))
        assert attachment is not None
        kept = sum(isinstance(one, QueuedCollective) for one in gc.get_objects())
        return digests[0] == digests[1], attachment.counters, kept


def test_join_with_uneven_inputs() -> None:
    results = ddp_ranks(2, uneven)
    for same, counters, kept in results:
        assert same
        assert is_ours(counters)
        assert kept <= 4, "what nobody waited for is kept"


def at_exit(port: int, path: str) -> list[tuple[bool, bool]]:
    """Return after each exit handler whether the gradients' communicator is closed, and whether steps are taken in."""
    handlers: list[Callable[[], Any]] = []
    found = []
    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(atexit, "register", lambda *call, **how: handlers.append(functools.partial(*call, **how)))
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine="ringside")
        hook, session = own_hook(ddp), attachment.session
        assert hook is not None
        assert session is not None
        steps(ddp, optimizer, rank, 2)
        for handler in reversed(handlers):
            handler()
            try:
                hook.reducer.communicator.barrier()
            except SyncError:
                found.append((True, session.is_recording))
            else:
                found.append((False, session.is_recording))
    return found


def test_at_exit_peers_learn_that_a_rank_leaves_before_its_session_waits_for_theirs(tmp_path: Path) -> None:
    for found in ddp_ranks(2, at_exit, str(tmp_path / "run")):
        assert (True, True) in found
        assert (False, False) not in found


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "detail"])
def test_a_timeout_counts_where_the_script_gave_one_and_it_may_give_another(wrapped: bool) -> None:
    options = SimpleNamespace(_timeout=dist.distributed_c10d.default_pg_timeout)
    backend = SimpleNamespace(options=options)
    backend = SimpleNamespace(wrapped_pg=backend) if wrapped else backend
    timeout = OwnTimeout(SimpleNamespace(_get_backend=lambda device: backend))  # type: ignore[arg-type]
    assert (timeout.seconds(), timeout.has_changed()) == (None, False)
    options._timeout = timedelta(seconds=7.5)
    assert timeout.has_changed()
    assert (timeout.seconds(), timeout.has_changed()) == (7.5, False)


def test_a_backend_that_keeps_no_timeout_has_none_that_the_script_gave() -> None:
    timeout = OwnTimeout(SimpleNamespace(_get_backend=lambda device: SimpleNamespace()))  # type: ignore[arg-type]
    assert (timeout.seconds(), timeout.has_changed()) == (None, False)
