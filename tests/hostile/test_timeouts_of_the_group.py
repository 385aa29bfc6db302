"""A process group that was made with a timeout waits no longer for a rank once its model is attached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.groups import own_machines  # noqa: E402
from tests.pytorch.training import LIMIT_S, Plan, build, ddp_ranks, group, one_step, steps  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.errors import SyncError  # noqa: E402

pytestmark = pytest.mark.native


def late(port: int, timeout_s: float | None, environ_s: float, later_s: float | None = None) -> str:
    """Return what a rank tells that waits for one which never comes; "waits": nothing, for a while.

    With `later_s` the group gets another timeout once the model is trained.
    """
    with group(port) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSIDE_TIMEOUT_S", str(environ_s))
        own = dist.new_group(timeout=timedelta(seconds=timeout_s)) if timeout_s else dist.new_group()
        model = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01, process_group=own)
        attachment = ringside.attach(model, monitor=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps(model, optimizer, rank, 2)
        assert all(name.startswith("ringside/") for name in attachment.counters)
        if later_s is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=later_s), own)
        told: list[str] = []
        if rank == 0:

            def step() -> None:
                try:
                    one_step(model, optimizer, Plan(), rank, 3)
                except SyncError as error:
                    told.append(type(error).__name__)

            thread = threading.Thread(target=step, daemon=True)
            thread.start()
            thread.join(LIMIT_S / 3)
        dist.barrier()  # the other rank waits here: it lives, and does not come
        attachment.detach()
        return told[0] if told else ""


def late_between(port: int, timeout_s: float | None, environ_s: float, later_s: float | None = None) -> str:
    with own_machines():
        return late(port, timeout_s, environ_s, later_s)


def test_the_timeout_of_the_group_counts_before_the_environment() -> None:
    assert ddp_ranks(2, late, 5.0, 1000.0) == ["DeadlineError", ""]


def test_between_hosts_too() -> None:
    assert ddp_ranks(2, late_between, 5.0, 1000.0) == ["DeadlineError", ""]


def test_the_environment_counts_where_the_script_gave_none() -> None:
    assert ddp_ranks(2, late, None, 1.0) == ["DeadlineError", ""]


@pytest.mark.parametrize("way", [late, late_between], ids=["one host", "between hosts"])
def test_a_timeout_that_is_set_later_counts_from_the_next_backward_on(way: Callable[..., str]) -> None:
    assert ddp_ranks(2, way, 1000.0, 1000.0, 4.0) == ["DeadlineError", ""]
