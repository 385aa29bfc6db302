"""Gradients between hosts, where DDP waits for buckets itself, against stock Gloo DDP."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.ddp.attached_model import own_hook  # noqa: E402

from .groups import own_machines  # noqa: E402
from .plans import PLANS, assert_ours, both  # noqa: E402
from .training import Plan, batch, build, ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native


def both_between(port: int, plan: Plan) -> tuple[str, float, dict[str, int], str]:
    with own_machines():
        return both(port, plan)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "mlp as view",
        "frozen",
        "one bucket",
        "accumulation",
        "static graph",
        "static graph, unused branch",
        "unused differs between ranks",
        "whole first bucket unused",
        "find_unused, none is",
    ],
)
def test_two_hosts_equal_gloo_bit_for_bit(name: str) -> None:
    results = ddp_ranks(2, both_between, PLANS[name])
    for difference, _, counters, _ in results:
        assert difference == ""
        assert_ours(counters)
    assert results[0][3] == results[1][3]


def two_in_one_backward(port: int, engine: str) -> list[float]:
    """Two models whose callbacks stand in one line: both begin to wait before either has ended."""
    found = []
    with own_machines(), group(port) as rank:
        models = [DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01) for _ in range(2)]
        stock = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
        attachments = [ringside.attach(model, engine=engine, monitor=False) for model in models]
        for step in range(3):
            for model in (*models, stock):
                model.zero_grad()
            x = batch(rank, step)
            (models[0](x) + 2 * models[1](x)).square().mean().backward()
            (3 * stock(x)).square().mean().backward()  # they are equal: d/da (a + 2b)^2 is 6a, d/ds (3s)^2 is 18s
            for model, share in zip(models, (3, 1.5), strict=True):
                pairs = zip(model.parameters(), stock.parameters(), strict=True)
                found.append(max(float((share * p.grad - s.grad).abs().max()) for p, s in pairs))
        for attachment in attachments:
            attachment.detach()
    return found


@pytest.mark.parametrize("engine", ["ringside", "native"])
def test_two_models_in_one_backward(engine: str) -> None:
    for gaps in ddp_ranks(2, two_in_one_backward, engine):
        assert len(gaps) == 6
        assert max(gaps) < 1e-4


class Bucket:
    """What a carrier sees of a DDP bucket, the first or the last one."""

    def __init__(self, number: int, buffer: torch.Tensor) -> None:
        self._number, self._buffer = number, buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._number == 1


def last_one_refused(port: int) -> list[list[complex]]:
    """The first bucket is still open when the last one comes, which goes to the group."""
    with own_machines(), pytest.MonkeyPatch.context() as patch, group(port) as rank:
        patch.setenv("RINGSIDE_MACHINE", f"machine {rank // 2}")
        patch.setenv("RINGSIDE_ALGORITHM", "hosts/ring")
        model = DistributedDataParallel(build("mlp"))
        ringside.attach(model, monitor=False)
        reducer = own_hook(model).reducer
        buffers = [torch.full((1 << 20,), rank + 1.0), torch.full((3,), complex(rank + 1, 1.0), dtype=torch.complex64)]
        for number, buffer in enumerate(buffers):
            reducer.reduce(Bucket(number, buffer))
        reducer.wait()
        return [list(set(buffer.tolist())) for buffer in buffers]


def test_a_last_bucket_that_the_engine_refuses_leaves_none_before_it_open() -> None:
    assert ddp_ranks(4, last_one_refused) == [[[2.5], [2.5 + 1j]]] * 4


def detached_while_ddp_waits(port: int) -> tuple[float, dict[str, int]]:
    """Whoever detaches between the callbacks gets what the carrier that carried them brings."""
    with own_machines(), group(port) as rank:
        model = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
        stock = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
        attachment = ringside.attach(model, monitor=False)
        leave = own_hook(model).reducer.defer_wait

        def leaves() -> bool:
            answer: bool = leave()
            torch.autograd.Variable._execution_engine.queue_callback(attachment.detach)
            return answer

        for step in range(4):
            if step == 2:
                own_hook(model).reducer.defer_wait = leaves
            for each in (model, stock):
                each.zero_grad()
                each(batch(rank, step)).square().mean().backward()
        pairs = zip(model.parameters(), stock.parameters(), strict=True)
        return max(float((p.grad - s.grad).abs().max()) for p, s in pairs), attachment.counters


def test_detaching_while_ddp_waits_loses_nothing() -> None:
    for gap, counters in ddp_ranks(2, detached_while_ddp_waits):
        assert gap == 0.0
        assert counters["ringside/ring"] > 0
        assert counters["gloo"] > 0


def ends_told(port: int, between: bool) -> list[tuple[float, float]]:
    """Return of each synchronisation for how long it is said to be over when that is told, and for how long it is."""
    found: list[tuple[float, float]] = []
    with own_machines() if between else contextlib.nullcontext(), group(port) as rank:
        ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
        attachment, hook = ringside.attach(ddp, engine="ringside", monitor=False), own_hook(ddp)
        assert hook is not None
        sync_ends = hook.clock.sync_ends

        def noted(take: Any, ago: float = 0.0) -> None:
            found.append((ago, time.perf_counter() - hook.reducer.outcomes.ended))
            sync_ends(take, ago)

        hook.clock.sync_ends = noted
        for step in range(3):
            ddp(batch(rank, step)).square().mean().backward()
        attachment.detach()
    return found


@pytest.mark.parametrize("between", [True, False])
def test_a_wait_that_is_ddps_was_over_when_its_last_bucket_was(between: bool) -> None:
    for told in ddp_ranks(2, ends_told, between):
        assert len(told) == 3
        assert all(0.0 < ago <= most if between else ago == 0.0 for ago, most in told), told
