"""What is measured of a training step: overlap, exposed and total synchronisation, own time and wait of each rank."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.support.collective_log import drain  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside import _core  # noqa: E402
from ringside.monitor.collector import with_waits  # noqa: E402
from ringside.monitor.run.records import StepRecord  # noqa: E402
from ringside.pytorch.ddp.attached_model import own_hook  # noqa: E402
from ringside.pytorch.ddp.ringside_reducer import RingsideReducer  # noqa: E402

from .training import ddp_ranks, group, run_directory, small_attachment, steps  # noqa: E402

pytestmark = pytest.mark.native


class Worker(torch.autograd.Function):
    """Passes a tensor through and works in backward: an early layer that is slow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        work(ctx.times)
        return gradient, None


def work(times: int) -> None:
    """Compute: the same amount of work every time."""
    matrix = torch.ones(192, 192)
    for _ in range(times):
        matrix = (matrix @ matrix).clamp_(0, 1)


class SlowEarly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(64, 64)
        self.late = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(Worker.apply(self.early(x), 60))


def overlap(port: int) -> list[bool]:
    """Tell for each later step whether a bucket was done before backward had ended."""
    found = []
    with group(port):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(SlowEarly(), bucket_cap_mb=0.01)
        attachment, hook = ringside.attach(ddp, monitor=False), own_hook(ddp)
        assert hook is not None
        carrier, clock = hook.reducer, hook.clock
        assert isinstance(carrier, RingsideReducer)
        log = carrier.communicator.log
        totals, ended = log.totals, clock.backward_ends
        seen: dict[str, Any] = {}

        def drained() -> Any:
            seen["rows"] = drain(log.core)
            return totals()  # of nothing more

        def backward_ends() -> None:
            seen["ended"] = _core.native().now_ns()
            ended()

        log.totals, clock.backward_ends = drained, backward_ends
        for _ in range(6):
            ddp(torch.randn(4, 64)).square().mean().backward()
            first = seen["rows"][0]
            found.append(len(seen["rows"]) > 1 and first.submitted < first.done < seen["ended"])
        del log.totals
        attachment.detach()
    return found[1:]  # DDP's first backward has one bucket


def test_buckets_are_done_while_backward_still_computes() -> None:
    found = ddp_ranks(2, overlap)
    steps = [any(step) for step in zip(*found, strict=True)]  # of two that a busy machine holds up, the later one
    assert sum(steps) > len(steps) / 2, found


def records(port: int, engine: str, extra: int) -> list[StepRecord]:
    """Train; rank 1 does `extra` work in its forward."""
    kept: list[StepRecord] = []
    with group(port) as rank, run_directory() as path:
        ddp, attachment, optimizer = small_attachment(engine=engine, run_dir=path)
        attachment.session.on_record(kept.append)
        ddp.module.register_forward_pre_hook(lambda *_: work(40 + extra * rank))
        steps(ddp, optimizer, rank, 24)
        attachment.session.end()
    return kept


@pytest.mark.parametrize("engine", ["ringside", "native"])
def test_exposed_and_total_time_are_recorded_and_the_late_rank_waits_least(engine: str) -> None:
    by_rank = ddp_ranks(2, records, engine, 160)
    assert [len(rows) for rows in by_rank] == [24, 24]
    rows = [with_waits({0: a, 1: b}) for a, b in zip(*by_rank, strict=True)]
    for row in rows:
        for record in row.values():
            assert_consistent(record, engine)
    late = rows[4:]
    waits = [statistics.median(row[rank].wait_seconds for row in late) for rank in (0, 1)]
    own = [statistics.median(row[rank].own_seconds for row in late) for rank in (0, 1)]
    steps_ = [statistics.median(row[rank].step_seconds for row in late) for rank in (0, 1)]
    assert waits[0] > 4 * waits[1], (waits, own)
    assert own[1] > 1.5 * own[0]
    assert waits[0] > 0.3 * (own[1] - own[0]), "what one rank works more the other waits"
    assert 0.5 < steps_[0] / steps_[1] < 2
    share = sum(r.overhead_seconds for row in late for r in row.values()) / sum(
        r.step_seconds for row in late for r in row.values()
    )
    print(f"{engine}: the monitor's own time is {share:.2%} of a step")


def assert_consistent(record: StepRecord, engine: str) -> None:
    parts = (
        record.data_seconds
        + record.forward_seconds
        + record.backward_seconds
        + record.exposed_seconds
        + record.optimizer_seconds
    )
    assert parts == pytest.approx(record.step_seconds, rel=1e-6, abs=1e-9)
    assert record.own_seconds + record.exposed_seconds == pytest.approx(record.step_seconds, rel=1e-6)
    assert 0 <= record.wait_seconds <= record.exposed_seconds
    if engine == "ringside":
        assert record.sync_seconds > 0
        assert 0 <= record.wire_seconds <= record.sync_seconds + 1e-9
    else:
        assert math.isnan(record.sync_seconds)
        assert math.isnan(record.wire_seconds)
    assert 0 < record.overhead_seconds < record.step_seconds
    assert record.collectives >= 1
    assert record.payload_bytes > 0
    assert record.samples == 4
    assert record.cpu_seconds > 0
