"""An attached model inside torch.compile: its replicas are compared as any other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.training import Plan, Said, build, ddp_ranks, group, one_step  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402

pytestmark = pytest.mark.native


def compiled(port: int, directory: str) -> list[Any]:
    with group(port) as rank, Said() as said:
        torch._dynamo.reset()
        model = DistributedDataParallel(build("mlp"))
        attachment = ringside.attach(model, run_dir=Path(directory), digest_every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        faster: Any = torch.compile(model, backend="eager")
        for step in range(8):
            if step == 4 and rank == 1:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] += 1.0
            one_step(faster, optimizer, Plan(), rank, step)
            optimizer.step()
        dist.barrier()
        assert attachment.session is not None
        attachment.session.end()
        return [said.about("not compared"), [verdict.kind for verdict in attachment.session.verdicts]]


def test_parameters_of_a_compiled_model_are_compared(tmp_path: Path) -> None:
    assert ddp_ranks(2, compiled, str(tmp_path / "run")) == [[[], ["diverged"]], [[], []]]
