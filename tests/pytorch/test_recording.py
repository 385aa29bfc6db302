"""What a real job records of its collectives, and the answers that its summary gives, over both engines."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.monitor.job.questions import QUESTIONS  # noqa: E402
from ringside.monitor.run.directory import RunReader  # noqa: E402

from .training import ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native

LAYERS = 24


def trains(port: int, path: str, engine: str) -> None:
    with group(port):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        session = ringside.attach(ddp, run_dir=path, engine=engine).session
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            ddp(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
        session.end()


@pytest.mark.parametrize("engine", ["ringside", "native"])
def test_many_tiny_buckets_are_counted_timed_and_answered_for(tmp_path: Path, engine: str) -> None:
    ddp_ranks(2, trains, str(tmp_path / "run"), engine)
    records = [record for record in RunReader(tmp_path / "run").poll() if record.step >= 8]
    assert all(record.collectives == LAYERS for record in records)
    if engine == "ringside":
        # The engine's clock stops before Python's, which a rank that is preempted in between reads late.
        ratios = [record.busy_seconds / record.sync_seconds for record in records]
        assert min(ratios) > 0
        assert statistics.median(ratios) <= 1.01
        assert any(0 < record.latency_seconds < record.busy_seconds for record in records)
    else:
        assert all(math.isnan(record.busy_seconds) for record in records)
    assert all(record.wires == () for record in records)  # all of it stays on this host
    questions: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())["questions"]
    assert questions.keys() == QUESTIONS.keys()
    assert questions["network_between_hosts"]["answer"] is False
    numbers = questions["small_collectives"]["numbers"]
    assert numbers["collectives_per_step"] == LAYERS
    assert numbers["bytes_each"] == 4 * (32 * 32 + 32)
    print(engine, questions["small_collectives"])
