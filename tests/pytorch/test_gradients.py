"""Gradients and parameters over Ringside against stock Gloo DDP: every option of DDP, every dtype."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.engine import HostCommunicator  # noqa: E402
from ringside.pytorch.ddp.attached_model import own_hook  # noqa: E402

from .plans import PLANS, VIEW, assert_ours, both  # noqa: E402
from .training import OLD_TORCH, Plan, build, ddp_ranks, group, train  # noqa: E402

pytestmark = pytest.mark.native


@pytest.mark.core
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_equal_gloo_bit_for_bit(name: str) -> None:
    if OLD_TORCH and PLANS[name].dtype.is_complex:
        pytest.skip("Gloo of this torch refuses complex numbers, so there is nothing to compare with")
    results = ddp_ranks(2, both, PLANS[name])
    for difference, _, counters, _ in results:
        assert difference == ""
        assert_ours(counters)
    assert results[0][3] == results[1][3]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.long
def test_more_ranks_agree_with_each_other_and_nearly_with_gloo(size: int) -> None:
    results = ddp_ranks(size, both, Plan("transformer"))
    assert len({digest for *_, digest in results}) == 1
    for _, gap, counters, _ in results:
        assert gap < 1e-5
        assert_ours(counters)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_f32(dtype: torch.dtype) -> None:
    results = ddp_ranks(2, both, Plan(dtype=dtype, options=VIEW))
    assert results[0][3] == results[1][3]
    for _, gap, counters, _ in results:
        assert gap < 0.02
        assert_ours(counters)


class Bucket:
    """What a carrier sees of a DDP bucket."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def refused(port: int) -> tuple[list[complex], dict[str, int]]:
    with group(port) as rank:
        model = DistributedDataParallel(build("mlp"))
        ringside.attach(model, monitor=False)
        hook = own_hook(model)
        buffer = torch.full((3,), complex(rank + 1, 1.0), dtype=torch.complex64)
        hook.reducer.reduce(Bucket(buffer)).wait()
        hook.reducer.wait()
        hook.reducer.pop_timings()
        return buffer.tolist(), dict(hook.reducer.counters)


def test_dtype_that_the_engine_refuses_goes_to_the_group_and_is_counted() -> None:
    for mean, counters in ddp_ranks(2, refused):
        assert mean == [1.5 + 1j] * 3
        assert counters == {"gloo": 1}


def native(port: int, plan: Plan) -> tuple[str, dict[str, int]]:
    with group(port) as rank:
        stock = train(plan, rank, attach=False)
        ours = train(plan, rank, attach=True, engine="native")
        return stock.difference(ours), ours.counters


@pytest.mark.parametrize("size", [2, 3])
def test_only_watching_changes_no_bit(size: int) -> None:
    for difference, counters in ddp_ranks(size, native, Plan("transformer")):
        assert difference == ""
        assert set(counters) == {"gloo"}


def paths(port: int) -> dict[str, Any]:
    with group(port) as rank:
        return train(Plan(steps=6, options={"bucket_cap_mb": 25, **VIEW}), rank, attach=True).counters


def test_buckets_travel_without_copies_after_the_first_backward() -> None:
    for counters in ddp_ranks(2, paths):
        assert counters == {"ringside/staged": 1, "ringside/push": 5}


def carried_here(port: int) -> tuple[list[list[bool]], list[bool]]:
    """Tell of each backward's buckets whether the thread that computed carried them, and of one nobody waits for."""
    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        model = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.001)
        here: list[bool] = []
        reduce = HostCommunicator.all_reduce_storage

        def noted(*args: Any, **named: Any) -> None:
            here.append(threading.get_ident() == threading.main_thread().ident)
            reduce(*args, **named)

        patch.setattr(HostCommunicator, "all_reduce_storage", noted)
        ringside.attach(model, monitor=False)
        carrier = own_hook(model).reducer
        carrier.patience_s = 600.0  # else the thread may come first where this one gets no processor
        backwards = []
        for _ in range(3):
            model(torch.randn(4, model.module[0].in_features)).sum().backward()
            backwards.append(list(here))
            here.clear()
        carrier.patience_s = 1e-3
        buffer = torch.full((3,), float(rank))
        carrier.reduce(Bucket(buffer)).wait()
        assert buffer.tolist() == [0.5] * 3
        return backwards, here


def test_the_last_bucket_is_carried_by_the_thread_that_waits_for_it() -> None:
    for backwards, alone in ddp_ranks(2, carried_here):
        assert all(len(buckets) > 1 for buckets in backwards[1:])  # the first backward has one giant bucket
        assert all(buckets[-1] for buckets in backwards)
        assert alone == [False]
